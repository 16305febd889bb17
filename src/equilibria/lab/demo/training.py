"""The demo's trainings: settings, and the recipe of each arm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from equilibria.errors import one_of, whole
from equilibria.theory import SGD

if TYPE_CHECKING:
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.optimizer import Optimizer

    from equilibria.lab.data import ImageSet
    from equilibria.lab.training import Recipe

PLAIN, RESCALED, LESS_DECAY = "plain", "rescaled", "less_decay"
ARMS = (PLAIN, RESCALED, LESS_DECAY)
_STATISTICS = (2, 256)  # batches and images in each, for BatchNorm's statistics in evaluations


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """SGD with momentum on noisy digits, with one drop of the learning rate.

    lr * weight_decay is large, so that a layer settles in tens of steps before the drop and in hundreds after it. The
    labels are noisy, so that the network cannot memorise them, which would make the gradient vanish.

    Attributes:
        seed: of the first weights, the order of the images and the label noise.
        lr: learning rate before the drop.
        drop: divisor of the learning rate at the drop.
        weight_decay: of the convolutions; BatchNorm and the last layer have none.
        momentum: of all parameters.
        batch_size: images per step.
        label_noise: share of labels replaced by random ones, drawn for every batch.
        width: channels of the network's first stage.
        blocks: residual blocks in each stage.
        steps_before: steps until the drop.
        steps_after: steps after it; a layer needs about 2,200 to return to within 5 % of equilibrium.
        steady_window: steps at the end of each phase over which angles are averaged.
        drop_window: steps right after the drop over which angles are averaged.
        measure_every: steps from one measurement of the test accuracy to the next.
    """

    seed: int = 0
    lr: float = 0.1
    drop: float = 10.0
    weight_decay: float = 5e-3
    momentum: float = 0.9
    batch_size: int = 64
    label_noise: float = 0.3
    width: int = 8
    blocks: tuple[int, ...] = (1, 1)
    steps_before: int = 1000
    steps_after: int = 2400
    steady_window: int = 400
    drop_window: int = 100
    measure_every: int = 50

    def __post_init__(self) -> None:
        whole("seed", self.seed)
        whole("steps_before", self.steps_before, low=self.steady_window)
        whole("steps_after", self.steps_after, low=max(self.steady_window, self.drop_window))
        whole("measure_every", self.measure_every, low=1)

    @property
    def steps(self) -> int:
        """All steps."""
        return self.steps_before + self.steps_after

    @property
    def rule_before(self) -> SGD:
        """The rule of the convolutions before the drop."""
        return SGD(self.lr, self.weight_decay, momentum=self.momentum)

    def rule_after(self, arm: str) -> SGD:
        """The rule of the convolutions after the drop."""
        weight_decay = self.weight_decay / self.drop if arm == LESS_DECAY else self.weight_decay
        return SGD(self.lr / self.drop, weight_decay, momentum=self.momentum)


def arm_recipe(settings: DemoSettings, arm: str) -> Recipe:
    """The training of one arm, from the first weights to its end; all arms are the same until the drop."""
    from equilibria.lab.data import Batches, load_digits
    from equilibria.lab.nets import BasicBlockResNet
    from equilibria.lab.training import Evaluation, Recipe, drops

    digits = load_digits()
    return Recipe(
        model=lambda: BasicBlockResNet(settings.width, settings.blocks),
        optimizer=lambda model: _optimizer(settings, model),
        data=Batches.of_images(
            digits, batch_size=settings.batch_size, label_noise=settings.label_noise, seed=settings.seed
        ),
        steps=settings.steps,
        seed=settings.seed,
        schedule=drops([settings.steps_before], settings.drop),
        control=_control(settings, one_of("arm", arm, ARMS), digits),
        measures={"test": Evaluation.of_images(digits, statistics=_STATISTICS)},
        measure_every=settings.measure_every,
        watch_every=1,
    )


def convolution_names(model: nn.Module) -> list[str]:
    """Names of the convolutions' weights, which BatchNorm makes scale-invariant."""
    return [name for name, weight in model.named_parameters() if weight.ndim == 4]


def _optimizer(settings: DemoSettings, model: nn.Module) -> Optimizer:
    import torch

    from equilibria.lab.training import decay_groups

    groups = decay_groups(
        model, convolution_names(model), lr=settings.lr, weight_decay=settings.weight_decay, other_lr=settings.lr
    )
    return torch.optim.SGD(groups, momentum=settings.momentum)


def _control(
    settings: DemoSettings, arm: str, digits: ImageSet
) -> Callable[[LRScheduler, nn.Module], LRScheduler] | None:
    from equilibria.control import RescaleOnDecay, WeightDecayScheduler

    def rescale(scheduler: LRScheduler, model: nn.Module) -> LRScheduler:
        example = digits.train_images[: settings.batch_size]
        return RescaleOnDecay(scheduler, model=model, invariant=convolution_names(model), example=example)

    # The equilibrium angle goes with sqrt(lr wd), the equilibrium norm with (lr / wd)^(1/4). If weight decay is divided
    # by the same factor as lr, the norm is already right and the angle falls by that factor, as the lr alone suggests:
    # the layers are in their new equilibrium at once and do not turn faster again.
    def lower_decay(scheduler: LRScheduler, model: nn.Module) -> LRScheduler:
        levels = (settings.weight_decay, settings.weight_decay / settings.drop)
        return WeightDecayScheduler(scheduler, schedule=lambda step: levels[step >= settings.steps_before])

    return {PLAIN: None, RESCALED: rescale, LESS_DECAY: lower_decay}[arm]

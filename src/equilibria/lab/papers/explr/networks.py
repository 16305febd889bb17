"""Trainings of explr-constant, -stepdecay, -cosine, -v2 and -angle: the work of their tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import one_of
from equilibria.lab.harness.experiment import Arrays
from equilibria.lab.harness.task import device, progress_reporter, scratch

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.optimizer import Optimizer

    from equilibria.lab.data import ImageSet
    from equilibria.lab.training import Recipe, Trained, Training

DECAY, ROUNDED, FOLDED, TEXP, TEXP_V2 = "decay", "rounded", "folded", "texp", "texp-v2"
WAYS = (DECAY, ROUNDED, FOLDED, TEXP, TEXP_V2)
STEPS, COSINE = "steps", "cosine"
_INVARIANT = {"preresnet": (".conv1.weight", "shortcut.0.weight", "head.weight"), "resnet": (".conv.weight",)}
_SHOWN = {"preresnet": "blocks.1.conv1.weight", "resnet": "blocks.1.first.conv.weight"}  # the one of the paper's fig. 1


@dataclass(frozen=True)
class Variant:
    """A line of a figure.

    Attributes:
        name: in keys and legends.
        way: "decay": SGD with weight decay; "rounded": the same from first weights that are one rounding larger;
            "folded": without weight decay, the learning rate growing exactly as it must; "texp", "texp-v2": growing by
            the rules of the paper's equations 5 and 7.
        schedule: of the learning rate with weight decay: "steps" or "cosine".
        drops_at: steps at which "steps" divides it.
        divisor: by how much.
        raises_decay: at a drop weight decay is multiplied, so that its product with the learning rate stays.
        keeps_lr: at a drop weight decay is divided and the learning rate stays.
    """

    name: str
    way: str = DECAY
    schedule: str = STEPS
    drops_at: tuple[int, ...] = ()
    divisor: float = 10.0
    raises_decay: bool = False
    keeps_lr: bool = False

    def __post_init__(self) -> None:
        one_of("way", self.way, WAYS)
        one_of("schedule", self.schedule, (STEPS, COSINE))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Network, data and optimizer. At desk scale CIFAR-10 at 8x8 pixels, three blocks, ten times the paper's decay.

    With it a layer settles in 50 to 100 steps, the paper's in ten times as many: a thousand steps are some 20 settling
    times, of which the paper's first phase has 63.
    The network "resnet" has fixed scales and shifts and a fixed linear layer, as the paper has it: every weight that is
    trained is scale-invariant alone. In "preresnet" first convolutions, shortcuts and the linear layer are; the other
    weights have no weight decay in any run.
    """

    variants: tuple[Variant, ...]
    seeds: tuple[int, ...] = (20, 21, 22)
    network: str = "resnet"
    data: str = "cifar10"
    size: int = 8
    depth: int = 8
    width: int = 16
    batch_size: int = 128
    flip: bool = True
    crop: int = 0
    lr: float = 0.1
    weight_decay: float = 5e-3
    momentum: float = 0.9
    steps: int = 2400
    epoch: int = 100
    watch_every: int = 5
    statistics: tuple[int, int] = (8, 400)
    train_images: int = 3200
    renormalise: bool = True

    def __post_init__(self) -> None:
        one_of("network", self.network, list(_INVARIANT))
        one_of("data", self.data, ["cifar10", "digits"])

    def factor(self, variant: Variant, step: int) -> float:
        """What the schedule multiplies the learning rate by; the cosine changes once per epoch, as in the paper."""
        if variant.schedule == COSINE:
            return (1 + math.cos(math.pi * (step // self.epoch * self.epoch) / self.steps)) / 2
        return float(variant.divisor ** -sum(step >= at for at in variant.drops_at))


def key(variant: Variant, seed: int) -> str:
    """Name of a task."""
    return f"{variant.name}-{seed}"


def tasks(config: Setting) -> dict[str, tuple[int, int]]:
    """Place of the variant, and seed: one training each."""
    return {key(variant, seed): (at, seed) for at, variant in enumerate(config.variants) for seed in config.seeds}


def load(config: Setting) -> ImageSet:
    """The images, standardised."""
    from equilibria.lab.data import cifar10, load_digits

    return load_digits() if config.data == "digits" else cifar10(size=config.size).standardised()


def run_task(config: Setting, task: tuple[int, int]) -> Arrays:
    """One training: its curves, and the angle of every scale-invariant layer."""
    from equilibria.lab.training import by_layer, train

    at, seed = task
    trained: Trained = train(
        recipe(config, config.variants[at], seed=seed, images=load(config)),
        folder=scratch(),
        progress=progress_reporter(config.steps),
    )
    layers = by_layer(trained.samples, ["angle"])
    return {**trained.curves, "layer_angle": layers.columns["angle"], "sampled_step": layers.step}


def recipe(config: Setting, variant: Variant, *, seed: int, images: ImageSet) -> Recipe:
    """All variants of a seed have the same first weights and the same data in the same order."""
    import torch

    from equilibria.lab.data import Batches
    from equilibria.lab.training import Evaluation, Recipe

    count, size = config.statistics
    plain = torch.split(images.train_images[: count * size], size)
    some = (images.train_images[: config.train_images], images.train_labels[: config.train_images])
    with torch.device("meta"):  # draws nothing
        names = invariant_names(config, network(config, images))
    return Recipe(
        model=lambda: _first(config, variant, images),
        optimizer=lambda model: _optimizer(config, model),
        data=Batches(
            images.train_images,
            images.train_labels,
            batch_size=config.batch_size,
            classes=images.classes,
            seed=seed,
            flip=config.flip,
            crop=config.crop,
        ),
        steps=config.steps,
        seed=seed,
        schedule=lambda step: 1.0 if variant.keeps_lr else config.factor(variant, step),
        control=_control(config, variant, images),
        measures={
            "sets": Evaluation(plain, test=(images.test_images, images.test_labels), train=some),
            "layer": ShownLayer(_SHOWN[config.network]),
            "epoch": EpochAngles(names),
        },
        measure_every=config.epoch,
        watch_every=config.watch_every,
        watch_select=names,
        device=device(),
    )


def network(config: Setting, images: ImageSet) -> nn.Module:
    """Fresh weights from torch's generator."""
    from equilibria.lab.nets import BasicBlockResNet, PreActivationResNet

    shape: dict[str, Any] = {"in_channels": images.train_images.shape[1], "classes": images.classes}
    if config.network == "preresnet":
        return PreActivationResNet(config.depth, config.width, scale_invariant=True, **shape)
    model = BasicBlockResNet(config.width, ((config.depth - 2) // 6,) * 3, **shape)
    trained = set(invariant_names(config, model))
    for name, param in model.named_parameters():
        param.requires_grad_(name in trained)
    return model


def invariant_names(config: Setting, model: nn.Module) -> list[str]:
    """The weights that are scale-invariant alone."""
    return [name for name, _ in model.named_parameters() if name.endswith(_INVARIANT[config.network])]


def _first(config: Setting, variant: Variant, images: ImageSet) -> nn.Module:
    import torch

    model = network(config, images)
    if variant.way == ROUNDED:
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param.copy_(torch.nextafter(param, torch.full_like(param, torch.inf)))
    return model


def _optimizer(config: Setting, model: nn.Module) -> Optimizer:
    import torch

    from equilibria.lab.training import decay_groups

    groups = decay_groups(
        model, invariant_names(config, model), lr=config.lr, weight_decay=config.weight_decay, other_lr=config.lr
    )
    return torch.optim.SGD(groups, momentum=config.momentum)


def _control(
    config: Setting, variant: Variant, images: ImageSet
) -> Callable[[LRScheduler, nn.Module], LRScheduler] | None:
    from equilibria.control._folded_weight_decay import FoldedWeightDecay
    from equilibria.control._tapered_exponential import TaperedExponential
    from equilibria.control._weight_decay_scheduler import WeightDecayScheduler

    def scheduled_decay(scheduler: LRScheduler, model: nn.Module) -> LRScheduler:
        power = -1 if variant.raises_decay else 1
        return WeightDecayScheduler(
            scheduler, lambda step: config.weight_decay * config.factor(variant, int(step)) ** power
        )

    def folded(scheduler: LRScheduler, model: nn.Module) -> LRScheduler:
        options: dict[str, Any] = {
            "invariant": invariant_names(config, model),
            "example": images.train_images[: config.batch_size].to(device()),
            "renormalise": config.renormalise,
        }
        if variant.way == FOLDED:
            return FoldedWeightDecay(scheduler, model=model, **options)
        return TaperedExponential(scheduler, model=model, instant_drop=variant.way == TEXP, **options)

    if variant.raises_decay or variant.keeps_lr:
        return scheduled_decay
    return None if variant.way in (DECAY, ROUNDED) else folded


class ShownLayer:
    """A `Measure`: squared norm of one layer and the learning rate of the last step, powers of two put back in."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, training: Training) -> dict[str, float]:
        """See `Measure`."""
        group = training.optimizer.param_groups[0]
        lr = float(training.scheduler.get_last_lr()[0])
        taken_out = 4.0 ** group.get("fold_exponent", 0)
        weight = training.model.get_parameter(self._name).detach().double()
        return {"norm_sq": float(weight.square().sum()) * taken_out, "lr": lr * taken_out}


class EpochAngles:
    """A `Measure`: by how much each layer turned since the last measurement, radians; nan the first time."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._last: list[Tensor] = []

    def __call__(self, training: Training) -> dict[str, NDArray[np.float64]]:
        """See `Measure`."""
        weights = [training.model.get_parameter(name).detach().clone() for name in self._names]
        angles = [angle(*pair) for pair in zip(self._last, weights, strict=True)] if self._last else None
        self._last = weights
        return {"epoch_angle": np.array(angles) if angles else np.full(len(weights), np.nan)}

    def state_dict(self) -> dict[str, Any]:
        """The weights of the last time."""
        return {"last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._last = list(state["last"])


def angle(one: Tensor, other: Tensor) -> float:
    """Between two tensors, radians; from the chord, which keeps the digits of small angles.

    Example:
        >>> import torch
        >>> round(angle(torch.tensor([2.0, 0.0]), torch.tensor([3.0, 3e-5])) * 1e5, 6)
        1.0
    """
    first, second = (each.double() / each.double().norm() for each in (one, other))
    return 2 * math.asin(min(float((first - second).norm()) / 2, 1.0))

"""Image trainings of explr-constant, -stepdecay, -cosine, -v2 and -angle: settings, tasks and recipes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import one_of
from equilibria.lab.harness.experiment import Arrays
from equilibria.lab.harness.task import device, train_in_task

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.optimizer import Optimizer

    from equilibria.lab.data import ImageSet
    from equilibria.lab.training import Recipe, Training

DECAY, ROUNDED, FOLDED, TEXP, TEXP_V2 = "decay", "rounded", "folded", "texp", "texp-v2"
WAYS = (DECAY, ROUNDED, FOLDED, TEXP, TEXP_V2)
STEPS, COSINE = "steps", "cosine"
_INVARIANT = {"preresnet": (".conv1.weight", "shortcut.0.weight", "head.weight"), "resnet": (".conv.weight",)}
_SHOWN = {"preresnet": "blocks.1.conv1.weight", "resnet": "blocks.1.first.conv.weight"}  # the one of the paper's fig. 1


@dataclass(frozen=True)
class Variant:
    """One line of a figure.

    Attributes:
        name: in keys and legends.
        way: "decay": SGD with weight decay; "rounded": the same, with first weights one rounding larger; "folded": no
            weight decay, at the exactly equivalent growing learning rate; "texp", "texp-v2": no weight decay, at the
            learning rates of the paper's equations 5 and 7.
        schedule: of the learning rate with weight decay: "steps" or "cosine".
        drops_at: steps at which "steps" divides the learning rate.
        divisor: of the learning rate at a drop.
        raises_decay: whether a drop multiplies weight decay by the divisor, so that lr * wd stays the same.
        keeps_lr: whether a drop divides weight decay in place of the learning rate.
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

    A layer settles in 50 to 100 steps, ten times sooner than in the paper: a thousand steps are about 20 settling
    times; the paper's first phase has 63.
    The network "resnet" has fixed scales, shifts and linear layer, as in the paper, so that every trained weight is
    scale-invariant by itself. In "preresnet" this holds for first convolutions, shortcuts and the linear layer; no
    other weight decays in any run.
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
        """Factor of the learning rate at a step; the cosine changes once per epoch, as in the paper."""
        if variant.schedule == COSINE:
            return (1 + math.cos(math.pi * (step // self.epoch * self.epoch) / self.steps)) / 2
        return float(variant.divisor ** -sum(step >= drop for drop in variant.drops_at))


SMOKE: Mapping[str, Any] = {
    "seeds": (0, 1, 2),
    "data": "digits",
    "width": 4,
    "batch_size": 16,
    "flip": False,
    "steps": 10,
    "epoch": 5,
    "watch_every": 1,
    "statistics": (1, 64),
    "train_images": 64,
}
"""Settings that all experiments share at the smallest scale."""
EPOCH = 390  # full batches of 128 among 50,000 images; the paper's 391 include the last batch of 80, dropped here
PAPER: Mapping[str, Any] = {"size": 32, "depth": 32, "crop": 4, "weight_decay": 5e-4, "epoch": EPOCH}
"""The paper's settings: depth 32, lr 0.1, weight decay 5e-4, momentum 0.9, batches of 128.

The network is that of the desk scale, a ResNet with fixed scales, shifts and linear layer: as in the paper's
PreResNet-32 every trained weight is scale-invariant and decays; unlike there, each is invariant by itself.
"""


def key(variant: Variant, seed: int) -> str:
    """Key of a task."""
    return f"{variant.name}-{seed}"


def tasks(config: Setting) -> dict[str, tuple[int, int]]:
    """Index of the variant, and seed: one training each."""
    return {key(variant, seed): (place, seed) for place, variant in enumerate(config.variants) for seed in config.seeds}


def load(config: Setting) -> ImageSet:
    """Load the images, standardised."""
    from equilibria.lab.data import load_images

    return load_images(config.data, size=config.size)


def run_task(config: Setting, task: tuple[int, int]) -> Arrays:
    """Train once: the curves, and the angle of every scale-invariant layer."""
    from equilibria.lab.training import by_layer

    place, seed = task
    trained = train_in_task(recipe(config, config.variants[place], seed=seed, images=load(config)))
    layers = by_layer(trained.samples, ["angle"])
    return {**trained.curves, "layer_angle": layers.columns["angle"], "sampled_step": layers.step}


def recipe(config: Setting, variant: Variant, *, seed: int, images: ImageSet) -> Recipe:
    """The recipe of a variant; variants of one seed share their first weights and the order of the data."""
    import torch

    from equilibria.lab.data import Batches
    from equilibria.lab.training import Evaluation, Recipe

    with torch.device("meta"):  # draws nothing
        names = invariant_names(config, network(config, images))
    return Recipe(
        model=lambda: _first(config, variant, images),
        optimizer=lambda model: _optimizer(config, model),
        data=Batches.of_images(images, batch_size=config.batch_size, seed=seed, flip=config.flip, crop=config.crop),
        steps=config.steps,
        seed=seed,
        schedule=lambda step: 1.0 if variant.keeps_lr else config.factor(variant, step),
        control=_control(config, variant, images),
        measures={
            "sets": Evaluation.of_images(images, statistics=config.statistics, train_images=config.train_images),
            "layer": ShownLayer(_SHOWN[config.network]),
            "epoch": EpochAngles(names),
        },
        measure_every=config.epoch,
        watch_every=config.watch_every,
        watch_select=names,
        device=device(),
    )


def network(config: Setting, images: ImageSet) -> nn.Module:
    """The network, with first weights from torch's generator."""
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
    """Names of the weights that are scale-invariant one by one."""
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
    """A `Measure`: squared norm of one layer and last learning rate, powers of two that were divided out included."""

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
    """A `Measure`: the angle by which each layer turned since the previous measurement, radians; NaN the first time."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._last: list[Tensor] = []

    def __call__(self, training: Training) -> dict[str, NDArray[np.float64]]:
        """See `Measure`."""
        from equilibria.lab.training import angle_between

        weights = [training.model.get_parameter(name).detach().clone() for name in self._names]
        angles = [angle_between(*pair) for pair in zip(self._last, weights, strict=True)] if self._last else None
        self._last = weights
        return {"epoch_angle": np.array(angles) if angles else np.full(len(weights), np.nan)}

    def state_dict(self) -> dict[str, Any]:
        """The weights at the previous measurement."""
        return {"last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._last = list(state["last"])

"""Gradient descent with weight decay on networks, over all images at once: the tasks of sharp-vgg, -resnet, -ablations.

What judges and draws them is apart, so that it can change without repeating them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError, one_of
from equilibria.lab.harness.experiment import Arrays
from equilibria.lab.harness.task import device, progress_reporter, scratch
from equilibria.theory.generalization import final_bn_scale

if TYPE_CHECKING:
    from torch import Tensor, nn

    from equilibria.lab.data import ImageSet
    from equilibria.lab.training import Measure, Recipe, Training

DATA = ("cifar10", "cifar10-2k", "digits")
VGG, INVARIANT_RESNET, STANDARD_RESNET = "vgg", "invariant resnet", "standard resnet"
NETWORKS = (VGG, INVARIANT_RESNET, STANDARD_RESNET)
# Appendix Q.1: 0.3 ln 91. With ten classes that is a label smoothing of 0.1; with four it is a softer target.
FINAL_SCALE = float(final_bn_scale(0.1, 10))
_SHARPNESS_TOLERANCE = 0.02  # of its relative error; the effects are far larger
_SYMMETRY_IMAGES = 32

Part = tuple[int, int]
"""Up to which step, and how many steps from one measurement to the next; each is of two steps, see `_BothSteps`."""


@dataclass(frozen=True)
class Variant:
    """One way to descend: torch.optim.SGD with all images at every step, ``w <- (1 - lr wd) w - lr g``."""

    name: str
    lr: float
    weight_decay: float
    parts: tuple[Part, ...]
    network: str = VGG
    scale: float = FINAL_SCALE

    @property
    def steps(self) -> int:
        """In all."""
        return self.parts[-1][0]

    @property
    def intrinsic_lr(self) -> float:
        """The product of learning rate and weight decay: what a step forgets."""
        return self.lr * self.weight_decay


@dataclass(frozen=True)
class Config:
    """Images, networks and windows. A seed has first weights and, with ``per_class``, a block of images of its own.

    Attributes:
        variants: each is run with every seed.
        seeds: of the first weights; also which block of images.
        early: window of steps in which the images are fitted and nothing else has happened yet.
        late: window of steps at the end.
        middle: window of steps in between, well within the edge of stability.
        closer: window of steps that is measured closely, as in fig. 12; empty if it begins where it ends.
        data: "cifar10", "cifar10-2k" or "digits".
        classes: which, by label; () for all.
        per_class: training images of each class; 0 for all.
        size: of the images.
        width: of the first stage of a network.
        stages: convolutions in each stage of the VGG.
        depth: of the residual networks.
        ghost: images that BatchNorm sees together; 0 for all.
        hessian_images: how many of the first images the sharpness is measured on; 0 for all.
    """

    variants: tuple[Variant, ...]
    seeds: tuple[int, ...] = (20, 21, 22)
    early: tuple[int, int] = (200, 400)
    middle: tuple[int, int] = (1000, 1400)
    late: tuple[int, int] = (2600, 3200)
    closer: tuple[int, int] = (0, 0)
    data: str = "cifar10"
    classes: tuple[int, ...] = (0, 1, 2, 3)
    per_class: int = 125
    size: int = 16
    width: int = 8
    stages: tuple[int, ...] = (1, 1, 2, 2)
    depth: int = 20
    ghost: int = 0
    hessian_images: int = 0

    def __post_init__(self) -> None:
        one_of("data", self.data, DATA)
        for variant in self.variants:
            one_of("network", variant.network, NETWORKS)
            if variant.steps < self.late[0]:
                raise EquilibriaError(
                    f"got late={self.late}; expected it within the {variant.steps} steps of {variant.name}"
                )


def key(variant: Variant, seed: int) -> str:
    """Name of a task."""
    return f"{variant.name.replace(' ', '-').replace('=', '-')}-{seed}"


def tasks(config: Config) -> dict[str, tuple[int, int]]:
    """Place of the variant, and seed."""
    return {key(variant, seed): (place, seed) for place, variant in enumerate(config.variants) for seed in config.seeds}


def load(config: Config, *, seed: int = 0) -> ImageSet:
    """The images of a seed, standardised."""
    from equilibria.lab.data import cifar10, cifar10_2k, load_digits

    classes = config.classes or None
    if config.data == "digits":
        found = load_digits() if classes is None else load_digits().select_classes(classes)
        return found.per_class(config.per_class, block=seed) if config.per_class else found
    if config.data == "cifar10-2k":
        return cifar10_2k(size=config.size, classes=classes).standardised()
    found = cifar10(size=config.size, classes=classes)
    return (found.per_class(config.per_class, block=seed) if config.per_class else found).standardised()


def run_task(config: Config, task: tuple[int, int]) -> Arrays:
    """One descent; its parts are measured at different intervals, and one goes on where the other ends."""
    from equilibria.lab.training import train

    place, seed = task
    variant, images, folder = config.variants[place], load(config, seed=seed), scratch()
    tell = progress_reporter(variant.steps)
    found: list[Mapping[str, NDArray[np.float64]]] = []
    state: dict[str, Any] | None = None
    for number, part in enumerate(variant.parts):
        made = recipe(config, variant, seed=seed, images=images, part=part)
        trained = train(made, folder=folder / str(number), start=state, progress=tell)
        found.append(trained.curves)
        state = trained.state
    return {name: np.concatenate([curves[name] for curves in found]) for name in found[0]}


def recipe(config: Config, variant: Variant, *, seed: int, images: ImageSet, part: Part) -> Recipe:
    """The descent up to a step."""
    import torch

    from equilibria.lab.training import Evaluation, FullBatch, Recipe, SharpnessMeasure

    until, every = part
    train = _fast(images.train_images), images.train_labels
    statistics = [inputs for inputs, _ in _chunks(config, train)]
    select = None if variant.network != STANDARD_RESNET else invariant_part(config, variant, images)
    count = config.hessian_images or len(train[0])
    seen = _chunks(config, (train[0][:count], train[1][:count]))
    return Recipe(
        model=lambda: network(config, variant, images),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=variant.lr, weight_decay=variant.weight_decay),
        data=FullBatch(*train),
        chunk=config.ghost or None,
        steps=until,
        seed=seed,
        measures={
            "train": _BothSteps(lambda: Evaluation(statistics, train=train), variant),
            "test": Evaluation(statistics, test=(_fast(images.test_images), images.test_labels)),
            "sharpness": _BothSteps(
                lambda: SharpnessMeasure(
                    seen if len(seen) > 1 else seen[0], select=select, spherical=True, tol=_SHARPNESS_TOLERANCE
                ),
                variant,
            ),
            "gradient": _GradientNorm(select),
        },
        measure_every=every,
        device=device(),
    )


class _BothSteps:
    """A `Measure`: another one at the present weights and, with "_before" in its names, at those a step earlier.

    At the edge of stability every step crosses the valley: measured at even steps only, everything is of one side.
    The weights before are the present ones with the last step undone, but for rounding; before the first step they are
    the same. What a measure remembers is of one side, too, so each has its own: a third fewer products than with one.
    """

    def __init__(self, make: Callable[[], Measure], variant: Variant) -> None:
        self._now, self._before, self._variant = make(), make(), variant

    def __call__(self, training: Training) -> dict[str, Any]:
        """See `Measure`."""
        with _undone(training.model, self._variant):
            before = self._before(training)
        return {**self._now(training), **{f"{name}_before": value for name, value in before.items()}}

    def state_dict(self) -> dict[str, Any]:
        """Of both, if they have one."""
        return {name: each.state_dict() for name, each in self._remembering().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        for name, each in self._remembering().items():
            each.load_state_dict(state[name])

    def _remembering(self) -> dict[str, Any]:
        return {
            name: each
            for name, each in (("now", self._now), ("before", self._before))
            if hasattr(each, "load_state_dict")
        }


@contextmanager
def _undone(model: nn.Module, variant: Variant) -> Iterator[None]:
    """Within it, the weights are those that the last step was taken from."""
    import torch

    moved = [(param, param.grad) for param in model.parameters() if param.grad is not None]
    held = [param.detach().clone() for param, _ in moved]
    with torch.no_grad():
        for param, grad in moved:
            param.add_(grad, alpha=variant.lr).div_(1 - variant.intrinsic_lr)
    try:
        yield
    finally:
        with torch.no_grad():
            for (param, _), value in zip(moved, held, strict=True):
                param.copy_(value)


class _GradientNorm:
    """A `Measure`: the squared norm of the gradient that the last step was taken with, NaN before the first one."""

    def __init__(self, select: Sequence[str] | None) -> None:
        self._select = select

    def __call__(self, training: Training) -> dict[str, float]:
        """See `Measure`."""
        params = dict(training.model.named_parameters())
        grads = [params[name].grad for name in self._select or params]
        return {"grad_norm_sq": sum(float("nan") if grad is None else float(grad.square().sum()) for grad in grads)}


def invariant_part(config: Config, variant: Variant, images: ImageSet) -> list[str]:
    """Names of the largest part of a network that is scale-invariant as a whole, as the paper's w of (w, z)."""
    import torch
    from torch.nn import functional

    from equilibria.objectives._isolation import preserved_rng
    from equilibria.objectives._objective import objective
    from equilibria.symmetry import symmetries

    with preserved_rng():
        torch.manual_seed(0)
        model = network(config, variant, images)
    some = images.train_images[:_SYMMETRY_IMAGES], images.train_labels[:_SYMMETRY_IMAGES]
    part = symmetries(objective(model, functional.cross_entropy), [some]).largest_uniform()
    return [name for name, _ in model.named_parameters() if name in part]


def network(config: Config, variant: Variant, images: ImageSet) -> nn.Module:
    """With first weights as torch draws them."""
    import torch

    from equilibria.lab.nets import PreActivationResNet, ScaleInvariantVGG

    shape: dict[str, Any] = {
        "in_channels": images.train_images.shape[1],
        "classes": images.classes,
        "scale": variant.scale,
    }
    net: nn.Module
    if variant.network == VGG:
        net = ScaleInvariantVGG(config.width, config.stages, **shape)
    else:
        invariant = variant.network == INVARIANT_RESNET
        net = PreActivationResNet(config.depth, config.width, scale_invariant=invariant, **shape)
    fast: nn.Module = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return fast


def _fast(images: Tensor) -> Tensor:
    """A quarter faster in convolutions."""
    import torch

    return images.contiguous(memory_format=torch.channels_last)


def _chunks(config: Config, batch: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """What BatchNorm sees together."""
    import torch

    inputs, labels = batch
    size = config.ghost or len(inputs)
    return list(zip(torch.split(inputs, size), torch.split(labels, size), strict=True))

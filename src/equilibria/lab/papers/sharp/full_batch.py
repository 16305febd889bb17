"""Full-batch gradient descent with weight decay on networks, for sharp-vgg, -resnet and -ablations.

Settings, tasks and recipes first; then reading a descent, the claims that several experiments make, and the panels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError, one_of
from equilibria.lab.harness.claim import Claim, Source, comparison, demanded_if
from equilibria.lab.harness.experiment import Arrays, Outcome, TaskResults, later
from equilibria.lab.harness.figures import POINTS, THEORY, Array, Window, draw_seeds, label_panel
from equilibria.lab.harness.task import device, progress_reporter, scratch
from equilibria.theory.generalization import final_bn_minimum, final_bn_scale
from equilibria.theory.stability import effective_lr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor, nn

    from equilibria.lab.data import ImageSet
    from equilibria.lab.training import Measure, Recipe, Training

DATA = ("cifar10", "cifar10-2k", "digits")
VGG, INVARIANT_RESNET, STANDARD_RESNET = "vgg", "invariant resnet", "standard resnet"
NETWORKS = (VGG, INVARIANT_RESNET, STANDARD_RESNET)
# Appendix Q.1: 0.3 ln 91. With ten classes that is a label smoothing of 0.1; with four it is a softer target.
FINAL_SCALE = float(final_bn_scale(0.1, 10))
_SHARPNESS_TOLERANCE = 0.02  # relative; the effects are far larger
_SYMMETRY_IMAGES = 32

Part = tuple[int, int]
"""Last step, and number of steps between measurements; each measurement covers two steps, see `_BothSteps`."""


@dataclass(frozen=True)
class DescentVariant:
    """A descent: torch.optim.SGD with all images at every step, ``w <- (1 - lr wd) w - lr g``."""

    name: str
    lr: float
    weight_decay: float
    parts: tuple[Part, ...]
    network: str = VGG
    scale: float = FINAL_SCALE

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.parts[-1][0]

    @property
    def intrinsic_lr(self) -> float:
        """lr * wd: the share of the weights that a step removes."""
        return self.lr * self.weight_decay


@dataclass(frozen=True)
class Config:
    """Images, networks and windows. Each seed has other first weights and, with ``per_class``, other images.

    Attributes:
        variants: each runs with every seed.
        seeds: of the first weights and of the block of images.
        early: window of steps right after the images are fitted.
        late: window of steps at the end.
        middle: window of steps in between, at the edge of stability.
        closer: window of steps that is measured closely, as in fig. 12; empty if it begins where it ends.
        data: "cifar10", "cifar10-2k" or "digits".
        classes: labels of the classes; () for all.
        per_class: training images of each class; 0 for all.
        size: of the images.
        width: of the first stage of a network.
        stages: convolutions in each stage of the VGG.
        depth: of the residual networks.
        ghost: images per batch of BatchNorm; 0 for all.
        hessian_images: number of images, from the first on, for the sharpness; 0 for all.
        cited_weights: whether first weights are those of the code that appendix Q.1 cites, not torch's.
    """

    variants: tuple[DescentVariant, ...]
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
    cited_weights: bool = later(False)

    def __post_init__(self) -> None:
        one_of("data", self.data, DATA)
        for variant in self.variants:
            one_of("network", variant.network, NETWORKS)
            if variant.steps < self.late[0]:
                raise EquilibriaError(
                    f"got late={self.late}; expected it within the {variant.steps} steps of {variant.name}"
                )


def key(variant: DescentVariant, seed: int) -> str:
    """Key of a task."""
    return f"{variant.name.replace(' ', '-').replace('=', '-')}-{seed}"


def tasks(config: Config) -> dict[str, tuple[int, int]]:
    """Index of the variant, and seed."""
    return {key(variant, seed): (place, seed) for place, variant in enumerate(config.variants) for seed in config.seeds}


def load(config: Config, *, seed: int = 0) -> ImageSet:
    """The images of a seed, standardised."""
    from equilibria.lab.data import cifar10, cifar10_2k, load_digits

    classes = config.classes or None
    if config.data == "digits":
        images = load_digits() if classes is None else load_digits().select_classes(classes)
        return images.per_class(config.per_class, block=seed) if config.per_class else images
    if config.data == "cifar10-2k":
        return cifar10_2k(size=config.size, classes=classes).standardised()
    images = cifar10(size=config.size, classes=classes)
    return (images.per_class(config.per_class, block=seed) if config.per_class else images).standardised()


def run_task(config: Config, task: tuple[int, int]) -> Arrays:
    """Run a descent part by part, each measured at another interval and continued from the end of the previous one."""
    from equilibria.lab.training import train

    place, seed = task
    variant, images, folder = config.variants[place], load(config, seed=seed), scratch()
    report = progress_reporter(variant.steps)
    parts: list[Mapping[str, Array]] = []
    state: dict[str, Any] | None = None
    for number, part in enumerate(variant.parts):
        until = recipe(config, variant, seed=seed, images=images, part=part)
        trained = train(until, folder=folder / str(number), start=state, progress=report)
        parts.append(trained.curves)
        state = trained.state
    return {name: np.concatenate([curves[name] for curves in parts]) for name in parts[0]}


def recipe(config: Config, variant: DescentVariant, *, seed: int, images: ImageSet, part: Part) -> Recipe:
    """The recipe of a descent up to the last step of a part."""
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
    """A `Measure`: an inner measure at the present weights and, named with "_before", at those one step earlier.

    At the edge of stability every step crosses the valley, so even steps alone would show one side of it only. The
    weights before are the present ones with the last step undone, up to rounding; before the first step both are equal.
    Each side has its own inner measure: a warm start from the same side saves a third of the Hessian products.
    """

    def __init__(self, make: Callable[[], Measure], variant: DescentVariant) -> None:
        self._now, self._before, self._variant = make(), make(), variant

    def __call__(self, training: Training) -> dict[str, Any]:
        """See `Measure`."""
        with _undone(training.model, self._variant):
            before = self._before(training)
        return {**self._now(training), **{f"{name}_before": value for name, value in before.items()}}

    def state_dict(self) -> dict[str, Any]:
        """The states of both inner measures, if they have one."""
        return {name: measure.state_dict() for name, measure in self._stateful().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        for name, measure in self._stateful().items():
            measure.load_state_dict(state[name])

    def _stateful(self) -> dict[str, Any]:
        measures = {"now": self._now, "before": self._before}
        return {name: measure for name, measure in measures.items() if hasattr(measure, "load_state_dict")}


@contextmanager
def _undone(model: nn.Module, variant: DescentVariant) -> Iterator[None]:
    """Undo the last step inside the context; restore the weights afterwards."""
    import torch

    moved = [(param, param.grad) for param in model.parameters() if param.grad is not None]
    saved = [param.detach().clone() for param, _ in moved]
    with torch.no_grad():
        for param, grad in moved:
            param.add_(grad, alpha=variant.lr).div_(1 - variant.intrinsic_lr)
    try:
        yield
    finally:
        with torch.no_grad():
            for (param, _), value in zip(moved, saved, strict=True):
                param.copy_(value)


class _GradientNorm:
    """A `Measure`: squared norm of the last step's gradient; NaN before the first step."""

    def __init__(self, select: Sequence[str] | None) -> None:
        self._select = select

    def __call__(self, training: Training) -> dict[str, float]:
        """See `Measure`."""
        params = dict(training.model.named_parameters())
        grads = [params[name].grad for name in self._select or params]
        return {"grad_norm_sq": sum(float("nan") if grad is None else float(grad.square().sum()) for grad in grads)}


def invariant_part(config: Config, variant: DescentVariant, images: ImageSet) -> list[str]:
    """Names of the largest set of parameters that is jointly scale-invariant: the paper's w of (w, z)."""
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


def network(config: Config, variant: DescentVariant, images: ImageSet) -> nn.Module:
    """The network, with torch's default first weights, or those of the code that the paper cites.

    That code, Wei Yang's pytorch-classification (appendix Q.1), draws convolutions as `he_fan_out`, the linear layer of
    a VGG with deviation 0.01, that of a ResNet as torch does.
    """
    import torch

    from equilibria.lab.nets import PreActivationResNet, ScaleInvariantVGG
    from equilibria.lab.nets.conv_norm import he_fan_out

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
    if config.cited_weights:
        he_fan_out(net, linear=variant.network == VGG)
    fast: nn.Module = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return fast


def _fast(images: Tensor) -> Tensor:
    """The images in the memory format that speeds up convolutions by a quarter."""
    import torch

    return images.contiguous(memory_format=torch.channels_last)


def _chunks(config: Config, batch: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The batches of BatchNorm."""
    import torch

    inputs, labels = batch
    size = config.ghost or len(inputs)
    return list(zip(torch.split(inputs, size), torch.split(labels, size), strict=True))


# ---- reading, judging and drawing

_NOT_JUDGED = {
    "first_step_with_every_image_right": "the early window is judged by the images that are right in it",
    "edge": "2 / effective lr; sharpness over it is judged in sharp-vgg, step by step",
    "excess": "the training loss above its minimum; no claim of the paper is about its size",
    "middle": "means in the middle window: the course between the two windows that the claims compare",
}
FITTED = 99.0
"""Least training accuracy, per cent, in a window after the fit; bursts may cost a few images later."""
_HALVED = 2.0
# Two standard errors of the difference of two accuracies of one half on 10,000 test images.
_SAME_ACCURACY = 1.4


@dataclass(frozen=True)
class Descent:
    """The curves of one descent, a number per measurement.

    Quantities that alternate from step to step at the edge of stability are means over two steps: that of the
    measurement and the one before it.

    Attributes:
        step: of the measurement.
        sharpness: largest eigenvalue of the Hessian at the direction of the weights, mean over two steps.
        edge: 2 over the effective learning rate, mean over two steps; a larger sharpness is unstable.
        ratio: sharpness over edge, mean over two steps.
        excess: training loss above the minimum that the last BatchNorm allows, mean over two steps.
        train: accuracy in per cent, mean over two steps.
        test: accuracy in per cent.
        unit_gradient: squared norm of the gradient at the direction of the weights, of the step before.
        loss: training loss above its minimum, mean over the steps since the previous measurement.
    """

    step: Array
    sharpness: Array
    edge: Array
    ratio: Array
    excess: Array
    train: Array
    test: Array
    unit_gradient: Array
    loss: Array

    def within(self, window: Window) -> NDArray[np.bool_]:
        """Mask of the measurements in a window, both ends included."""
        return np.asarray((window[0] <= self.step) & (self.step <= window[1]))

    def since(self, window: Window) -> NDArray[np.bool_]:
        """Mask of the measurements whose ``loss`` is of steps within the window: the first step is left out."""
        return np.asarray((window[0] < self.step) & (self.step <= window[1]))

    def mean(self, name: str, window: Window) -> float:
        """Mean of a curve over a window."""
        return float(getattr(self, name)[self.within(window)].mean())

    def rise(self, name: str, windows: tuple[Window, Window]) -> float:
        """Mean over the second window less that over the first."""
        return self.mean(name, windows[1]) - self.mean(name, windows[0])

    def fall(self, name: str, windows: tuple[Window, Window]) -> float:
        """Mean over the first window divided by that over the second."""
        return self.mean(name, windows[0]) / self.mean(name, windows[1])

    def fitted(self) -> float:
        """First measured step at which every training image is right; infinite if there is none."""
        right = self.step[self.train == 100]
        return float(right[0]) if len(right) else np.inf


def read_descent(config: Config, variant: DescentVariant, run: Arrays) -> Descent:
    """The curves of a descent in the units of the figures."""
    least = least_loss(config, variant)
    sharpness, norm_sq, loss, accuracy = (
        np.stack([run[f"{name}_before"], run[name]])
        for name in ("sharpness", "norm_sq", "train_loss", "train_accuracy")
    )
    edge = 2 / effective_lr(variant.lr, variant.weight_decay, norm_sq=norm_sq)
    return Descent(
        step=run["step"],
        sharpness=sharpness.mean(0),
        edge=edge.mean(0),
        ratio=(sharpness / edge).mean(0),
        excess=loss.mean(0) - least,
        train=100 * accuracy.mean(0),
        test=100 * run["test_accuracy"],
        unit_gradient=run["grad_norm_sq"] * norm_sq[0],
        loss=run["loss"] - least,
    )


def least_loss(config: Config, variant: DescentVariant) -> float:
    """Infimum of the training loss, eq. (53); 0 for the standard network, which has no last BatchNorm."""
    if variant.network == STANDARD_RESNET:
        return 0.0
    return float(final_bn_minimum(variant.scale, len(config.classes) or 10).loss)


def returns(values: Array, *, factor: float) -> int:
    """Number of rises by a factor after a fall by it; 0 for values that only fall."""
    count, falling, extreme = 0, False, values[0]
    for value in values:
        if falling and value >= factor * extreme:
            count, falling, extreme = count + 1, False, value
        elif not falling and value <= extreme / factor:
            falling, extreme = True, value
        else:
            extreme = min(extreme, value) if falling else max(extreme, value)
    return count


def read_descents(config: Config, variant: DescentVariant, results: TaskResults) -> list[Descent]:
    """The descents of a variant, one per seed."""
    return [read_descent(config, variant, results[key(variant, seed)]) for seed in config.seeds]


def outcome(config: Config, results: TaskResults, claims: Sequence[Claim], **more: object) -> Outcome:
    """The claims, demanded unless the data are digits, and the means over the windows, a number per seed."""
    windows = {"early": config.early, "middle": config.middle, "late": config.late}
    table: dict[str, object] = {}
    for variant in config.variants:
        descents = read_descents(config, variant, results)
        table[variant.name] = {
            "seeds": config.seeds,
            "first_step_with_every_image_right": [descent.fitted() for descent in descents],
            **{
                f"{name}_{when}": [descent.mean(name, window) for descent in descents]
                for name in ("sharpness", "edge", "excess", "test")
                for when, window in windows.items()
            },
        }
    return Outcome(demanded_if(config.data != "digits", claims), table | more, _NOT_JUDGED)


def judge_fit(config: Config, descents: Sequence[Descent], source: Source, *, label: str = "") -> Claim:
    """Claim that the early window lies after the fit."""
    return source.says(f"{label}in the early window the training images are right").at_least(
        FITTED, [descent.mean("train", config.early) for descent in descents], unit="%", printed=100.0
    )


def judge_fall(config: Config, descents: Sequence[Descent], source: Source, text: str) -> Claim:
    """Claim that sharpness falls to half or less from the early to the late window."""
    return source.says(f"{text}: early over late window").at_least(
        _HALVED, [descent.fall("sharpness", (config.early, config.late)) for descent in descents], ratio=True
    )


def judge_constant(config: Config, descents: Sequence[Descent], source: Source, text: str) -> Claim:
    """Claim that sharpness does not fall to half from the early to the late window, as it does with weight decay."""
    return source.says(f"{text}: late over early window").at_least(
        1 / _HALVED, [1 / descent.fall("sharpness", (config.early, config.late)) for descent in descents], ratio=True
    )


def judge_rise(
    config: Config, descents: Sequence[Descent], source: Source, *, printed: float, label: str = ""
) -> Claim:
    """Claim that test accuracy rises from the early to the late window."""
    return source.says(f"{label}test accuracy rises meanwhile: from the early to the late window").at_least(
        0.0, [descent.rise("test", (config.early, config.late)) for descent in descents], unit=POINTS, printed=printed
    )


def judge_accuracies(
    config: Config, accuracies: Mapping[str, float], results: TaskResults, source: Source
) -> list[Claim]:
    """Claim the paper's best test accuracies, of single runs on all classes, in per cent by variant."""
    if config.classes or config.data == "digits":
        return []
    return [
        comparison(
            source.says(f"{variant.name}: best test accuracy").near(
                accuracies[variant.name],
                [float(descent.test.max()) for descent in read_descents(config, variant, results)],
                absolute=_SAME_ACCURACY,
                unit="%",
                printed=accuracies[variant.name],
            )
        )
        for variant in config.variants
        if variant.name in accuracies
    ]


def draw_edge(axis: Axes, descents: Sequence[Descent], *, colour: str, edge_colour: str = THEORY) -> None:
    """Draw the sharpness of all seeds, and 2 / effective learning rate dashed."""
    draw_curves(axis, descents, "sharpness", colour=colour)
    axis.plot(
        descents[0].step, np.mean([descent.edge for descent in descents], axis=0), color=edge_colour, lw=0.8, ls="--"
    )
    axis.set_yscale("log")


def draw_curves(axis: Axes, descents: Sequence[Descent], name: str, *, colour: str, label: str = "") -> None:
    """Draw a curve of every seed thin and their mean thick."""
    draw_seeds(axis, descents[0].step, [getattr(descent, name) for descent in descents], color=colour, label=label)


def label_edge(axis: Axes) -> None:
    """Add a legend that explains the dashed line."""
    axis.plot([], [], color=THEORY, lw=0.8, ls="--", label="2 / effective lr")
    axis.legend()


def title_panels(accuracy: Axes, edge: Axes, loss: Axes, *, letters: str) -> None:
    """Set the titles of the three panels, in the order of the letters."""
    label_panel(accuracy, letters[0], "test accuracy, %")
    label_panel(edge, letters[1], "spherical sharpness")
    label_panel(loss, letters[2], "training loss above its minimum, nats")


def mark_windows(axis: Axes, config: Config) -> None:
    """Shade the two windows that the claims compare."""
    for window in (config.early, config.late):
        axis.axvspan(*window, color="#eef1f4", zorder=0)
    axis.set_xlabel("steps")

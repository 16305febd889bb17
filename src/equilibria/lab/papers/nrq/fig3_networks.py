"""nrq-networks: networks with equal lr * wd reach equal angle and loss; first weights of any scale too (fig. 3, 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from equilibria.errors import one_of
from equilibria.lab.harness.claim import Claim, Source, demanded_if, identity
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Figures, Outcome, TaskResults, later
from equilibria.lab.harness.figures import (
    POINTS,
    THEORY,
    Window,
    binned_angles,
    draw_over,
    label_panel,
    line_style,
    mean_in,
    panels,
    rms_angle,
)
from equilibria.lab.harness.task import device, train_in_task
from equilibria.theory import SGD

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import nn
    from torch.optim.optimizer import Optimizer

    from equilibria.lab.data import ImageSet
    from equilibria.lab.training import Recipe


BASE, LOW, HIGH, LARGE, ADJUSTED = "base", "low-lr", "high-lr", "large", "adjusted"
_CONVOLUTIONS = ".conv.weight"  # each has a BatchNorm behind it


@dataclass(frozen=True)
class LineSettings:
    """A line of the figure: settings of the convolutions, and their first weights over those of Kaiming He."""

    name: str
    lr: float
    weight_decay: float
    scale: float = 1.0


def lines(lr: float, weight_decay: float, *, ratio: float = 5.0, k: float = 10.0) -> tuple[LineSettings, ...]:
    """The base; the same product of lr and weight decay by other factors; first weights k times as large."""
    return (
        LineSettings(BASE, lr, weight_decay),
        LineSettings(LOW, lr / ratio, weight_decay * ratio),
        LineSettings(HIGH, lr * ratio, weight_decay / ratio),
        LineSettings(LARGE, lr, weight_decay, k),
        LineSettings(ADJUSTED, lr * k**2, weight_decay / k**2, k),
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """SGD without momentum, and lr / 5 once. Windows are in steps, fixed before any of these seeds was run.

    At desk scale CIFAR-10 at 8x8 pixels and a ResNet-8. Scales, shifts and the linear layer have another learning rate
    and no weight decay, the same for all lines.

    Attributes:
        other_decay: weight decay of the linear layer.
        resized: whether windows of random size are resized to ``size``.
        ghost: images that a BatchNorm sees; 0 for whole batches.
    """

    lines: tuple[LineSettings, ...] = lines(0.5, 1e-2)
    seeds: tuple[int, ...] = (30, 31, 32)
    data: str = "cifar10"
    size: int = 8
    width: int = 16
    blocks: tuple[int, ...] = (1, 1, 1)
    batch_size: int = 128
    flip: bool = True
    crop: int = 0
    other_lr: float = 0.1
    steps: int = 2000
    drops_at: tuple[int, ...] = (1200,)
    divisor: float = 5.0
    first: tuple[int, int] = (0, 20)
    early: tuple[int, int] = (50, 200)
    settled: tuple[int, int] = (900, 1200)
    late: tuple[int, int] = (1700, 2000)
    measure_every: int = 50
    watch_every: int = 5
    statistics: tuple[int, int] = (8, 400)
    train_images: int = 3200
    other_decay: float = later(0.0)
    resized: bool = later(False)
    ghost: int = later(0)

    def __post_init__(self) -> None:
        one_of("data", self.data, ["cifar10", "digits", "imagenet"])


def key(line: str, seed: int) -> str:
    """Key of a task."""
    return f"{line}-{seed}"


def tasks(config: Config) -> dict[str, tuple[int, int]]:
    """Index of the line, and seed: one training each."""
    return {key(line.name, seed): (place, seed) for place, line in enumerate(config.lines) for seed in config.seeds}


def load(config: Config) -> ImageSet:
    """Load the images, standardised."""
    from equilibria.lab.data import load_images

    return load_images(config.data, size=config.size)


def run_task(config: Config, task: tuple[int, int]) -> Arrays:
    """Train once: the curves, and angle and norm of every convolution."""
    from equilibria.lab.training import by_layer

    place, seed = task
    trained = train_in_task(recipe(config, config.lines[place], seed=seed, images=load(config)))
    layers = by_layer(trained.samples, ["angle", "norm"])
    return {
        **trained.curves,
        "layer_angle": layers.columns["angle"],
        "layer_norm": layers.columns["norm"],
        "sampled_step": layers.step,
    }


def recipe(config: Config, line: LineSettings, *, seed: int, images: ImageSet) -> Recipe:
    """The recipe of a line; lines of one seed share first weights, up to their scale, and the order of the data."""
    from equilibria.lab.data import Batches
    from equilibria.lab.training import Evaluation, Recipe, drops, process

    return Recipe(
        model=lambda: _network(config, line, images),
        optimizer=lambda model: _optimizer(config, line, model),
        data=Batches.of_images(
            images,
            batch_size=config.batch_size,
            seed=seed,
            flip=config.flip,
            crop=config.crop,
            resized=config.size if config.resized else 0,
            share=process(),
        ),
        chunk=config.ghost or None,
        steps=config.steps,
        seed=seed,
        schedule=drops(config.drops_at, config.divisor),
        measures={"sets": Evaluation.of_images(images, statistics=config.statistics, train_images=config.train_images)},
        measure_every=config.measure_every,
        watch_every=config.watch_every,
        watch_select=["*" + _CONVOLUTIONS],
        device=device(),
    )


def _network(config: Config, line: LineSettings, images: ImageSet) -> nn.Module:
    import torch
    from torch import nn

    from equilibria.lab.nets import BasicBlockResNet
    from equilibria.lab.nets.imagenet import BottleneckResNet, OnPixels

    classes, channels = images.classes, images.train_images.shape[1]
    model: nn.Module
    if config.data == "imagenet":
        model = OnPixels(BottleneckResNet(config.width, config.blocks, classes=classes, zero_gamma=True))
    else:
        model = BasicBlockResNet(config.width, config.blocks, in_channels=channels, classes=classes)
    for name, param in model.named_parameters():
        if name.endswith(_CONVOLUTIONS):
            nn.init.kaiming_normal_(param, nonlinearity="relu")
            with torch.no_grad():
                param.mul_(line.scale)
    return model


def _optimizer(config: Config, line: LineSettings, model: nn.Module) -> Optimizer:
    import torch

    from equilibria.lab.training import decay_groups

    invariant = [name for name, _ in model.named_parameters() if name.endswith(_CONVOLUTIONS)]
    groups = decay_groups(
        model,
        invariant,
        lr=line.lr,
        weight_decay=line.weight_decay,
        other_lr=config.other_lr,
        other_decay=config.other_decay,
    )
    return torch.optim.SGD(groups)


_PRODUCT = Source("nrq", "fig. 3 (a)-(d), section 4")
_SCALE = Source("nrq", "fig. 3 (i)-(l), corollary 3", law="rayleigh.NoisyRayleigh")
_BEGINNING = Source(
    "nrq",
    "fig. 3 (i)-(l), section 4",
    corrected="its text says that test accuracy increases quicker with larger first weights; slower is meant",
)
_LIMIT = Source("nrq", "section 3.2, fig. 3 (i)-(l)")
_ANGLE = Source("nrq", "lemma 1, section 4", law="equilibrium.heavy_ball")
# Root mean square angle; the gradient's norm still changes while the network learns.
_SETTLED = 0.1
# Twice the standard error of an accuracy of one half on 10,000 test images.
_SAME_ACCURACY = 1.0
# A minibatch's loss scatters by about a tenth, the mean over a hundred by one per cent; twice that.
_SAME_LOSS = 0.02
# Float32 lets two equal runs drift apart within a hundred steps; angles over a window then differ by their scatter.
_SAME_ANGLE = 0.05
# The tangent of the first angle is in proportion to lr / ||w||^2; rounding and BatchNorm's eps change less.
_FIRST = 0.01

Lines = Mapping[str, Sequence[Arrays]]
"""The runs of every line, one per seed."""


def collect(config: Config, results: TaskResults) -> Outcome:
    """Compare angle, loss and accuracy of every line with the base."""
    runs = _runs(config, results)
    claims = [
        *_judge_angles(config, runs),
        *(claim for name in (LOW, HIGH) for claim in _judge_same(config, runs, name, _PRODUCT)),
        *_judge_scales(config, runs),
    ]
    numbers = {
        name: {
            "test_accuracy_settled": [mean_in(run, "test_accuracy", config.settled) for run in seed_runs],
            "test_accuracy_late": [mean_in(run, "test_accuracy", config.late) for run in seed_runs],
            "loss_settled": [mean_in(run, "loss", config.settled) for run in seed_runs],
            "angle_settled": [rms_angle(run, config.settled) for run in seed_runs],
            "angle_late": [rms_angle(run, config.late) for run in seed_runs],
        }
        for name, seed_runs in runs.items()
    }
    exact = [identity(claim) for claim in _judge_first_steps(config, runs)]
    return Outcome([*exact, *demanded_if(config.data != "digits", claims)], numbers)


def _runs(config: Config, results: TaskResults) -> dict[str, list[Arrays]]:
    return {line.name: [results[key(line.name, seed)] for seed in config.seeds] for line in config.lines}


def _label(config: Config, name: str) -> str:
    line = next(line for line in config.lines if line.name == name)
    return f"lr {line.lr:g}, wd {line.weight_decay:g}" + (
        f", first weights x {line.scale:g}" if line.scale != 1 else ""
    )


def _angle(config: Config, *, drops: int) -> float:
    """Equilibrium angle after so many drops, the same for all lines."""
    base = config.lines[0]
    return float(SGD(base.lr / config.divisor**drops, base.weight_decay).equilibrium().angle)


def _judge_first_steps(config: Config, runs: Lines) -> list[Claim]:
    """Judge the first step, which is exact: same batch, same direction of the weights."""
    base, large = config.lines[0], next(line for line in config.lines if line.name == LARGE)
    return [
        source.says(
            f"{_label(config, name)}: tangent of the first step's angle, over that of {_label(config, BASE)}"
        ).near(
            expected,
            [
                float(np.median(np.tan(run["layer_angle"][0]) / np.tan(other["layer_angle"][0])))
                for run, other in zip(runs[name], runs[BASE], strict=True)
            ],
            relative=_FIRST,
        )
        for name, source, expected in (
            (LARGE, _BEGINNING, large.scale**-2),
            (ADJUSTED, _SCALE, 1.0),
            (HIGH, _PRODUCT, config.lines[2].lr / base.lr),
        )
    ]


def _judge_angles(config: Config, runs: Lines) -> list[Claim]:
    return [
        _ANGLE.says(
            f"{_label(config, name)}: angle in equilibrium over sqrt(2 lr wd), steps {config.settled[0]} to "
            f"{config.settled[1]}"
        ).near(1.0, [rms_angle(run, config.settled) / _angle(config, drops=0) for run in seed_runs], relative=_SETTLED)
        for name, seed_runs in runs.items()
    ]


def _judge_same(config: Config, runs: Lines, name: str, source: Source) -> list[Claim]:
    """Claims that a line has the steady loss and the final accuracy of the base."""
    pairs = list(zip(runs[BASE], runs[name], strict=True))
    return [
        source.says(f"{_label(config, name)}: steady training loss over that of {_label(config, BASE)}").near(
            1.0,
            [mean_in(b, "loss", config.settled) / mean_in(a, "loss", config.settled) for a, b in pairs],
            relative=_SAME_LOSS,
        ),
        source.says(f"{_label(config, name)}: test accuracy in the end less that of {_label(config, BASE)}").near(
            0.0, _accuracy_less(pairs, config.late), absolute=_SAME_ACCURACY, unit=POINTS
        ),
    ]


def _accuracy_less(pairs: Sequence[tuple[Arrays, Arrays]], window: Window) -> list[float]:
    return [mean_in(b, "test_accuracy", window) - mean_in(a, "test_accuracy", window) for a, b in pairs]


def _judge_scales(config: Config, runs: Lines) -> list[Claim]:
    large = list(zip(runs[BASE], runs[LARGE], strict=True))
    adjusted = list(zip(runs[BASE], runs[ADJUSTED], strict=True))
    during = f"steps {config.early[0]} to {config.early[1]}"
    return [
        _BEGINNING.says(
            f"{_label(config, LARGE)}: training loss decreases more slowly: over that of the base, {during}"
        ).at_least(
            1.0, [mean_in(b, "loss", config.early) / mean_in(a, "loss", config.early) for a, b in large], ratio=True
        ),
        _BEGINNING.says(
            f"{_label(config, LARGE)}: test accuracy increases more slowly: less that of the base, {during}"
        ).at_most(0.0, _accuracy_less(large, config.early), unit=POINTS),
        _SCALE.says(f"{_label(config, ADJUSTED)}: angle over that of the base, {during}").near(
            1.0, [rms_angle(b, config.early) / rms_angle(a, config.early) for a, b in adjusted], relative=_SAME_ANGLE
        ),
        _SCALE.says(f"{_label(config, ADJUSTED)}: test accuracy less that of the base, {during}").near(
            0.0, _accuracy_less(adjusted, config.early), absolute=_SAME_ACCURACY, unit=POINTS
        ),
        *_judge_same(config, runs, ADJUSTED, _SCALE),
        *_judge_same(config, runs, LARGE, _LIMIT),
    ]


def draw(config: Config, results: TaskResults) -> Figures:
    """Draw the first and the third row of figure 3: training loss, test accuracy, angle, norm."""
    runs = _runs(config, results)
    figure, axes = panels(2, 4, width=2.3, height=2.1)
    for row, (names, letters) in enumerate((((BASE, LOW, HIGH), "abcd"), ((BASE, ADJUSTED, LARGE), "ijkl"))):
        shown = {_label(config, name): runs[name] for name in names}
        loss, accuracy, angle, norm = axes[4 * row : 4 * row + 4]
        draw_over(loss, shown, "loss")
        draw_over(accuracy, shown, "test_accuracy", factor=100)
        _draw_angles(angle, config, shown)
        _draw_norms(norm, shown)
        loss.legend()
        for axis, letter, text in zip(
            (loss, accuracy, angle, norm),
            letters,
            ("training loss, nats", "test accuracy, %", "angle per step, rad", "norm, median layer"),
            strict=True,
        ):
            label_panel(axis, letter, text)
    return {"figure-3": figure}


def _draw_angles(axis: Axes, config: Config, shown: Lines) -> None:
    for place, seed_runs in enumerate(shown.values()):
        step, angle = binned_angles(seed_runs, bins=max(1, config.measure_every // config.watch_every))
        axis.plot(step, angle, **line_style(place))
    edges = [0, *config.drops_at, config.steps]
    for drops, (begin, end) in enumerate(pairwise(edges)):
        axis.plot([begin, end], [_angle(config, drops=drops)] * 2, color=THEORY, lw=0.8, ls="--")
    axis.set(yscale="log", xlabel="step")


def _draw_norms(axis: Axes, shown: Lines) -> None:
    for place, seed_runs in enumerate(shown.values()):
        norm = np.exp(np.mean([np.log(np.median(run["layer_norm"], axis=1)) for run in seed_runs], axis=0))
        axis.plot(seed_runs[0]["sampled_step"], norm, **line_style(place))
    axis.set(yscale="log", xlabel="step")


_SMOKE = Config(
    lines=lines(0.5, 2e-2),
    seeds=(0, 1, 2),
    data="digits",
    width=4,
    blocks=(1,),
    batch_size=16,
    flip=False,
    steps=10,
    drops_at=(8,),
    early=(1, 5),
    settled=(4, 8),
    late=(6, 10),
    measure_every=5,
    watch_every=1,
    statistics=(1, 64),
    train_images=64,
)
_EPOCH = 195  # batches of 256 among 50,000 images, the last one left out
_PAPER = Config(  # figure 3; other_lr is the base's learning rate
    lines=lines(0.5, 1e-3),
    seeds=tuple(range(10)),
    size=32,
    width=64,
    blocks=(2, 2, 2, 2),
    batch_size=256,
    crop=4,
    other_lr=0.5,
    steps=200 * _EPOCH,
    drops_at=(60 * _EPOCH, 120 * _EPOCH, 160 * _EPOCH),
    early=(_EPOCH, 5 * _EPOCH),
    settled=(40 * _EPOCH, 60 * _EPOCH),
    late=(190 * _EPOCH, 200 * _EPOCH),
    measure_every=_EPOCH,
)

EXPERIMENT = Experiment(
    id="nrq-networks",
    title="Networks with equal lr times weight decay end alike; the scale of the first weights is undone",
    source="nrq fig. 3 a-d, i-l",
    scales={"smoke": _SMOKE, "desk": Config(), "paper": _PAPER},
    functions=(tasks, run_task, collect, draw),
    kind=NETWORKS,
    needs=load,
)

"""smd-pseudo-overfitting: test accuracy falls while the angle climbs back after a drop of the learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from equilibria.errors import EquilibriaError, one_of
from equilibria.lab.harness.claim import Claim, Source, demanded_if, over_seeds
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Figures, Outcome, TaskResults, later
from equilibria.lab.harness.figures import COLOURS, THEORY, draw_seeds, label_panel, mean_in, panels
from equilibria.lab.harness.task import device, train_branches
from equilibria.lab.papers.smd.layer_angles import law_after_drop, rms_ratio
from equilibria.theory import SGD

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.optimizer import Optimizer

    from equilibria.lab.data import ImageSet
    from equilibria.lab.nets import BasicBlockResNet
    from equilibria.lab.training import Recipe


STANDARD, RESCALED = "standard", "rescaled"
BRANCHES = (STANDARD, RESCALED)
BEFORE = "before"
_COLUMNS = ("angle", "angle_equilibrium", "norm")
_WATCHED = "*.conv.weight"  # all convolutions: each has a BatchNorm behind it


@dataclass(frozen=True)
class SeededOptimizer:
    """SGD with or without momentum, or Adam with L2 as in the paper, and its seeds."""

    name: str
    optimizer: str
    lr: float
    weight_decay: float
    other_lr: float
    momentum: float = 0.0
    seeds: tuple[int, ...] = (20, 21, 22)


@dataclass(frozen=True)
class Config:
    """One drop of the learning rate, or more; windows are in steps after the first, fixed before any seed was run.

    At desk scale: four classes of CIFAR-10 at 8x8 pixels, a ResNet-8, and settings under which a layer needs 800 steps
    to return to equilibrium. The momentum of SGDM multiplies the effective learning rate by ten, so lr is a tenth of
    SGD's. Adam's equilibrium moves with the gradient's norm: in a trial with another seed and 600 steps before the
    drop, the median layer was back at 0.9 of it after 300 steps, sooner than SGD's.
    """

    rules: tuple[SeededOptimizer, ...] = (
        SeededOptimizer("SGD", "sgd", lr=0.5, weight_decay=5e-3, other_lr=0.1, seeds=(20, 21, 22, 23)),
        SeededOptimizer("SGDM", "sgd", lr=0.05, weight_decay=5e-3, other_lr=0.01, momentum=0.9),
        SeededOptimizer("Adam", "adam", lr=3e-3, weight_decay=1e-3, other_lr=1e-3),
    )
    data: str = "cifar10"
    classes: tuple[int, ...] = (0, 1, 8, 9)
    size: int = 8
    width: int = 32
    blocks: tuple[int, ...] = (1, 1, 1)
    batch_size: int = 128
    flip: bool = True
    crop: int = 0
    steps_before: int = 2500
    steps_after: int = 1600
    divisor: float = 5.0
    at_once: tuple[int, int] = (10, 100)
    early: tuple[int, int] = (150, 600)
    late: tuple[int, int] = (950, 1600)
    measure_every: int = 50
    watch_every: int = 5
    statistics: tuple[int, int] = (8, 400)
    train_images: int = 3200
    later_drops: tuple[int, ...] = later(())

    def __post_init__(self) -> None:
        one_of("data", self.data, ["cifar10", "digits"])
        if self.late[1] > self.steps_after:
            raise EquilibriaError(
                f"got late={self.late}; expected it within the {self.steps_after} steps after the drop"
            )

    @property
    def steps(self) -> int:
        """Steps of one branch, from the first weights on."""
        return self.steps_before + self.steps_after


def key(rule: SeededOptimizer, seed: int) -> str:
    """Key of a task."""
    return f"{rule.name.lower()}-{seed}"


def tasks(config: Config) -> dict[str, tuple[int, int]]:
    """Index of the rule, and seed: a task trains both branches, which start from the same weights."""
    return {key(rule, seed): (place, seed) for place, rule in enumerate(config.rules) for seed in rule.seeds}


def load(config: Config) -> ImageSet:
    """The images, standardised."""
    from equilibria.lab.data import load_images

    return load_images(config.data, size=config.size, classes=config.classes)


def run_task(config: Config, task: tuple[int, int]) -> Arrays:
    """Train to the drop, and from there to the end with and without rescaling."""
    place, seed = task
    rule, images = config.rules[place], load(config)
    trained = train_branches(
        recipe(config, rule, seed=seed, images=images, steps=config.steps_before),
        {
            branch: recipe(config, rule, seed=seed, images=images, steps=config.steps, rescale=branch == RESCALED)
            for branch in BRANCHES
        },
        name=BEFORE,
    )
    parts = [part.arrays(_COLUMNS, prefix=f"{name}_") for name, part in trained.items()]
    return {name: values for part in parts for name, values in part.items()}


def recipe(
    config: Config, rule: SeededOptimizer, *, seed: int, images: ImageSet, steps: int, rescale: bool = False
) -> Recipe:
    """The training of a branch; both branches have the same batches, which depend on the seed alone."""
    from equilibria.control import RescaleOnDecay
    from equilibria.lab.data import Batches
    from equilibria.lab.training import Evaluation, Recipe, drops

    def rescaling(scheduler: LRScheduler, model: nn.Module) -> LRScheduler:
        example = images.train_images[: config.batch_size].to(device())
        return RescaleOnDecay(scheduler, model=model, invariant=_invariant(model), example=example)

    evaluation = Evaluation.of_images(images, statistics=config.statistics, train_images=config.train_images)
    return Recipe(
        model=lambda: _network(config, images),
        optimizer=lambda model: _optimizer(rule, model),
        data=Batches.of_images(images, batch_size=config.batch_size, seed=seed, flip=config.flip, crop=config.crop),
        steps=steps,
        seed=seed,
        schedule=drops([config.steps_before, *config.later_drops], config.divisor),
        control=rescaling if rescale else None,
        measures={"sets": evaluation},
        measure_every=config.measure_every,
        watch_every=config.watch_every,
        watch_select=[_WATCHED],
        device=device(),
    )


def _network(config: Config, images: ImageSet) -> BasicBlockResNet:
    from equilibria.lab.nets import BasicBlockResNet

    channels = images.train_images.shape[1]
    return BasicBlockResNet(config.width, config.blocks, in_channels=channels, classes=images.classes)


def _invariant(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if name.endswith(_WATCHED.removeprefix("*"))]


def _optimizer(rule: SeededOptimizer, model: nn.Module) -> Optimizer:
    import torch

    from equilibria.lab.training import decay_groups

    groups = decay_groups(model, _invariant(model), lr=rule.lr, weight_decay=rule.weight_decay, other_lr=rule.other_lr)
    return torch.optim.SGD(groups, momentum=rule.momentum) if rule.optimizer == "sgd" else torch.optim.Adam(groups)


# ---- judging

_SHOWN = Source("smd+", "appendix F; nrq fig. 3 (e)-(h)")
_LAW = Source("smd", "§5.2", law="states.rescale_factors")
_POINTS = "points"
# Single evaluations of 4,000 images flicker by half a point. Angles have no tolerance: the law is that of a constant
# unit gradient, and nobody has bounded how much it changes at a drop.
_EQUAL = 0.5


def _numbers(config: Config, run: Arrays) -> dict[str, Any]:
    """One seed: means over the windows, by branch; accuracy and loss in the early and the late window."""
    windows = (config.early, config.late)
    means = {
        f"{name.removeprefix('test_')}_{branch}": [
            mean_in(run, name, window, origin=config.steps_before, prefix=f"{branch}_") for window in windows
        ]
        for name in ("test_accuracy", "test_loss")
        for branch in BRANCHES
    }
    angles = {
        f"{name}_{branch}": _median_ratio(config, run, branch, window)
        for name, window in (("at_once", config.at_once), ("settled", config.late))
        for branch in BRANCHES
    }
    return {**angles, **means}


def _median_ratio(config: Config, run: Arrays, branch: str, window: tuple[int, int]) -> float:
    """Root mean square angle over that of equilibrium, of the median layer."""
    first, end = window
    steps = (config.steps_before + first, config.steps_before + end)
    return float(np.median(rms_ratio(run, steps, prefix=f"{branch}_")))


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the angle, and test accuracy and loss after the drop, for every optimizer."""
    claims: list[Claim] = []
    numbers = {}
    for rule in config.rules:
        seeds = over_seeds([_numbers(config, results[key(rule, seed)]) for seed in rule.seeds])
        claims += [*_judge_angles(config, rule, seeds), *_judge_tests(rule, seeds)]
        numbers[rule.name] = {"seeds": rule.seeds, **seeds}
    return Outcome(demanded_if(config.data != "digits", claims), numbers)


def _judge_angles(config: Config, rule: SeededOptimizer, seeds: Mapping[str, Any]) -> list[Claim]:
    """Judge the median layer's angle over its new equilibrium right after the drop and late, with and without rescale.

    For SGD the law gives both windows. That of Adam with L2 moves at a speed that depends on the size of the gradient,
    which is not kept: only its start, k^(-1/3), and the direction are known.
    """
    soon, late = (
        f"{first} to {last} steps after lr / {config.divisor:g}" for first, last in (config.at_once, config.late)
    )
    at_once, settled = (seeds[f"{name}_{STANDARD}"] for name in ("at_once", "settled"))
    text = f"{rule.name}: angle over its new equilibrium, "
    if rule.optimizer == "adam":
        standard = [
            _LAW.says(f"{text}{soon}: at least that of the first step").at_least(
                config.divisor ** (-1 / 3), at_once, ratio=True
            ),
            _LAW.says(f"{text}{late}, over that {soon}: it climbs back").at_least(
                1.0, np.divide(settled, at_once), ratio=True
            ),
        ]
    else:
        sgd = SGD(rule.lr, rule.weight_decay, momentum=rule.momentum)
        standard = [
            _LAW.says(f"{text}{when}, by the law for a constant unit gradient").equals(
                law_after_drop(sgd, config.divisor, window), values, ratio=True
            )
            for when, window, values in ((soon, config.at_once, at_once), (late, config.late, settled))
        ]
    rescaled = [
        _LAW.says(f"{text}{when}, with rescale").equals(1.0, seeds[f"{name}_{RESCALED}"], ratio=True)
        for when, name in ((soon, "at_once"), (late, "settled"))
    ]
    return [*standard, *rescaled]


def _judge_tests(rule: SeededOptimizer, seeds: Mapping[str, Any]) -> list[Claim]:
    falls, rises = (
        {branch: [float(late - early) for early, late in seeds[f"{name}_{branch}"]] for branch in BRANCHES}
        for name in ("accuracy", "loss")
    )
    apart = np.subtract(seeds[f"accuracy_{STANDARD}"], seeds[f"accuracy_{RESCALED}"])
    soon = " (which begins when Adam's angle is mostly back)" if rule.optimizer == "adam" else ""
    return [
        _SHOWN.says(
            f"{rule.name}: test accuracy falls while the angle climbs back: change from early{soon} to late window"
        ).at_most(0.0, falls[STANDARD], unit=_POINTS),
        _SHOWN.says(f"{rule.name}: with rescale it does not: the same change").at_least(
            0.0, falls[RESCALED], unit=_POINTS
        ),
        _SHOWN.says(f"{rule.name}: the difference of the two changes, seed by seed").at_most(
            0.0, np.subtract(falls[STANDARD], falls[RESCALED]), unit=_POINTS
        ),
        _SHOWN.says(f"{rule.name}: test loss rises by more without rescale than with it, seed by seed").at_least(
            0.0, np.subtract(rises[STANDARD], rises[RESCALED])
        ),
        _SHOWN.says(
            f"{rule.name}: what the small angle gains: accuracy without less accuracy with rescale, early window"
        ).at_least(0.0, apart[:, 0], unit=_POINTS),
        _SHOWN.says(f"{rule.name}: and what is left of it in the late window").near(
            0.0, apart[:, 1], absolute=_EQUAL, unit=_POINTS
        ),
    ]


# ---- drawing


def draw(config: Config, results: TaskResults) -> Figures:
    """A row per optimizer: angle, training loss and test accuracy after the drop, with both branches."""
    figure, axes = panels(len(config.rules), 3, width=2.4, height=1.9)
    for row, rule in enumerate(config.rules):
        runs = [results[key(rule, seed)] for seed in rule.seeds]
        angle, loss, accuracy = axes[3 * row : 3 * row + 3]
        for colour, branch in zip(COLOURS, BRANCHES, strict=False):
            _draw_angles(angle, config, runs, branch, colour=colour)
            steps = runs[0][f"{branch}_step"] - config.steps_before
            draw_seeds(loss, steps, [run[f"{branch}_loss"] for run in runs], color=colour)
            draw_seeds(accuracy, steps, [100 * run[f"{branch}_test_accuracy"] for run in runs], color=colour)
        angle.axhline(1, color=THEORY, lw=0.8, ls="--")
        angle.set_ylim(bottom=0)
        for axis in (angle, loss, accuracy):
            for window in (config.early, config.late):
                axis.axvspan(*window, color="#eef1f4", zorder=0)
            axis.set_xlabel("steps after the drop")
        letters = "abcdefghi"[3 * row : 3 * row + 3]
        label_panel(angle, letters[0], f"{rule.name}: angle / equilibrium")
        label_panel(loss, letters[1], f"{rule.name}: training loss, nats")
        label_panel(accuracy, letters[2], f"{rule.name}: test accuracy, %")
    axes[0].legend()
    return {"pseudo-overfitting": figure}


def _draw_angles(axis: Axes, config: Config, runs: Sequence[Arrays], branch: str, *, colour: str) -> None:
    """Draw the median layer's ratio, averaged over the steps between two measurements."""
    bins = max(1, config.measure_every // config.watch_every)
    sampled = runs[0][f"{branch}_sampled_step"]
    count = len(sampled) // bins * bins
    steps = sampled[:count].reshape(-1, bins).mean(1) - config.steps_before
    medians = [np.median(run[f"{branch}_angle"] / run[f"{branch}_angle_equilibrium"], axis=1) for run in runs]
    draw_seeds(
        axis, steps, [median[:count].reshape(-1, bins).mean(1) for median in medians], color=colour, label=branch
    )


_SMOKE = Config(
    rules=(
        SeededOptimizer("SGD", "sgd", lr=0.5, weight_decay=2e-2, other_lr=0.1),
        SeededOptimizer("SGDM", "sgd", lr=0.05, weight_decay=2e-2, other_lr=0.01, momentum=0.9),
        SeededOptimizer("Adam", "adam", lr=4e-3, weight_decay=2e-2, other_lr=1e-3),
    ),
    data="digits",
    width=4,
    blocks=(1,),
    batch_size=32,
    flip=False,
    steps_before=24,
    steps_after=24,
    at_once=(2, 10),
    early=(4, 12),
    late=(16, 24),
    measure_every=4,
    watch_every=2,
    statistics=(2, 64),
    train_images=64,
)
_EPOCH = 195  # batches of 256 among 50,000 images, the last one left out
_TEN = tuple(range(20, 30))
_PAPER = Config(
    rules=(
        SeededOptimizer("SGD", "sgd", lr=0.5, weight_decay=1e-3, other_lr=0.5, seeds=_TEN),
        SeededOptimizer("SGDM", "sgd", lr=0.1, weight_decay=5e-4, other_lr=0.1, momentum=0.9, seeds=_TEN),
        SeededOptimizer("Adam", "adam", lr=1e-3, weight_decay=5e-4, other_lr=1e-3, seeds=_TEN),
    ),
    classes=(),
    size=32,
    width=64,
    blocks=(2, 2, 2, 2),
    batch_size=256,
    crop=4,
    steps_before=60 * _EPOCH,
    steps_after=140 * _EPOCH,
    later_drops=(120 * _EPOCH, 160 * _EPOCH),
    early=(2 * _EPOCH, 10 * _EPOCH),
    late=(40 * _EPOCH, 60 * _EPOCH),
    measure_every=_EPOCH,
)

EXPERIMENT = Experiment(
    id="smd-pseudo-overfitting",
    title="Test accuracy falls while the angle climbs back after a drop of the learning rate",
    source="smd+ appendix F, nrq fig. 3 (e)-(h)",
    scales={"smoke": _SMOKE, "desk": Config(), "paper": _PAPER},
    functions=(tasks, run_task, collect, draw),
    kind=NETWORKS,
    needs=load,
)

"""smd-multistage: all layers' angles over stages of the learning rate, with and without rescaled weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError
from equilibria.lab.harness.claim import Claim, Source, demanded_if, diagnostic, over_seeds
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Figures, Outcome, TaskResults, later
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, mean_in, panels, rms
from equilibria.lab.harness.task import train_branches
from equilibria.lab.papers.smd import trainings
from equilibria.lab.papers.smd.layer_angles import (
    Window,
    draw_layers,
    draw_unit_gradients,
    equilibrium_norm,
    explained_after_drop,
    law_after_drop,
    layer_column,
    rms_ratio,
    running_mean,
)
from equilibria.lab.papers.smd.trainings import Images, ImageTraining, Network, Sgd
from equilibria.theory.settling import after_lr_drop, minimum_settling_steps, steps_to_tolerance

if TYPE_CHECKING:
    from matplotlib.figure import Figure


STANDARD, RESCALED = "standard", "rescaled"
BRANCHES = (STANDARD, RESCALED)
BEFORE = "before"
# Norms go with (lr / wd)^(1/4): three drops leave them far above BatchNorm's eps.
_SGDM = Sgd("SGDM", lr=0.5, weight_decay=5e-4, other_lr=0.01, momentum=0.9)
_SMALL = Images(size=8)


@dataclass(frozen=True)
class Config:
    """A learning rate that is divided by ``divisor`` at each of the ``drops``, with and without rescaled weights.

    At desk scale the stages have about the lengths of the paper's, in units of their time constants (1 - momentum) /
    (4 lr wd): many in the first, five in the second, a fraction of one in the others.

    Attributes:
        at_once: window after a drop, in steps.
        settled: number of judged steps at the end of the second stage.
        last: number of measurements at the end whose accuracy is averaged.
    """

    sgd: Sgd = _SGDM
    images: Images = _SMALL
    network: Network = trainings.RESNET8
    batch_size: int = 128
    drops: tuple[int, ...] = (1200, 6200, 7000)
    steps: int = 7400
    divisor: float = 10.0
    layer: str = "blocks.0.second.conv.weight"
    at_once: tuple[int, int] = (10, 100)
    settled: int = 1000
    last: int = 4
    average: int = 200
    measure_every: int = 200
    watch_every: int = 2
    ghost: int = later(0)
    seeds: tuple[int, ...] = (30, 31, 32)

    def __post_init__(self) -> None:
        if len(self.drops) != 3 or not 0 < self.drops[0] < self.drops[1] < self.drops[2] < self.steps:
            raise EquilibriaError(f"got drops={self.drops}; expected three, one after the other, before {self.steps}")

    def training(self) -> ImageTraining:
        """The training without rescaled weights, to its end."""
        return ImageTraining.of(self)


def run_task(config: Config, task: int) -> Arrays:
    """Train to the first drop, and from there to the end with and without rescaling."""
    loaded = trainings.load(config.images)
    training = replace(config.training(), measures={"test": trainings.evaluation(loaded)})
    trained = train_branches(
        trainings.recipe(replace(training, steps=config.drops[0]), loaded, seed=task),
        {
            branch: trainings.recipe(replace(training, rescale=branch == RESCALED), loaded, seed=task)
            for branch in BRANCHES
        },
        name=BEFORE,
    )
    parts = [part.arrays(trainings.COLUMNS, prefix=f"{name}_") for name, part in trained.items()]
    return {name: values for part in parts for name, values in part.items()}


# ---- judging

Array = NDArray[np.float64]
_LAGS = Source("smd", "fig. 3 (a)", law="settling.after_lr_drop")
_AT_ONCE = Source(
    "smd",
    "fig. 3 (b), §5.2",
    corrected="the momentum buffer and BatchNorm's statistics must be rescaled too",
    law="states.rescale_factors",
)
_BOUND = Source(
    "smd",
    "Corollary 3.1",
    corrected="the lr in the bound is the new one; with the old one it is k times too small",
    law="settling.minimum_settling_steps",
)
_TABLE = Source("smd", "table 1 (ResNet-50 on ImageNet)")
_NO_DIP = Source("smd+", "fig. 2, Appendix F (ResNet-50 on ImageNet)")
_POINTS = "points"
_TOP_1 = {STANDARD: 76.25, RESCALED: 76.27}  # table 1
# Three standard deviations of one run less the mean of three: Goyal et al., section 5.1, give 0.12 for this recipe.
_SAME_TOP_1 = 3 * 0.12 * (1 + 1 / 3) ** 0.5
_DROPS = ("first", "second", "third")
# Accuracies of two trainings with one seed, averaged over a few evaluations of 10,000 images, scatter by this much.
_EQUAL = 1.0
# Of a diagnostic: the scatter of the unit gradient over a hundred steps, which remains after its change is accounted
# for. Angles themselves have no tolerance: the law is that of a constant unit gradient, which grows after a drop by an
# amount that nobody has bounded.
_EXPLAINED = 0.10
_ARRIVED = 0.95


def _numbers(config: Config, run: Arrays) -> dict[str, Any]:
    """One seed: the median layer's angle over its equilibrium in windows after each drop, and the accuracy.

    "explained" is the angle after the first drop over what the norm and the measured unit gradients give.
    """
    windows = [(drop + config.at_once[0], drop + config.at_once[1]) for drop in config.drops]
    ratios = {branch: [rms_ratio(run, window, prefix=f"{branch}_") for window in windows] for branch in BRANCHES}
    return {
        "at_once": {branch: [float(np.median(layers)) for layers in ratios[branch]] for branch in BRANCHES},
        "explained": {branch: _explained(config, run, branch, ratios[branch][0]) for branch in BRANCHES},
        "farthest_layer": {
            branch: [float(np.abs(layers - 1).max()) for layers in ratios[branch]] for branch in BRANCHES
        },
        "settled": _median(run, (config.drops[1] - config.settled, config.drops[1])),
        "last_stages": [_median(run, stage) for stage in _last_stages(config)],
        "arrival": _arrival(config, run),
        "test_accuracy": {
            branch: 100 * float(run[f"{branch}_test_accuracy"][-config.last :].mean()) for branch in BRANCHES
        },
    }


def _explained(config: Config, run: Arrays, branch: str, ratio: Array) -> float:
    start = config.divisor**-0.5 if branch == STANDARD else 1.0
    prefixes = {"before": f"{BEFORE}_", "after": f"{branch}_"}
    return explained_after_drop(run, ratio, drop=config.drops[0], window=config.at_once, start=start, **prefixes)


def _last_stages(config: Config) -> list[Window]:
    return [(config.drops[1], config.drops[2]), (config.drops[2], config.steps)]


def _median(run: Arrays, window: Window) -> float:
    return float(np.median(rms_ratio(run, window, prefix=f"{STANDARD}_")))


def _arrival(config: Config, run: Arrays) -> float:
    """Steps after the first drop until the median layer's angle is within 5 % of its new equilibrium."""
    steps = run[f"{STANDARD}_sampled_step"]
    ratio = (run[f"{STANDARD}_angle"] / run[f"{STANDARD}_angle_equilibrium"])[steps < config.drops[1]]
    smooth = np.sqrt(running_mean(ratio**2, _average(config)))
    there = np.median(smooth, axis=1) >= _ARRIVED
    place = int(there.argmax()) if there.any() else len(there) - 1
    return float(steps[place] - config.drops[0])


def _predicted(config: Config) -> list[Array]:
    """The law's angle over equilibrium at every step of stages 2, 3 and 4, for a constant unit gradient.

    A drop multiplies the fourth power of norm over equilibrium norm (gamma) by k, also from a lagging state; gamma then
    relaxes towards 1.
    """
    gamma, courses = 1.0, []
    for stage, (begin, end) in enumerate(pairwise([*config.drops, config.steps]), start=1):
        rule = replace(config.sgd.rule, lr=config.sgd.lr / config.divisor**stage)
        gamma *= config.divisor
        path = after_lr_drop(rule, gamma, steps=np.arange(end - begin))
        courses.append(path.angle_ratio)
        gamma = float(path.norm_ratio[-1]) ** 4
    return courses


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the angles after every drop in both branches, and the accuracies at the end."""
    seeds = over_seeds([_numbers(config, results[trainings.key(seed)]) for seed in config.seeds])
    both = {
        name: {branch: [value[branch] for value in seeds[name]] for branch in BRANCHES}
        for name in ("at_once", "explained", "farthest_layer", "test_accuracy")
    }
    numbers = {**seeds, **both}
    claims = [*_judge_standard(config, numbers), *_judge_rescaled(config, numbers), _judge_accuracy(config, numbers)]
    claims.append(_judge_no_dip(config, results))
    if config.images.data == "imagenet":
        claims += _judge_top_1(numbers)
    return Outcome(demanded_if(config.images.data != "digits", claims), numbers)


def _judge_standard(config: Config, numbers: Mapping[str, Any]) -> list[Claim]:
    rule = replace(config.sgd.rule, lr=config.sgd.lr / config.divisor)
    courses = _predicted(config)
    law = "by the law for a constant unit gradient"
    at_once = [rms(course[slice(*config.at_once)]) for course in courses]
    at_once[0] = law_after_drop(
        config.sgd.rule, config.divisor, config.at_once
    )  # the whole recursion, from equilibrium
    return [
        *(
            _LAGS.says(
                f"Angle of the median layer over its new equilibrium, {config.at_once[0]} to {config.at_once[1]} steps "
                f"after the {drop} drop, {law}"
            ).equals(expected, _at_drop(numbers["at_once"][STANDARD], place), ratio=True)
            for place, (drop, expected) in enumerate(zip(_DROPS, at_once, strict=True))
        ),
        _BOUND.says("Steps until it is within 5 % of it: the corollary's lower bound").at_least(
            minimum_settling_steps(rule, config.divisor),
            numbers["arrival"],
            unit="steps",
            printed=minimum_settling_steps(rule, config.divisor) / config.divisor,
        ),
        _LAGS.says(f"Steps until it is within 5 % of it, {law}").equals(
            float(steps_to_tolerance(rule, config.divisor**0.25, tolerance=1 - _ARRIVED, quantity="angle")),
            numbers["arrival"],
            unit="steps",
            ratio=True,
        ),
        _LAGS.says(f"The same angle over the last {config.settled} steps of the second stage, {law}").equals(
            rms(courses[0][-config.settled :]), numbers["settled"], ratio=True
        ),
        *(
            _LAGS.says(
                f"The same angle over the whole {ordinal} stage, which is too short for it to come back, {law}"
            ).equals(rms(course), _at_drop(numbers["last_stages"], place), ratio=True)
            for place, (ordinal, course) in enumerate(zip(("third", "fourth"), courses[1:], strict=True))
        ),
    ]


def _judge_rescaled(config: Config, numbers: Mapping[str, Any]) -> list[Claim]:
    lagging = law_after_drop(config.sgd.rule, config.divisor, config.at_once) * config.divisor**0.5
    off = {branch: np.abs(np.log(numbers["at_once"][branch])) for branch in BRANCHES}  # seeds by drops
    nearer, farthest = (
        np.subtract(values[RESCALED], values[STANDARD]).T for values in (off, numbers["farthest_layer"])
    )
    return [
        *(
            _AT_ONCE.says(
                f"With rescaled weights: angle of the median layer over its new equilibrium, {config.at_once[0]} to "
                f"{config.at_once[1]} steps after the {drop} drop"
            ).equals(1.0, _at_drop(numbers["at_once"][RESCALED], place), ratio=True)
            for place, drop in enumerate(_DROPS)
        ),
        *(
            _AT_ONCE.says(
                f"After the {drop} drop the angle is nearer to its theory with rescaled weights: |ln(angle / theory)| "
                "with them minus that without, seed by seed"
            ).at_most(0.0, values)
            for drop, values in zip(_DROPS, nearer, strict=True)
        ),
        *(
            _AT_ONCE.says(
                f"After the {drop} drop: |angle / theory - 1| of the layer that is farthest off, with rescaled weights "
                "minus without, seed by seed"
            ).at_most(0.0, values)
            for drop, values in zip(_DROPS, farthest, strict=True)
        ),
        *(
            diagnostic(
                (_AT_ONCE if branch == RESCALED else _LAGS)
                .says(
                    f"Angle of the median layer after the first drop, {branch}, over what its norm and the unit "
                    "gradient as it is then lead to"
                )
                .near(lagging if branch == STANDARD else 1.0, numbers["explained"][branch], relative=_EXPLAINED)
            )
            for branch in BRANCHES
        ),
    ]


def _at_drop(values: Sequence[Sequence[float]], place: int) -> list[float]:
    """The number of one drop or stage, by seed."""
    return [value[place] for value in values]


def _judge_accuracy(config: Config, numbers: Mapping[str, Any]) -> Claim:
    return _TABLE.says("Final test accuracy with rescaled weights minus that without, seed by seed").near(
        0.0,
        np.subtract(numbers["test_accuracy"][RESCALED], numbers["test_accuracy"][STANDARD]),
        absolute=_EQUAL,
        unit=_POINTS,
        printed=76.27 - 76.25,
    )


def _judge_top_1(numbers: Mapping[str, Any]) -> list[Claim]:
    """Claim the accuracies of table 1, which are those of the paper's own network and images alone."""
    return [
        _TABLE.says(f"Top-1 accuracy, {branch}").near(
            top_1, numbers["test_accuracy"][branch], absolute=_SAME_TOP_1, unit="%", printed=top_1
        )
        for branch, top_1 in _TOP_1.items()
    ]


def _judge_no_dip(config: Config, results: TaskResults) -> Claim:
    """Claim that accuracy keeps what the first drop gained while the angle climbs back, as on the paper's ImageNet."""
    first, last = config.drops[:2]
    quarter = max((last - first) // 4, config.measure_every)
    runs = [results[trainings.key(seed)] for seed in config.seeds]
    windows = ((first + 1, first + quarter), (last - quarter, last))
    early, late = ([mean_in(run, "test_accuracy", window, prefix=f"{STANDARD}_") for run in runs] for window in windows)
    return _NO_DIP.says(
        "No fall of the test accuracy in the second stage, where the network still learns: its last quarter less its "
        "first, seed by seed"
    ).at_least(0.0, np.subtract(late, early), unit=_POINTS)


# ---- drawing


def _whole(run: Arrays, branch: str) -> dict[str, NDArray[np.generic]]:
    """The first stage and a branch joined to one training."""
    columns = ("sampled_step", *trainings.COLUMNS)
    joined = {name: np.concatenate([run[f"{BEFORE}_{name}"], run[f"{branch}_{name}"]]) for name in columns}
    return {**joined, "names": run[f"{branch}_names"]}


def draw(config: Config, results: TaskResults) -> Figures:
    """Figures 3 (a)-(c) and 6, for the first seed."""
    run = results[trainings.key(config.seeds[0])]
    runs = {branch: _whole(run, branch) for branch in BRANCHES}
    return {"angles": _draw_angles(config, runs), "unit-gradients": _draw_gradients(config, runs)}


def _draw_angles(config: Config, runs: Mapping[str, Arrays]) -> Figure:
    figure, (standard, rescaled, norms) = panels(1, 3, width=2.6, height=2.2)
    for axes, branch, letter in ((standard, STANDARD, "a"), (rescaled, RESCALED, "b")):
        draw_layers(axes, runs[branch], average=10)
        low = float(runs[branch]["angle_equilibrium"].min())
        axes.set(yscale="log", ylim=(low / 20, 6 * float(runs[branch]["angle_equilibrium"].max())))
        label_panel(axes, letter, f"{branch}: angles of all layers, rad")
    standard.legend()
    for colour, branch in zip(COLOURS, BRANCHES, strict=False):
        chosen = runs[branch]
        norms.plot(
            chosen["sampled_step"], chosen["norm"][:, layer_column(chosen, config.layer)], color=colour, label=branch
        )
    label_panel(norms, "c", "one layer: norm", xlabel="step", ylim=(0, None), legend=True)
    return figure


def _draw_gradients(config: Config, runs: Mapping[str, Arrays]) -> Figure:
    figure, axes = panels(1, 3, width=2.6, height=2.2)
    for panel, branch, letter in ((axes[0], STANDARD, "a"), (axes[1], RESCALED, "b")):
        column = layer_column(runs[branch], config.layer)
        draw_unit_gradients(panel, runs[branch], column, average=_average(config))
        panel.axhline(0, color=THEORY, lw=0.4)
        label_panel(panel, letter, f"{branch}: squared unit gradient")
    axes[0].legend()
    for colour, branch in zip(COLOURS, BRANCHES, strict=False):
        chosen = runs[branch]
        column = layer_column(chosen, config.layer)
        axes[2].plot(chosen["sampled_step"], chosen["norm"][:, column], color=colour, label=branch)
        theory = _norm_theory(config, chosen, column)
        axes[2].plot(chosen["sampled_step"], theory, color=colour, lw=0.9, ls="--", label=f"{branch}, theory")
    label_panel(axes[2], "c", "one layer: norm", ylim=(0, None), xlabel="step", legend=True)
    return figure


def _norm_theory(config: Config, run: Arrays, column: int) -> Array:
    """Theorem 2's norm for the running mean of h~ over as many steps as in the paper."""
    balanced = running_mean(run["momentum_unit_grad_sq"][:, column], _average(config))
    drops = np.searchsorted(config.drops, run["sampled_step"], side="right")
    return equilibrium_norm(config.sgd.rule, balanced, lr_factor=config.divisor ** -drops.astype(np.float64))


def _average(config: Config) -> int:
    """Number of samples in running means."""
    return max(1, config.average // config.watch_every)


_SMOKE = Config(
    sgd=Sgd("SGDM", lr=1.0, weight_decay=5e-4, other_lr=0.01, momentum=0.9),  # norms far above BatchNorm's eps
    images=Images("digits", flip=False, label_noise=0.3),
    network=Network(width=4, blocks=(1,)),
    batch_size=32,
    drops=(20, 40, 50),
    steps=60,
    at_once=(2, 10),
    settled=10,
    last=1,
    average=10,
    measure_every=20,
)
_PAPER = Config(  # of ImageNet; COCO is not implemented
    sgd=trainings.IMAGENET_SGDM,
    images=trainings.IMAGENET,
    network=trainings.RESNET50,
    batch_size=256,
    drops=trainings.IMAGENET_DROPS,
    steps=trainings.IMAGENET_STEPS,
    layer=trainings.RESNET50_LAYERS["layer1.0.conv2"],
    at_once=(10, 1000),
    settled=5 * trainings.IMAGENET_EPOCH,
    last=5,
    measure_every=trainings.IMAGENET_EPOCH,
    watch_every=20,
    ghost=trainings.WORKER,
)
_DESK = Config(seeds=tuple(range(33, 41)))  # with 30 to 32 alone five claims were not decided

EXPERIMENT = Experiment(
    id="smd-multistage",
    title="All layers' angles over stages of the learning rate: lagging, and on theory at once with rescaled weights",
    source="smd fig. 3, 6; table 1",
    scales={"smoke": _SMOKE, "desk": _DESK, "paper": _PAPER},
    functions=(trainings.tasks, run_task, collect, draw),
    kind=NETWORKS,
    needs=trainings.needs,
)

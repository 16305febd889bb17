"""smd-multistage: all layers' angles over stages of the learning rate, with and without rescaled weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError
from equilibria.lab.harness.claim import Claim, Source, not_demanded
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Findings, Outcome
from equilibria.lab.harness.figures import COLOURS, THEORY, panels, title
from equilibria.lab.harness.seeds import mean_at_least, mean_at_most, mean_near
from equilibria.lab.harness.task import scratch, tell_progress
from equilibria.lab.papers.smd.image_training import (
    COLUMNS,
    IMAGENET,
    IMAGENET_DROPS,
    IMAGENET_EPOCH,
    IMAGENET_SGDM,
    IMAGENET_STEPS,
    RESNET8,
    RESNET50,
    Images,
    Network,
    Plan,
    Sgd,
    arrays,
    evaluation,
    load,
    recipe,
)
from equilibria.lab.papers.smd.layer_angles import (
    Window,
    draw_layers,
    explained,
    inside,
    law_after_drop,
    layer,
    rms_ratio,
    running_mean,
)
from equilibria.lab.papers.smd.seed_tasks import key, needs, tasks
from equilibria.theory.settling import after_lr_drop, minimum_settling_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


STANDARD, RESCALED = "standard", "rescaled"
BRANCHES = (STANDARD, RESCALED)
BEFORE = "before"
# Norms go with sqrt(lr / wd): three drops leave them far above BatchNorm's eps.
_SGDM = Sgd("SGDM", lr=0.5, weight_decay=5e-4, other_lr=0.01, momentum=0.9)
_SMALL = Images(size=8)


@dataclass(frozen=True)
class Config:
    """A learning rate that is divided by ``divisor`` at each of the ``drops``, with and without rescaled weights.

    At desk scale the stages have about the lengths of the paper's, in units of their own time constants (1 - momentum)
    / (4 lr wd): many in the first, five in the second, a fraction of one in the others.

    Attributes:
        at_once: window after a drop, in steps.
        settled: steps at the end of the second stage that are judged.
        last: measurements at the end whose accuracy is averaged.
    """

    sgd: Sgd = _SGDM
    images: Images = _SMALL
    network: Network = RESNET8
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
    seeds: tuple[int, ...] = (30, 31, 32)

    def __post_init__(self) -> None:
        if len(self.drops) != 3 or not 0 < self.drops[0] < self.drops[1] < self.drops[2] < self.steps:
            raise EquilibriaError(f"got drops={self.drops}; expected three, one after the other, before {self.steps}")

    def plan(self) -> Plan:
        """The training without rescaled weights, to its end."""
        return Plan(
            images=self.images,
            network=self.network,
            sgd=self.sgd,
            batch_size=self.batch_size,
            steps=self.steps,
            drops=self.drops,
            divisor=self.divisor,
            measure_every=self.measure_every,
            watch_every=self.watch_every,
        )


def run_task(config: Config, task: int) -> Arrays:
    """Train to the first drop, then on from there in both ways."""
    from equilibria.lab.training import train

    loaded, folder = load(config.images), scratch()
    after = config.steps - config.drops[0]
    tell = tell_progress(config.drops[0] + len(BRANCHES) * after)
    plan = replace(config.plan(), measures={"test": evaluation(loaded)})
    before = train(
        recipe(replace(plan, steps=config.drops[0]), loaded, seed=task), folder=folder / BEFORE, progress=tell
    )
    found = arrays(before, part=f"{BEFORE}_")
    for number, branch in enumerate(BRANCHES):
        trained = train(
            recipe(replace(plan, rescale=branch == RESCALED), loaded, seed=task),
            folder=folder / branch,
            start=before.state,
            progress=lambda step, done=number * after: tell(step + done),  # type: ignore[misc]
        )
        found |= arrays(trained, part=f"{branch}_")
    return found


Array = NDArray[np.float64]
_LAGS = Source("smd", "fig. 3 (a)", law="settling.after_lr_drop")
_AT_ONCE = Source(
    "smd",
    "fig. 3 (b), §5.2",
    corrected="the momentum buffer and BatchNorm's statistics must be rescaled too",
    law="rescale.rescale_factors",
)
_BOUND = Source(
    "smd",
    "Corollary 3.1",
    corrected="the lr in the bound is the new one; with the old one it is k times too small",
    law="settling.minimum_settling_steps",
)
_TABLE = Source("smd", "table 1 (ResNet-50 on ImageNet)")
_POINTS = "points"
_DROPS = ("first", "second", "third")
# Ten per cent at each drop for the norm of the unit gradient, which changes as the network fits better, and which norms
# that lag do not follow; five for the way back.
_PER_DROP, _WAY_BACK = 0.10, 0.05
_NEAR = _PER_DROP + _WAY_BACK
# Of one layer; its unit gradient may change by twice as much as that of the median one.
_ANY_LAYER = 0.30
# Accuracies of two trainings of one seed, averaged over a few evaluations of 10,000 images, differ by this much anyway.
_EQUAL = 1.0
# What is left when the unit gradient's change is taken into account: its own scatter over a hundred steps.
_EXPLAINED = 0.10
_ARRIVED = 0.95


@dataclass(frozen=True)
class _Course:
    """One seed: the median layer's angle over its equilibrium, in windows after each drop, and the accuracy.

    explained: the same after the first drop, over what the norm and the measured unit gradients lead to.
    """

    at_once: dict[str, list[float]]
    explained: dict[str, float]
    farthest: dict[str, list[float]]
    settled: float
    late: list[float]
    arrival: float
    accuracy: dict[str, float]


def _course(config: Config, run: Arrays) -> _Course:
    windows = [(drop + config.at_once[0], drop + config.at_once[1]) for drop in config.drops]
    ratios = {branch: [rms_ratio(run, window, part=f"{branch}_") for window in windows] for branch in BRANCHES}
    return _Course(
        at_once={branch: [float(np.median(each)) for each in of] for branch, of in ratios.items()},
        explained={branch: _explained(config, run, branch, ratios[branch][0]) for branch in BRANCHES},
        farthest={branch: [float(np.abs(each - 1).max()) for each in of] for branch, of in ratios.items()},
        settled=_median(run, (config.drops[1] - config.settled, config.drops[1])),
        late=[_median(run, stage) for stage in _last_stages(config)],
        arrival=_arrival(config, run),
        accuracy={branch: 100 * float(run[f"{branch}_test_accuracy"][-config.last :].mean()) for branch in BRANCHES},
    )


def _explained(config: Config, run: Arrays, branch: str, ratio: Array) -> float:
    """After the first drop."""
    drop, (first, end) = config.drops[0], config.at_once
    before = run[f"{BEFORE}_momentum_unit_grad_sq"][inside(run[f"{BEFORE}_sampled_step"], (drop - end, drop))]
    after = run[f"{branch}_momentum_unit_grad_sq"][inside(run[f"{branch}_sampled_step"], (drop + first, drop + end))]
    start = config.divisor**-0.5 if branch == STANDARD else 1.0
    return explained(ratio, start, before=before, after=after)


def _last_stages(config: Config) -> list[Window]:
    return [(config.drops[1], config.drops[2]), (config.drops[2], config.steps)]


def _median(run: Arrays, window: Window) -> float:
    return float(np.median(rms_ratio(run, window, part=f"{STANDARD}_")))


def _arrival(config: Config, run: Arrays) -> float:
    """Steps after the first drop until the median layer's angle is within 5 % of its new equilibrium."""
    steps = run[f"{STANDARD}_sampled_step"]
    ratio = (run[f"{STANDARD}_angle"] / run[f"{STANDARD}_angle_equilibrium"])[steps < config.drops[1]]
    smooth = np.sqrt(running_mean(ratio**2, max(1, config.average // config.watch_every)))
    there = np.median(smooth, axis=1) >= _ARRIVED
    place = int(there.argmax()) if there.any() else len(there) - 1
    return float(steps[place] - config.drops[0])


def _predicted(config: Config) -> list[float]:
    """The law's root mean square angle over equilibrium: at the end of stage 2, and over all of stages 3 and 4.

    A drop from a state that lags multiplies fourth powers of norms: gamma / gamma* is first multiplied by k, then
    relaxes towards 1.
    """
    gamma, found = 1.0, []
    judged = (config.settled, config.steps, config.steps)
    bounds = [*config.drops, config.steps]
    for stage, (begin, end) in enumerate(pairwise(bounds), start=1):
        rule = replace(config.sgd.rule, lr=config.sgd.lr / config.divisor**stage)
        gamma *= config.divisor
        path = after_lr_drop(rule, gamma, steps=np.arange(end - begin))
        found.append(float(np.sqrt(np.mean(path.angle_ratio[-judged[stage - 1] :] ** 2))))
        gamma = float(path.norm_ratio[-1]) ** 4
    return found


def collect(config: Config, found: Findings) -> Outcome:
    """Angles after every drop in both branches, and what they come to in the end."""
    courses = [_course(config, found[key(seed)]) for seed in config.seeds]
    claims = [*_judge_standard(config, courses), *_judge_rescaled(config, courses), _judge_accuracy(config, courses)]
    numbers = {
        "at_once": {branch: [course.at_once[branch] for course in courses] for branch in BRANCHES},
        "explained": {branch: [course.explained[branch] for course in courses] for branch in BRANCHES},
        "farthest_layer": {branch: [course.farthest[branch] for course in courses] for branch in BRANCHES},
        "settled": [course.settled for course in courses],
        "last_stages": [course.late for course in courses],
        "arrival": [course.arrival for course in courses],
        "test_accuracy": {branch: [course.accuracy[branch] for course in courses] for branch in BRANCHES},
    }
    return Outcome([not_demanded(claim) for claim in claims] if config.images.data == "digits" else claims, numbers)


def _judge_standard(config: Config, courses: Sequence[_Course]) -> list[Claim]:
    rule = replace(config.sgd.rule, lr=config.sgd.lr / config.divisor)
    settled, *late = _predicted(config)
    return [
        mean_near(
            f"Angle of the median layer over its new equilibrium, {config.at_once[0]} to {config.at_once[1]} steps "
            f"after lr / {config.divisor:g}",
            _LAGS,
            expected=law_after_drop(config.sgd.rule, config.divisor, config.at_once),
            values=[course.at_once[STANDARD][0] for course in courses],
            relative=_NEAR,
        ),
        mean_at_least(
            "Steps until it is within 5 % of it: the corollary's lower bound",
            _BOUND,
            bound=minimum_settling_steps(rule, config.divisor),
            values=[course.arrival for course in courses],
            unit="steps",
            printed=minimum_settling_steps(rule, config.divisor) / config.divisor,
        ),
        mean_near(
            f"The same over the last {config.settled} steps of the second stage (law: constant unit gradient)",
            _LAGS,
            expected=settled,
            values=[course.settled for course in courses],
            relative=_NEAR,
        ),
        *(
            mean_near(
                f"The same over the whole {ordinal} stage, which is too short for it to come back",
                _LAGS,
                expected=expected,
                values=[course.late[place] for course in courses],
                relative=_PER_DROP * (place + 2) + _WAY_BACK,
            )
            for place, (ordinal, expected) in enumerate(zip(("third", "fourth"), late, strict=True))
        ),
    ]


def _judge_rescaled(config: Config, courses: Sequence[_Course]) -> list[Claim]:
    lagging = law_after_drop(config.sgd.rule, config.divisor, config.at_once) * config.divisor**0.5
    near = [
        mean_near(
            f"With rescaled weights: angle of the median layer over its new equilibrium, {config.at_once[0]} to "
            f"{config.at_once[1]} steps after the {drop} drop",
            _AT_ONCE,
            expected=1.0,
            values=[course.at_once[RESCALED][place] for course in courses],
            relative=_NEAR,
        )
        for place, drop in enumerate(_DROPS)
    ]
    farther = [
        [
            abs(np.log(course.at_once[RESCALED][place])) - abs(np.log(course.at_once[STANDARD][place]))
            for course in courses
        ]
        for place in range(len(_DROPS))
    ]
    return [
        near[0],
        # The network still learns, its unit gradient grows, and norms are too slow to follow at so small an lr.
        *(claim if config.images.data == "imagenet" else not_demanded(claim) for claim in near[1:]),
        *(
            mean_at_most(
                f"After the {drop} drop the angle is nearer to its theory with rescaled weights: |ln(angle / theory)| "
                "with them minus that without, seed by seed",
                _AT_ONCE,
                bound=0.0,
                values=values,
            )
            for drop, values in zip(_DROPS, farther, strict=True)
        ),
        mean_at_most(
            "With rescaled weights: |angle / theory - 1| of the layer that is farthest off, after the first drop",
            _AT_ONCE,
            bound=_ANY_LAYER,
            values=[course.farthest[RESCALED][0] for course in courses],
        ),
        *(
            mean_near(
                f"Angle of the median layer after the first drop, {branch}, over what its norm and the unit gradient "
                "as it is then lead to",
                _AT_ONCE if branch == RESCALED else _LAGS,
                expected=lagging if branch == STANDARD else 1.0,
                values=[course.explained[branch] for course in courses],
                relative=_EXPLAINED,
            )
            for branch in BRANCHES
        ),
    ]


def _judge_accuracy(config: Config, courses: Sequence[_Course]) -> Claim:
    """Not demanded of trainings that are far from their end, where it still matters how fast layers turn."""
    claim = mean_near(
        "Final test accuracy with rescaled weights minus that without, seed by seed",
        _TABLE,
        expected=0.0,
        values=[course.accuracy[RESCALED] - course.accuracy[STANDARD] for course in courses],
        absolute=_EQUAL,
        unit=_POINTS,
        printed=76.27 - 76.25,
    )
    return claim if config.images.data == "imagenet" else not_demanded(claim)


def _whole(run: Arrays, branch: str) -> dict[str, NDArray[np.generic]]:
    """First stage and branch as one training."""
    columns = ("sampled_step", *COLUMNS)
    joined = {name: np.concatenate([run[f"{BEFORE}_{name}"], run[f"{branch}_{name}"]]) for name in columns}
    return {**joined, "names": run[f"{branch}_names"]}


def draw(config: Config, found: Findings) -> Mapping[str, Figure]:
    """Figures 3 (a)-(c) and 6: the first seed."""
    run = found[key(config.seeds[0])]
    runs = {branch: _whole(run, branch) for branch in BRANCHES}
    return {"angles": _draw_angles(config, runs), "unit-gradients": _draw_gradients(config, runs)}


def _draw_angles(config: Config, runs: Mapping[str, Arrays]) -> Figure:
    figure, (standard, rescaled, norms) = panels(1, 3, width=2.6, height=2.2)
    for axes, branch, letter in ((standard, STANDARD, "a"), (rescaled, RESCALED, "b")):
        draw_layers(axes, runs[branch], average=10)
        axes.set_yscale("log")
        low = float(runs[branch]["angle_equilibrium"].min())
        axes.set_ylim(low / 20, 6 * float(runs[branch]["angle_equilibrium"].max()))
        title(axes, letter, f"angles of all layers, {branch}")
    standard.legend(loc="lower left")
    for colour, branch in zip(COLOURS, BRANCHES, strict=False):
        chosen = runs[branch]
        norms.plot(chosen["sampled_step"], chosen["norm"][:, layer(chosen, config.layer)], color=colour, label=branch)
    norms.set(xlabel="step")
    norms.set_ylim(bottom=0)
    norms.legend()
    title(norms, "c", "norm of one layer")
    return figure


def _draw_gradients(config: Config, runs: Mapping[str, Arrays]) -> Figure:
    figure, axes = panels(1, 3, width=2.6, height=2.2)
    for panel, branch, letter in ((axes[0], STANDARD, "a"), (axes[1], RESCALED, "b")):
        _draw_unit_gradient(panel, config, runs[branch])
        title(panel, letter, f"squared unit gradient, {branch}")
    axes[0].legend(loc="upper left")
    for colour, branch in zip(COLOURS, BRANCHES, strict=False):
        chosen = runs[branch]
        column = layer(chosen, config.layer)
        axes[2].plot(chosen["sampled_step"], chosen["norm"][:, column], color=colour, label=branch)
        theory = _norm_theory(config, chosen, column)
        axes[2].plot(chosen["sampled_step"], theory, color=colour, lw=0.9, ls="--", label=f"{branch}, theory")
    axes[2].set_ylim(bottom=0)
    axes[2].set_xlabel("step")
    axes[2].legend()
    title(axes[2], "c", "norm and its theory")
    return figure


def _draw_unit_gradient(axes: Axes, config: Config, run: Arrays) -> None:
    column, count = layer(run, config.layer), max(1, config.average // config.watch_every)
    names = {"unit_grad_sq": "$\\|\\tilde g\\|^2$", "momentum_unit_grad_sq": "$\\tilde h$"}
    for colour, (name, label) in zip(COLOURS, names.items(), strict=False):
        values = run[name][:, column]
        axes.plot(run["sampled_step"], values, color=colour, lw=0.3, alpha=0.3)
        axes.plot(run["sampled_step"], running_mean(values, count), color=colour, label=label)
    high = float(np.quantile(run["unit_grad_sq"][:, column], 0.995))
    axes.set_ylim(-0.3 * high, 1.5 * high)
    axes.axhline(0, color=THEORY, lw=0.4)
    axes.set_xlabel("step")


def _norm_theory(config: Config, run: Arrays, column: int) -> Array:
    """Theorem 2's norm with the mean of h~ over as many steps as the paper takes; x^4 goes with L and lr."""
    at_one = config.sgd.rule.equilibrium(unit_grad_sq=1.0).norm
    assert at_one is not None
    balanced = running_mean(run["momentum_unit_grad_sq"][:, column], max(1, config.average // config.watch_every))
    drops = np.searchsorted(config.drops, run["sampled_step"], side="right")
    found: Array = at_one * (np.maximum(balanced, 0.0) * config.divisor ** -drops.astype(np.float64)) ** 0.25
    return found


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
    sgd=IMAGENET_SGDM,
    images=IMAGENET,
    network=RESNET50,
    batch_size=256,
    drops=IMAGENET_DROPS,
    steps=IMAGENET_STEPS,
    layer="net.resnet.encoder.stages.0.layers.0.layer.1.convolution.weight",  # layer1.0.conv2
    at_once=(10, 1000),
    settled=5 * IMAGENET_EPOCH,
    last=1,
    measure_every=IMAGENET_EPOCH,
    watch_every=20,
)
_DESK = Config(seeds=tuple(range(33, 39)))  # with 30 to 32 alone five claims stayed open

EXPERIMENT = Experiment(
    id="smd-multistage",
    title="All layers' angles over stages of the learning rate: lagging, and on theory at once with rescaled weights",
    source="smd fig. 3, 6; table 1",
    scales={"smoke": _SMOKE, "desk": _DESK, "paper": _PAPER},
    tasks=tasks,
    run_task=run_task,
    collect=collect,
    draw=draw,
    kind=NETWORKS,
    needs=needs,
)

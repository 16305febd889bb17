"""smd-fixed-lr: unit gradient, norm and angle of a convolution at a fixed learning rate, against theory (fig. 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    IMAGENET,
    IMAGENET_STEPS,
    IMAGES,
    RESNET8,
    RESNET50,
    SGDM,
    Images,
    Network,
    Plan,
    Sgd,
    arrays,
    load,
    recipe,
)
from equilibria.lab.papers.smd.layer_angles import Window, inside, layer, rms_ratio, running_mean
from equilibria.theory.settling import relaxation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Config:
    """SGD and SGDM at one learning rate and weight decay, so that momentum alone makes the difference.

    At desk scale lr * wd is 5e-4: a layer needs a few times 500 steps to its equilibrium under SGD, a few times 50
    under SGDM. The last quarter of each training is judged.

    average: how many steps the mean of the unit gradient is over.
    """

    rules: tuple[Sgd, ...] = (
        Sgd("SGD", lr=0.1, weight_decay=5e-3, other_lr=0.1),
        SGDM,
    )
    steps: tuple[int, ...] = (6000, 2000)
    images: Images = IMAGES
    network: Network = RESNET8
    batch_size: int = 128
    layer: str = "blocks.1.second.conv.weight"
    average: int = 200
    watch_every: int = 2
    seeds: tuple[int, ...] = (20, 21, 22)

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.rules):
            raise EquilibriaError(f"got steps={self.steps}; expected one number for each of {len(self.rules)} rules")

    def plan(self, place: int) -> Plan:
        """The training of one rule."""
        return Plan(
            images=self.images,
            network=self.network,
            sgd=self.rules[place],
            batch_size=self.batch_size,
            steps=self.steps[place],
            watch_every=self.watch_every,
        )


def key(config: Config, place: int, seed: int) -> str:
    """Name of a task."""
    return f"{config.rules[place].name.lower()}-{seed}"


def tasks(config: Config) -> dict[str, tuple[int, int]]:
    """Place of the rule, and seed."""
    return {key(config, place, seed): (place, seed) for place in range(len(config.rules)) for seed in config.seeds}


def needs(config: Config) -> object:
    """Loads the images."""
    return load(config.images)


def run_task(config: Config, task: tuple[int, int]) -> Arrays:
    """One training."""
    from equilibria.lab.training import train

    place, seed = task
    made = recipe(config.plan(place), load(config.images), seed=seed)
    return arrays(train(made, folder=scratch(), progress=tell_progress(made.steps)))


Array = NDArray[np.float64]
_ANGLE = Source("smd", "fig. 2 (c), (f); Thm 3", law="equilibrium.heavy_ball")
_NORM = Source("smd", "fig. 2 (b), (e); Thm 1, 2", law="equilibrium.heavy_ball")
_CORRELATION = Source("smd", "fig. 2 (d), assumption 5", law="unit_gradient.momentum_unit_grad_sq")
_SOONER = Source("smd", "§5.1, remark 2", law="settling.relaxation")
# The angle is off by the drift of the norm, and that by half of how much L drifts in a time constant: a unit gradient
# that grows by 10 % in it gives 2.5 % in the norm and 5 % in the angle.
_ONE_LAYER, _NORM_OFF = 0.05, 0.025
# The smallest layers (1x1 shortcuts, 128 entries) have the fewest, and so noisiest, entries: twice that.
_ANY_LAYER = 0.10
# smd calls the correlation of gradient and buffer "very close to 0"; a tenth is what 2.5 % of the norm allow.
_UNCORRELATED = 0.10
_ARRIVED = 0.05  # of the norm
# The theory's own norm is on its way while the network learns: a slower layer is not as many times later as the law
# says, nor does a faster one arrive before what it follows.
_DRIFTS = 3.0


@dataclass(frozen=True)
class _Course:
    """One training: means over its last quarter, and when its layers arrived."""

    angle: float
    farthest: float
    norm: float
    correlated: float
    arrival: float


def _course(config: Config, place: int, run: Arrays) -> _Course:
    window = last_quarter(config, place)
    chosen, column = inside(run["sampled_step"], window), layer(run, config.layer)
    ratios = rms_ratio(run, window)
    off = run["norm"] / norm_theory(config, place, run)
    with_buffer, alone = (run[name][chosen, column].mean() for name in ("momentum_unit_grad_sq", "unit_grad_sq"))
    return _Course(
        angle=float(ratios[column]),
        farthest=float(np.abs(ratios - 1).max()),
        norm=float(off[chosen, column].mean()),
        correlated=float(with_buffer / alone) if config.rules[place].momentum else 1.0,
        arrival=float(np.median(arrivals(run["sampled_step"], off, stay=config.average // config.watch_every))),
    )


def last_quarter(config: Config, place: int) -> Window:
    """The steps that are judged."""
    return config.steps[place] * 3 // 4, config.steps[place]


def norm_theory(config: Config, place: int, run: Arrays) -> Array:
    """The norm of theorems 1 and 2, with L the mean of what each optimizer's norm balances."""
    at_one = config.rules[place].rule.equilibrium(unit_grad_sq=1.0).norm
    assert at_one is not None
    name = "momentum_unit_grad_sq" if config.rules[place].momentum else "unit_grad_sq"
    balanced = running_mean(run[name], max(1, config.average // config.watch_every))
    found: Array = at_one * np.maximum(balanced, 0.0) ** 0.25
    return found


def arrivals(steps: NDArray[np.int64], off: Array, *, stay: int) -> Array:
    """For each layer the first step from which on its norm is within 5 % of the theory's; the last one if it never is.

    Args:
        steps: of the samples.
        off: norm over theory, samples by layers.
        stay: samples it must stay there: norms also pass by the theory's on their way elsewhere.
    """
    away = np.concatenate([np.zeros((1, off.shape[1])), np.cumsum(np.abs(off - 1) >= _ARRIVED, axis=0)])
    there = away[stay:] == away[:-stay]
    first = np.where(there.any(axis=0), there.argmax(axis=0), len(steps) - 1)
    found: Array = steps[first].astype(np.float64)
    return found


def collect(config: Config, found: Findings) -> Outcome:
    """Angle and norm of both optimizers, and which arrives sooner."""
    claims, numbers, arrived = [], {}, []
    sooner = relaxation(config.rules[1].rule).rate / relaxation(config.rules[0].rule).rate
    for place, sgd in enumerate(config.rules):
        courses = [_course(config, place, found[key(config, place, seed)]) for seed in config.seeds]
        claims += _judge(config, sgd, courses)
        arrived.append(np.array([course.arrival for course in courses]))
        numbers[sgd.name] = {
            name: [getattr(course, name) for course in courses]
            for name in ("angle", "farthest", "norm", "correlated", "arrival")
        }
    claims.append(
        mean_at_least(
            f"{config.rules[1].name} arrives sooner: steps until the norm of the median layer is and stays within 5 % "
            f"of its theory, {config.rules[0].name} over {config.rules[1].name}, seed by seed (the law for a constant "
            f"unit gradient: {sooner:.3g})",
            _SOONER,
            bound=sooner / _DRIFTS,
            values=arrived[0] / np.maximum(arrived[1], 1.0),
        )
    )
    return Outcome([not_demanded(claim) for claim in claims] if config.images.data == "digits" else claims, numbers)


def _judge(config: Config, sgd: Sgd, courses: Sequence[_Course]) -> list[Claim]:
    claims = [
        mean_near(
            f"{sgd.name}: root mean square angle of {config.layer} over its theory, last quarter",
            _ANGLE,
            expected=1.0,
            values=[course.angle for course in courses],
            relative=_ONE_LAYER,
        ),
        mean_at_most(
            f"{sgd.name}: |angle / theory - 1| of the layer that is farthest off",
            _ANGLE,
            bound=_ANY_LAYER,
            values=[course.farthest for course in courses],
        ),
        mean_near(
            f"{sgd.name}: norm of {config.layer} over its theory, last quarter",
            _NORM,
            expected=1.0,
            values=[course.norm for course in courses],
            relative=_NORM_OFF,
        ),
    ]
    return [*claims, *([_judge_correlation(config, sgd, courses)] if sgd.momentum else [])]


def _judge_correlation(config: Config, sgd: Sgd, courses: Sequence[_Course]) -> Claim:
    """Steps that turn a layer five times as far as the paper's bend its gradient back: a small scale cannot show it."""
    claim = mean_near(
        f"{sgd.name}: gradient and buffer are hardly correlated: mean h~ over mean squared unit gradient",
        _CORRELATION,
        expected=1.0,
        values=[course.correlated for course in courses],
        relative=_UNCORRELATED,
    )
    return claim if config.images.data == "imagenet" else not_demanded(claim)


def draw(config: Config, found: Findings) -> dict[str, Figure]:
    """Figure 2: unit gradient, norm and angle of one layer; a row per optimizer. The first seed."""
    figure, axes = panels(len(config.rules), 3, width=2.5, height=1.9)
    for place, sgd in enumerate(config.rules):
        run = found[key(config, place, config.seeds[0])]
        column, row = layer(run, config.layer), axes[3 * place : 3 * place + 3]
        _draw_gradient(row[0], config, sgd, run, column)
        _draw_norm(row[1], config, place, run, column)
        _draw_angle(row[2], run, column)
        letters = "abcdef"[3 * place :]
        title(row[0], letters[0], f"{sgd.name}: squared unit gradient")
        title(row[1], letters[1], "norm")
        title(row[2], letters[2], "angle of a step, rad")
        for each in row:
            each.set_xlabel("step")
    return {"fixed-lr": figure}


def _draw_gradient(axes: Axes, config: Config, sgd: Sgd, run: Arrays, column: int) -> None:
    names = {"unit_grad_sq": "$\\|\\tilde g\\|^2$", "momentum_unit_grad_sq": "$\\tilde h$"}
    count = max(1, config.average // config.watch_every)
    for colour, (name, label) in zip(COLOURS, names.items(), strict=False):
        if name == "momentum_unit_grad_sq" and not sgd.momentum:
            continue
        values = run[name][:, column]
        axes.plot(run["sampled_step"], values, color=colour, lw=0.3, alpha=0.3)
        axes.plot(run["sampled_step"], running_mean(values, count), color=colour, label=label)
    high = float(np.quantile(run["unit_grad_sq"][:, column], 0.995))
    axes.set_ylim(-0.3 * high if sgd.momentum else 0, 1.5 * high)
    axes.legend(loc="upper left")


def _draw_norm(axes: Axes, config: Config, place: int, run: Arrays, column: int) -> None:
    axes.plot(run["sampled_step"], run["norm"][:, column], color=COLOURS[0], label="measured")
    theory = norm_theory(config, place, run)[:, column]
    axes.plot(run["sampled_step"], theory, color=THEORY, ls="--", lw=0.9, label="theory")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")


def _draw_angle(axes: Axes, run: Arrays, column: int) -> None:
    axes.plot(run["sampled_step"], run["angle"][:, column], color=COLOURS[1], lw=0.4, label="measured")
    axes.plot(run["sampled_step"], run["angle_equilibrium"][:, column], color=THEORY, ls="--", label="theory")
    axes.set_ylim(0, 2.5 * float(np.median(run["angle"][:, column])))
    axes.legend(loc="upper right")


_SMOKE = Config(
    rules=(
        Sgd("SGD", lr=0.5, weight_decay=5e-3, other_lr=0.1),
        Sgd("SGDM", lr=0.1, weight_decay=5e-3, other_lr=0.01, momentum=0.9),
    ),
    steps=(64, 48),
    images=Images("digits", flip=False, label_noise=0.3),
    network=Network(width=4, blocks=(1, 1)),
    batch_size=32,
    average=20,
)
_PAPER = Config(
    rules=(
        Sgd("SGD", lr=0.2, weight_decay=1e-4, other_lr=0.2),
        Sgd("SGDM", lr=0.2, weight_decay=1e-4, other_lr=0.2, momentum=0.9),
    ),
    steps=(IMAGENET_STEPS, IMAGENET_STEPS),
    images=IMAGENET,
    network=RESNET50,
    batch_size=256,
    layer="net.resnet.encoder.stages.1.layers.0.layer.1.convolution.weight",  # layer2.0.conv2
    watch_every=20,
)
_DESK = Config(seeds=tuple(range(23, 29)))  # with 20 to 22 alone the ratio of arrivals stayed open

EXPERIMENT = Experiment(
    id="smd-fixed-lr",
    title="Unit gradient, norm and angle of a convolution at a fixed learning rate",
    source="smd fig. 2",
    scales={"smoke": _SMOKE, "desk": _DESK, "paper": _PAPER},
    tasks=tasks,
    run_task=run_task,
    collect=collect,
    draw=draw,
    kind=NETWORKS,
    needs=needs,
)

"""eq-forecast: norm and angle of every layer over the rest of a run, forecast from its first 300 steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equilibria.experiments.claim import Claim, Source, at_least, at_most, not_demanded
from equilibria.experiments.eq.forecast_runs import OPTIMIZERS, Config, Packed, needs, run_task, tasks
from equilibria.experiments.experiment import NETWORKS, Arrays, Experiment, Findings, Outcome
from equilibria.experiments.figures import COLOURS, THEORY, panels, title
from equilibria.forecasting import BASELINES, FORECAST, BackTest, backtest
from equilibria.forecasting.backtest import rms

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

_GOALS = {"angle": (0.05, 0.12), "norm": (0.04, 0.10)}  # median and 90th percentile of the relative error
_COVERED = (0.85, 0.95)
_SOURCE = Source("", "beyond", law="transient.evolve")


def collect(config: Config, found: Findings) -> Outcome:
    """The goals, each over all layers and remaining steps of all trainings of a family and schedule."""
    tests = {key: backtest(Packed(arrays), start=config.start) for key, arrays in found.items()}
    claims: list[Claim] = []
    for family in config.families:
        for schedule in config.schedules:
            keys = [f"{family}-{optimizer}-{schedule}" for optimizer in OPTIMIZERS]
            own = [tests[key] for key in keys]
            claims += _claims(f"{family}, {schedule}", own)
    claims += _claims("all trainings", list(tests.values()))
    if config.steps:  # too short for anything to happen
        claims = [not_demanded(claim) for claim in claims]
    return Outcome(claims, {key: _numbers(test) for key, test in tests.items()})


def _claims(what: str, tests: list[BackTest]) -> list[Claim]:
    errors = {"angle": _errors(tests, "angle_error"), "norm": _errors(tests, "norm_error")}
    claims = []
    for name, (median, most) in _GOALS.items():
        found = np.percentile(errors[name], [50, 90])
        claims += [
            at_most(f"{what}: median error of the {name}", _SOURCE, bound=median, measured=float(found[0])),
            at_most(f"{what}: 90th percentile of it", _SOURCE, bound=most, measured=float(found[1])),
        ]
    for name in ("angle", "norm"):
        share = _covered(tests, name)
        claims += [
            at_least(f"{what}: share of {name}s inside the 90 % band", _SOURCE, bound=_COVERED[0], measured=share),
            at_most(f"{what}: the same is no more than", _SOURCE, bound=_COVERED[1], measured=share),
        ]
    own = float(np.median(errors["angle"]))
    for name in BASELINES:
        guess = np.concatenate([rms(each.guesses[name]) / each.rms_angle - 1 for test in tests for each in test.layers])
        bound = float(np.median(np.abs(guess)))
        claims.append(
            at_most(f"{what}: median error of the angle, against {name!r}", _SOURCE, bound=bound, measured=own)
        )
    return claims


def _errors(tests: list[BackTest], name: str) -> Array:
    errors: Array = np.abs(np.concatenate([getattr(each, name) for test in tests for each in test.layers]))
    return errors


def _covered(tests: list[BackTest], name: str) -> float:
    pairs = [(getattr(each, f"{name}_coverage"), len(each.angle)) for test in tests for each in test.layers]
    shares, weights = zip(*pairs, strict=True)
    return float(np.average(shares, weights=weights))


def _numbers(test: BackTest) -> dict[str, Any]:
    own = test.scores[FORECAST]
    return {
        "angle_median": own.angle,
        "angle_p90": own.angle_p90,
        "single_angle_median": own.single_angle,
        "norm_median": own.norm,
        "norm_p90": own.norm_p90,
        "angle_coverage": test.angle_coverage,
        "norm_coverage": test.norm_coverage,
        **{name: test.scores[name].angle for name in BASELINES},
        "by_horizon": [[first, score.angle, score.norm] for first, score in test.horizons],
    }


def draw(config: Config, found: Findings) -> Mapping[str, Figure]:
    """One layer of every training: measured before and after the forecast begins, the forecast and its band."""
    figures = {}
    for family in config.families:
        figure, axes = panels(len(OPTIMIZERS), len(config.schedules), width=2.4, height=2.0)
        for place, (optimizer, schedule) in enumerate((o, s) for o in OPTIMIZERS for s in config.schedules):
            key = f"{family}-{optimizer}-{schedule}"
            _draw(axes[place], found[key], backtest(Packed(found[key]), start=config.start))
            title(axes[place], "abcdefgh"[place], f"{optimizer}, {schedule}")
        axes[0].legend()
        figures[f"forecast-{family}"] = figure
    return figures


def _draw(axes: Axes, arrays: Arrays, test: BackTest) -> None:
    layer = test.layers[len(test.layers) // 2]
    own, known = layer.forecast, arrays["step"] < test.start
    names = [each["name"] for each in Packed(arrays).metadata["params"]]
    before = arrays["angle"][known, names.index(own.name)]
    axes.plot(arrays["step"][known], before, ",", color="#8a9199")
    axes.plot(own.step, layer.angle, ",", color=COLOURS[0])
    axes.plot([], [], ".", color=COLOURS[0], label="measured")
    axes.fill_between(own.step, own.angle.low, own.angle.high, color=COLOURS[1], alpha=0.25, lw=0)
    axes.plot(own.step, own.angle.value, color=COLOURS[1], label="forecast")
    axes.plot(own.step, own.angle_equilibrium, color=THEORY, ls="--", lw=0.8, label="equilibrium")
    axes.set(xlabel="step", ylabel="angle per step (rad)", yscale="log")
    axes.set_ylim(max(float(np.percentile(layer.angle, 2)) / 2, 1e-5), float(before.max()) * 1.5)


EXPERIMENT = Experiment(
    id="eq-forecast",
    version=2,  # the committed result is of version 1: of 30,000 images, and an earlier sampling of the runs
    title="Norm and angle of every layer, forecast from the first 300 steps of a run",
    source="beyond the papers",
    scales={
        "smoke": Config(families=("digits",), schedules=("step",), start=80, steps=160),
        "desk": Config(),
        "paper": Config(),
    },
    tasks=tasks,
    run_task=run_task,
    collect=collect,
    draw=draw,
    kind=NETWORKS,
    needs=needs,
)

"""nrq-bounds: the risk stays between the corrected bounds of theorem 1, but not between the printed ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from equilibria.lab.harness.claim import Claim, Source, identity
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels
from equilibria.lab.papers.nrq import rayleigh
from equilibria.lab.problems.rayleigh import RayleighQuotient
from equilibria.theory.rayleigh import NoisyRayleigh, angular_update, norm_sq_at
from equilibria.theory.rayleigh_risk import alignment_sde, quotient_bounds, risk_lower_bound, risk_upper_bound

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOWER = Source(
    "nrq",
    "theorem 1, eqs. (18)-(19)",
    corrected="the rate in (19) is 2 (a_p - a_1) Delta/S: a factor 2 was missing and an lr too many",
    law="rayleigh_risk.risk_lower_bound",
)
_UPPER = Source(
    "nrq",
    "theorem 1, eqs. (20)-(21)",
    corrected="a factor 2 was missing twice, the inner exponential grows, and the tail is that of the inner time",
    law="rayleigh_risk.risk_upper_bound",
)
_DRIFT = Source(
    "nrq",
    "eq. (16)",
    corrected="the drift is 2 (lr/M) (rho - a_1) f + ... with rho = 2 L: printed without the 2",
    law="rayleigh_risk.alignment_sde",
)
_SANDWICH = Source(
    "nrq",
    "section 3, before eq. (16)",
    corrected="the loss between the two lines is the quotient 2 L",
    law="rayleigh_risk.quotient_bounds",
)


@dataclass(frozen=True)
class Case:
    """A spectrum, its start, and the level xi of the upper bound; ``norm_sq=None`` starts the norm in equilibrium."""

    name: str
    spectrum: tuple[float, ...]
    risk: float
    xi: float
    norm_sq: float | None = None

    @property
    def key(self) -> str:
        """Key of the task."""
        return self.name.replace(" ", "-")


_EVEN = tuple(np.linspace(1, 2, 10).tolist())


@dataclass(frozen=True)
class Config:
    """Trials of each case, and single steps in pairs of opposite noise for the drift from which the bounds follow."""

    cases: tuple[Case, ...] = (
        Case("in equilibrium", _EVEN, risk=0.7, xi=0.6),
        Case("from a large norm", (1.0, 1.8, 1.9, 2.0, 2.0, 2.0), risk=0.1, xi=0.7, norm_sq=25.0),
        Case("from a small norm", (1.0, *[2.0] * 9), risk=0.02, xi=0.8, norm_sq=2.0),
    )
    noise: float = 1.0
    lr: float = 0.1
    weight_decay: float = 0.01
    steps: int = 3000
    trials: int = 2000
    every: int = 5
    drift_lrs: tuple[float, ...] = (0.02, 0.005)
    drift_pairs: int = 2_000_000
    seed: int = 0

    def model(self, case: Case) -> NoisyRayleigh:
        """The model of a case."""
        return NoisyRayleigh(case.spectrum, noise=self.noise, lr=self.lr, weight_decay=self.weight_decay)


def tasks(config: Config) -> dict[str, tuple[str, Any]]:
    """The cases, and the drift at each lr."""
    cases: dict[str, tuple[str, Any]] = {case.key: ("case", case) for case in config.cases}
    return cases | {f"drift-{lr:g}": ("drift", lr) for lr in config.drift_lrs}


def run_task(config: Config, task: tuple[str, Any]) -> Arrays:
    """Simulate a case, or measure the drift at one lr."""
    kind, setting = task
    return _case(config, setting) if kind == "case" else _drift(config, setting)


def _case(config: Config, case: Case) -> Arrays:
    """Risk with its error, and the bounds of theorem 1 from the angular update of the law and the measured tail."""
    model = config.model(case)
    norm_sq = model.norm_sq if case.norm_sq is None else case.norm_sq
    begin = rayleigh.starts(model, config.trials, norm_sq=norm_sq, risk=case.risk, seed=config.seed)
    record = ("risk", "loss", "norm")
    run = rayleigh.simulate(model, begin, steps=config.steps, every=config.every, seed=config.seed, record=record)
    time, risk = run.steps.astype(np.float64), run["risk"]
    norms = norm_sq_at(time, norm_sq, lr=model.lr, weight_decay=model.weight_decay, unit_grad_sq=model.unit_grad_sq)
    turn, tail = angular_update(norms, model.unit_grad_sq, lr=model.lr), np.mean(1 - risk < case.xi, axis=1)
    within = quotient_bounds(np.clip(1 - risk, 0, 1), model)
    outside = np.maximum(within.low - 2 * run["loss"], 2 * run["loss"] - within.high)
    halved = [model.spectrum[0] + (value - model.spectrum[0]) / 2 for value in model.spectrum]
    printed = replace(model, spectrum=halved)  # the same bound without the factor 2
    return {
        "step": time,
        "risk": risk.mean(1),
        "error": risk.std(1, ddof=1) / np.sqrt(config.trials),
        "low": risk_lower_bound(time, turn, model=model, risk=case.risk),
        "up": risk_upper_bound(time, turn, model=model, risk=case.risk, xi=case.xi, tail=tail),
        "printed": risk_lower_bound(time, turn, model=printed, risk=case.risk),
        "outside": np.max(outside),
    }


def _drift(config: Config, lr: float) -> Arrays:
    """One step from one weight of the second case at unit norm: the mean change of f over pairs of opposite noise."""
    spectrum = config.cases[1].spectrum
    problem = RayleighQuotient(spectrum, noise=config.noise)
    weight = rayleigh.starts(config.model(config.cases[1]), 1, norm_sq=1.0, risk=0.4, seed=config.seed)
    rng = np.random.default_rng([config.seed, config.drift_lrs.index(lr)])
    changes = []
    for _ in range(20):
        draws = rng.standard_normal((config.drift_pairs // 20, len(spectrum)))
        weights = np.broadcast_to(weight, draws.shape)
        ends = [weights - lr * problem.gradient(weights, sign * draws) for sign in (1, -1)]
        changes.append(0.4 - sum(problem.risk(end) for end in ends) / 2)
    change = np.concatenate(changes)
    return {"drift": np.array([change.mean(), rayleigh.standard_error(change)]), "quotient": 2 * problem.value(weight)}


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge that the corrected bounds hold up to scatter, and that the printed lower bound does not."""
    lines = {case: results[case.key] for case in config.cases}
    claims = [claim for case, line in lines.items() for claim in _judge(config, case, line)]
    broken = {case.name: _share_below_printed(line) for case, line in lines.items()}
    worst = max(broken, key=lambda name: broken[name])
    claims.append(
        _LOWER.says(
            f"Without the factor 2 the lower bound is violated: share of the records {worst} where the risk is more "
            f"than {rayleigh.ERRORS:g} standard errors below it"
        ).at_least(0.5, broken[worst])
    )
    claims += [_judge_drift(config, lr, results[f"drift-{lr:g}"]) for lr in config.drift_lrs]
    table = {
        case.name: {name: float(line[name][-1]) for name in ("low", "risk", "up", "printed")}
        for case, line in lines.items()
    }
    return Outcome(claims, {"at_the_end": table, "share_of_records_below_the_printed_lower_bound": broken})


def _share_below_printed(line: Arrays) -> float:
    return float(np.mean((line["printed"] - line["risk"])[1:] > rayleigh.ERRORS * line["error"][1:]))


def _judge(config: Config, case: Case, line: Arrays) -> list[Claim]:
    later = slice(1, None)  # at the start the bounds are the risk itself
    risk, error = line["risk"][later], line["error"][later]
    below, above = ((risk - line[name][later]) / error for name in ("low", "up"))
    name = case.name.capitalize()
    return [
        _LOWER.says(
            f"{name}: the risk is never below the lower bound: least distance, in its standard errors"
        ).at_least(-rayleigh.ERRORS, float(below.min()), unit="standard errors"),
        _UPPER.says(f"{name}: the risk is never above the upper bound: least distance, in its standard errors").at_most(
            rayleigh.ERRORS, float(above.max()), unit="standard errors"
        ),
        identity(
            _SANDWICH.says(
                f"{name}: a_1 + (a_2 - a_1)(1 - f) <= 2 L <= a_1 + (a_p - a_1)(1 - f): largest violation"
            ).at_most(
                1e-14,  # roundings of sums of ten terms of size 2
                float(line["outside"]),
            )
        ),
    ]


def _judge_drift(config: Config, lr: float, line: Arrays) -> Claim:
    case = config.cases[1]
    model = replace(config.model(case), lr=lr)
    quotient, f = float(line["quotient"][0]), 0.6
    expected = float(alignment_sde(f, quotient, model=model, norm_sq=1.0).drift)
    pull = lr * (quotient - model.spectrum[0]) * f
    return _DRIFT.says(
        f"One step of f at lr = {lr:g} and unit norm: mean change; a finite step adds a share lr (a_p - a_1)"
    ).near(
        expected,
        float(line["drift"][0]),
        relative=lr * model.spread,
        interval=rayleigh.interval(line["drift"]),
        printed=expected - pull,
    )


def draw(config: Config, results: TaskResults) -> Figures:
    """Draw the risk between its bounds, one panel per case."""
    figure, axes = panels(1, len(config.cases), width=3.0, height=2.5)
    for panel, case, letter in zip(axes, config.cases, "abc", strict=False):
        _draw_case(panel, results[case.key])
        label_panel(panel, letter, f"p = {len(case.spectrum)}, {case.name}")
    rayleigh.legend_above(figure, axes[0])
    return {"theorem-1": figure}


def _draw_case(panel: Axes, line: Arrays) -> None:
    step = line["step"]
    panel.fill_between(
        step,
        line["low"],
        line["up"],
        color=COLOURS[5],
        alpha=0.25,
        lw=0,
        label="between the bounds of theorem 1, corrected",
    )
    panel.plot(step, line["low"], color=THEORY, lw=0.8)
    panel.plot(step, line["up"], color=THEORY, lw=0.8)
    panel.plot(step, line["printed"], color=COLOURS[1], ls="--", lw=1.0, label="lower bound without the 2")
    panel.plot(step, line["risk"], color=COLOURS[0], label="risk")
    panel.set(xlabel="step", ylabel="risk", yscale="log")
    rayleigh.plain_ticks(panel)


EXPERIMENT = Experiment(
    id="nrq-bounds",
    title="The risk stays between the corrected bounds of theorem 1",
    source="nrq thm. 1",
    scales={
        "smoke": Config(steps=1000, trials=500, every=10, drift_lrs=(0.02,), drift_pairs=400_000),
        "desk": Config(),
        "paper": Config(),
    },
    functions=(tasks, run_task, collect, draw),
)

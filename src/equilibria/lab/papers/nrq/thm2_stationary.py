"""nrq-stationary: the stationary law of the alignment, the limiting risk, and the way there (theorem 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import kstest, kstwo

from equilibria.lab.harness.claim import Claim, Source
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels
from equilibria.lab.papers.nrq import rayleigh
from equilibria.theory.rayleigh import NoisyRayleigh
from equilibria.theory.rayleigh_risk import spectral_gap, stationary_risk
from equilibria.theory.watson import bingham_moments, watson_cdf, watson_log_density, watson_moments, watson_risk

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DENSITY = Source(
    "nrq",
    "theorem 2, eq. (25)",
    corrected="kappa carries the gap a_h - a_l: the density is exp(2 kappa f) ... with kappa = gap M*/(2 lr sigma^2)",
    law="watson.watson_log_density",
)
_LIMIT = Source(
    "nrq",
    "theorem 2, eq. (26)",
    corrected="printed is about lim E f, not the risk 1 - E f, and its correction needs a factor 1/2",
    law="watson.watson_risk",
)
_MOMENTS = Source("nrq", "theorem 2", law="watson.watson_moments")
_FORGETTING = Source("nrq", "theorem 2, eq. (27)", law="rayleigh_risk.spectral_gap")
_ANY = Source("", "beyond nrq theorem 2", law="watson.bingham_moments")
_SPREAD, _TAIL = "spread", "tail"
_CHANCE = 1e-4  # probability that a sample of the law itself exceeds the allowed distance
_BINS = 60


@dataclass(frozen=True)
class TwoLevelCase:
    """A two-level model: dimension, gap, noise and lr * wd."""

    dim: int
    gap: float
    noise: float
    product: float

    def model(self, lr: float) -> NoisyRayleigh:
        """The model at this lr; the law depends on lr * wd only."""
        return NoisyRayleigh.two_level(self.gap, self.dim, noise=self.noise, lr=lr, weight_decay=self.product / lr)

    @property
    def key(self) -> str:
        """Key of the task."""
        return f"p{self.dim}-gap{self.gap:g}-noise{self.noise:g}-{self.product:g}"

    @property
    def label(self) -> str:
        """Name in claims and figures."""
        return f"p = {self.dim}, gap {self.gap:g}, noise {self.noise:g}, lr wd = {self.product:g}"


@dataclass(frozen=True)
class Config:
    """Independent trials, each measured once after many relaxation times; also one spectrum of many levels.

    The tail probability P(f < ``level``) of the first case is followed from random directions, over ``tail_window`` in
    units of the inverse rate.
    """

    cases: tuple[TwoLevelCase, ...] = (
        TwoLevelCase(10, 1.0, 1.0, 1e-3),
        TwoLevelCase(10, 0.5, 1.0, 1e-3),
        TwoLevelCase(3, 2.0, 1.0, 1e-3),
        TwoLevelCase(5, 0.5, 0.5, 1e-3),
        TwoLevelCase(2, 1.0, 1.0, 5e-4),
        TwoLevelCase(10, 1.0, 1.0, 4e-3),
    )
    shown: int = 4
    lr: float = 0.1
    spread_dim: int = 10
    spread_product: float = 2.5e-4
    relaxations: float = 10.0
    level: float = 0.5
    tail_window: tuple[float, float] = (2.0, 4.0)
    tail_trials: int = 40_000
    trials: int = 10_000
    seed: int = 0

    def spread(self) -> NoisyRayleigh:
        """Eigenvalues from 1 to 2 at equal distances."""
        values = np.linspace(1, 2, self.spread_dim).tolist()
        return NoisyRayleigh(values, noise=1.0, lr=self.lr, weight_decay=self.spread_product / self.lr)


def tasks(config: Config) -> dict[str, Any]:
    """One task per case, and one for the spectrum of many levels."""
    return {case.key: case for case in config.cases} | {_SPREAD: None, _TAIL: _TAIL}


def run_task(config: Config, case: TwoLevelCase | str | None) -> Arrays:
    """Simulate independent trials until they have forgotten the start, and measure their directions."""
    if isinstance(case, str):
        return _forget(config)
    model = config.spread() if case is None else case.model(config.lr)
    begin = rayleigh.starts(model, config.trials, norm_sq=model.norm_sq, risk=0.0, seed=config.seed)
    slowest = 2 * model.gap * model.angular_update / math.sqrt(model.unit_grad_sq)  # rate of forgetting the start
    run = rayleigh.simulate(model, begin, steps=math.ceil(config.relaxations / slowest), record=(), seed=config.seed)
    squares = run.state.weights**2
    squares /= squares.sum(1, keepdims=True)
    if case is None:
        return {"squares": squares.mean(0), "scatter": squares.std(0, ddof=1), **_pairs(model, squares)}
    return {"f": squares[:, 0], **_pairs(model, squares)}


def _forget(config: Config) -> Arrays:
    """The share of trials with f below the level, from random directions on."""
    model = config.cases[0].model(config.lr)
    begin = rayleigh.starts(model, config.tail_trials, norm_sq=model.norm_sq, seed=config.seed)
    steps = math.ceil(config.tail_window[1] / spectral_gap(model)) + 1
    run = rayleigh.simulate(model, begin, steps=steps, record=("risk",), every=max(1, steps // 100), seed=config.seed)
    return {"step": run.steps, "share": np.mean(run["risk"] > 1 - config.level, axis=1)}


def _pairs(model: NoisyRayleigh, squares: np.ndarray) -> dict[str, np.ndarray]:
    """Means with their standard errors: risk, E f(1-f), excess of the loss."""
    f, risk = squares[:, 0], squares[:, 1:].sum(1)
    excess = squares @ (np.array(model.spectrum) - model.spectrum[0]) / 2
    samples = {"risk": risk, "mixing": f * risk, "excess": excess, "square": (risk - risk.mean()) ** 2}
    return {name: np.array([values.mean(), rayleigh.standard_error(values)]) for name, values in samples.items()}


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge law, risk and moments of every case, then those of the many-level spectrum."""
    claims = [claim for case in config.cases for claim in _judge(config, case, results[case.key])]
    table = {
        case.label: {
            "risk": float(results[case.key]["risk"][0]),
            "law": stationary_risk(case.model(config.lr)).risk,
            "p_value": _p_value(config, case, results[case.key]["f"]),
        }
        for case in config.cases
    }
    claims = [*claims, _judge_tail(config, results[_TAIL]), *_judge_spread(config, results[_SPREAD])]
    return Outcome(claims, {"cases": table})


def _judge_tail(config: Config, line: Arrays) -> Claim:
    """Claim that the tail falls at the spectral gap, from the shares of trials in it at both ends of the window."""
    model = config.cases[0].model(config.lr)
    rate = spectral_gap(model)
    rest = float(watson_cdf(config.level, _concentration(config, config.cases[0]), dim=model.dim))
    first, last = (int(np.argmin(np.abs(line["step"] - end / rate))) for end in config.tail_window)
    shares = line["share"][[first, last]] - rest
    measured = math.log(shares[0] / shares[1]) / float(line["step"][last] - line["step"][first])
    error = math.sqrt(float(np.sum((1 - shares) / (shares * config.tail_trials)))) / np.diff(config.tail_window)[0]
    return _FORGETTING.says(
        f"{config.cases[0].label}: the tail P(f < {config.level:g}) falls to its limit at the spectral gap, "
        f"{config.tail_window[0]:g} to {config.tail_window[1]:g} inverse rates after random directions"
    ).near(
        rate,
        measured,
        # scatter; the first-order effect of a finite step; and the next mode, of about three times the rate
        relative=rayleigh.ERRORS * float(error)
        + model.gap * model.lr / model.norm_sq
        + math.exp(-2 * config.tail_window[0]),
        unit="per step",
    )


def _p_value(config: Config, case: TwoLevelCase, f: np.ndarray) -> float:
    """Probability of a sample farther from the law that includes the first-order effect of a finite step."""
    return float(kstest(f, _cdf(_concentration(config, case, discrete=True), case.dim)).pvalue)


def _concentration(config: Config, case: TwoLevelCase, *, discrete: bool = False) -> float:
    """2 kappa; ``discrete`` includes the first-order effect of a finite step."""
    model = case.model(config.lr)
    return case.gap * model.inverse_temperature / (stationary_risk(model).finite_step if discrete else 1.0)


def _cdf(concentration: float, dim: int) -> Any:
    return lambda f: watson_cdf(np.clip(f, 0, 1), concentration, dim=dim)


def _judge(config: Config, case: TwoLevelCase, line: Arrays) -> list[Claim]:
    model, f = case.model(config.lr), line["f"]
    limit, b = stationary_risk(model), _concentration(config, case)
    moments, second_order = watson_moments(b, case.dim), (limit.finite_step - 1) ** 2
    room = _room(line["risk"], second_order)
    grid = np.linspace(0, 1, 2001)
    exact, discrete = (
        watson_cdf(grid, _concentration(config, case, discrete=kind), dim=case.dim) for kind in (False, True)
    )
    chance = float(kstwo.isf(_CHANCE, len(f)))
    finite = float(np.max(np.abs(exact - discrete)))
    claims = [
        _DENSITY.says(
            f"{case.label}: Kolmogorov-Smirnov distance of {len(f):,} trials to the law; allowed is chance "
            f"({_CHANCE:g}) and the first-order effect of a finite step"
        ).at_most(chance + finite, float(kstest(f, _cdf(b, case.dim)).statistic)),
        _LIMIT.says(f"{case.label}: limiting risk, {rayleigh.finite_step_words(limit.finite_step, room)}").near(
            limit.risk * limit.finite_step,
            line["risk"][0],
            relative=room,
            printed=1 - math.sqrt(model.unit_grad_sq) * model.angular_update / model.gap,
        ),
        _MOMENTS.says(f"{case.label}: variance of f").near(
            float(moments.variance), line["square"][0], relative=_room(line["square"], 2 * (limit.finite_step - 1))
        ),
        _MOMENTS.says(f"{case.label}: E f(1-f) = ((p-1) - p r)/(2 b), b = 2 kappa, from the measured risk").near(
            (case.dim - 1 - case.dim * line["risk"][0]) / (2 * b),
            line["mixing"][0],
            relative=_room(line["mixing"], limit.finite_step - 1),
        ),
    ]
    if case.gap != 1:
        apart = watson_cdf(grid, b / case.gap, dim=case.dim)
        claims.append(
            _DENSITY.says(
                f"{case.label}: the printed kappa, without the gap, is another law: its distance from the trials is "
                "the distance of the two laws"
            ).near(
                float(np.max(np.abs(apart - exact))),
                float(kstest(f, _cdf(b / case.gap, case.dim)).statistic),
                absolute=chance + finite,
            )
        )
    return claims


def _room(pair: np.ndarray, order: float) -> float:
    """Relative tolerance: standard errors, and the neglected order of the expansion."""
    return rayleigh.ERRORS * float(pair[1] / pair[0]) + order


def _judge_spread(config: Config, line: Arrays) -> list[Claim]:
    model = config.spread()
    limit, law = stationary_risk(model), bingham_moments(model.spectrum, model.inverse_temperature).second_moments
    size = math.sqrt(model.unit_grad_sq)
    first = model.spread * model.angular_update / (2 * size)  # first-order effect of a finite step, at most
    off = np.abs(line["squares"] / law - 1) / (
        rayleigh.ERRORS * line["scatter"] / math.sqrt(config.trials) / law + first
    )
    name, room = f"Eigenvalues 1 to 2, lr wd = {config.spread_product:g}", _room(line["risk"], first**2)
    return [
        _ANY.says(
            f"{name}: limiting risk by Bingham's law, {rayleigh.finite_step_words(limit.finite_step, room)}"
        ).near(limit.risk * limit.finite_step, line["risk"][0], relative=room),
        _ANY.says(
            f"{name}: every E x_i^2 is Bingham's: largest deviation over the tolerance for scatter and a finite step"
        ).at_most(1.0, float(off.max())),
        Source("", "beyond nrq theorem 2", law="rayleigh_risk.stationary_risk")
        .says(f"{name}: the excess loss is sqrt(p-1) sigma D/4 whatever the spectrum, to leading order")
        .near(
            limit.excess_loss_leading,
            line["excess"][0],
            relative=_room(line["excess"], first + abs(limit.excess_loss / limit.excess_loss_leading - 1)),
        ),
    ]


def draw(config: Config, results: TaskResults) -> Figures:
    """Histograms with the corrected and the printed density; the limiting risk against the angular update."""
    figure, axes = panels(2, 3, width=3.0, height=2.4)
    for panel, case, letter in zip(axes, config.cases[: config.shown], "abcd", strict=False):
        _draw_case(config, panel, case, results[case.key]["f"])
        label_panel(panel, letter, case.label.replace(", lr wd", ",\nlr wd"))
    for panel in axes[len(config.cases[: config.shown]) : config.shown]:
        panel.set_visible(False)
    axes[1].legend()
    _draw_risk(config, axes[4], results)
    _draw_spread(config, axes[5], results[_SPREAD])
    return {"theorem-2": figure}


def _draw_case(config: Config, panel: Axes, case: TwoLevelCase, f: np.ndarray) -> None:
    low = float(np.quantile(f, 0.002))
    panel.hist(f, bins=_BINS, range=(low, 1), density=True, color=COLOURS[0], alpha=0.5, label="trials")
    grid = np.linspace(low, 1 - 1e-4, 500)
    b = _concentration(config, case)
    top = panel.get_ylim()[1]
    panel.plot(grid, np.exp(watson_log_density(grid, b, dim=case.dim)), color=THEORY, label="law")
    if case.gap != 1:
        printed = np.exp(watson_log_density(grid, b / case.gap, dim=case.dim))
        panel.plot(grid, printed, color=COLOURS[1], ls="--", label="as printed")
    panel.set(xlabel="$f = (e_1^T X)^2/||X||^2$", ylabel="density", xlim=(low, 1), ylim=(0, 1.05 * top))


def _draw_risk(config: Config, panel: Axes, results: TaskResults) -> None:
    """Draw the cases that differ from the first in lr * wd only."""
    first = config.cases[0]
    turns = np.geomspace(0.01, 0.2, 100)
    law = watson_risk(first.gap * math.sqrt(first.dim - 1) / (first.noise * turns), first.dim)
    leading = math.sqrt(first.dim - 1) * first.noise * turns / (2 * first.gap)
    panel.plot(turns, law, color=THEORY, label="law")
    panel.plot(turns, leading, color=THEORY, lw=0.8, ls=":", label="leading order")
    panel.plot(turns, 1 - 2 * leading, color=COLOURS[1], ls="--", label="eq. (26) as printed")
    same = [case for case in config.cases if (case.dim, case.gap, case.noise) == (first.dim, first.gap, first.noise)]
    points = [(case.model(config.lr).angular_update, results[case.key]["risk"][0]) for case in same]
    panel.plot(*zip(*points, strict=True), "o", color=COLOURS[0], label="trials")
    panel.set(xscale="log", yscale="log", xlabel="angular update (rad)", ylabel="limiting risk")
    rayleigh.plain_ticks(panel)
    label_panel(panel, "e", f"p = {first.dim}, gap {first.gap:g}", legend=True)


def _draw_spread(config: Config, panel: Axes, line: Arrays) -> None:
    model = config.spread()
    law = bingham_moments(model.spectrum, model.inverse_temperature).second_moments
    errors = rayleigh.ERRORS * line["scatter"][1:] / math.sqrt(config.trials)
    panel.errorbar(model.spectrum[1:], line["squares"][1:], errors, fmt="o", color=COLOURS[0], label="trials")
    panel.plot(model.spectrum[1:], law[1:], color=THEORY, label="law (Bingham)")
    panel.set(xlabel="eigenvalue $a_i$", ylabel="$E\\,x_i^2$", yscale="log")
    rayleigh.plain_ticks(panel)
    label_panel(panel, "f", f"many levels, lr wd = {config.spread_product:g}", legend=True)


EXPERIMENT = Experiment(
    id="nrq-stationary",
    title="The stationary law of the alignment with the best direction",
    source="nrq thm. 2",
    scales={
        "smoke": Config(
            cases=(TwoLevelCase(10, 1.0, 1.0, 4e-3), TwoLevelCase(3, 2.0, 1.0, 1e-3)),
            spread_product=4e-3,
            tail_trials=4000,
            trials=2000,
        ),
        "desk": Config(),
        "paper": Config(),
    },
    functions=(tasks, run_task, collect, draw),
)

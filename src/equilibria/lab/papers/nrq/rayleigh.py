"""Runs of the noisy Rayleigh quotient: simulation, means with their errors, claims about them, and the four panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.lab.harness.claim import Claim, Source
from equilibria.lab.harness.experiment import Arrays
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel
from equilibria.lab.problems.rayleigh import RayleighQuotient
from equilibria.lab.problems.simulation import Simulation, SimulationRun
from equilibria.theory.rayleigh import NoisyRayleigh
from equilibria.theory.rayleigh_curve import RiskCurve
from equilibria.theory.rayleigh_risk import stationary_risk
from equilibria.theory.rules import SGD

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
ERRORS = 4.0
"""Half width of every interval in standard errors: among many numbers hardly one is outside by chance."""
LIMIT_TOLERANCE = 0.04
"""Relative tolerance of every limiting risk."""


def simulate(model: NoisyRayleigh, start: ArrayLike, **options: Any) -> SimulationRun:
    """Simulate SGD on the model from these weights; ``options`` of `Simulation`."""
    problem = RayleighQuotient(model.spectrum, noise=model.noise)
    rule = SGD(model.lr, model.weight_decay)
    return Simulation(problem, start, **{"rule": rule, "record": ("risk", "norm", "angle"), **options}).run()


def starts(model: NoisyRayleigh, trials: int, *, norm_sq: float, risk: float | None = None, seed: int = 0) -> Array:
    """Starting weights of one norm, all with one risk or in random directions."""
    return RayleighQuotient(model.spectrum).start(trials, norm_sq=norm_sq, risk=risk, seed=seed)


def averages(run: SimulationRun, model: NoisyRayleigh) -> dict[str, NDArray[Any]]:
    """Means over the trials of a two-level model: risk and its standard error, loss, angle (rms), squared norm."""
    risk = run["risk"]
    mean = risk.mean(1)
    return {
        "step": run.steps,
        "risk": mean,
        "risk_error": risk.std(1, ddof=1) / np.sqrt(risk.shape[1]),
        "loss": (model.spectrum[0] + model.gap * mean) / 2,
        "angle": np.sqrt(np.mean(run["angle"] ** 2, axis=1)),
        "norm_sq": np.mean(run["norm"] ** 2, axis=1),
    }


def window(run: SimulationRun, first: int, last: int | None = None) -> dict[str, NDArray[Any]]:
    """Means over the steps from ``first`` to before ``last``, each with its standard error over the trials."""
    inside = (run.steps >= first) & (run.steps < (run.steps[-1] + 1 if last is None else last))
    risk, angle_sq = run["risk"][inside].mean(0), np.mean(run["angle"][inside] ** 2, axis=0)
    angle = np.sqrt(angle_sq.mean())
    return {
        "risk": np.array([risk.mean(), standard_error(risk)]),
        "angle": np.array([angle, standard_error(angle_sq) / (2 * angle)]),
    }


def standard_error(values: ArrayLike) -> float:
    """Standard error of the mean of independent values."""
    array = np.asarray(values)
    return float(array.std(ddof=1) / np.sqrt(array.size))


def interval(pair: Sequence[float] | Array) -> tuple[float, float]:
    """Ends of the interval around a mean, from the pair of mean and standard error."""
    mean, error = (float(value) for value in pair)
    return mean - ERRORS * error, mean + ERRORS * error


def predicted(curve: RiskCurve, model: NoisyRayleigh, every: int) -> dict[str, Array]:
    """The theory's curve at the recorded steps, under the names of `averages` with ``theory_`` in front."""
    risk = curve.risk[:-1:every]
    return {
        "theory_risk": risk,
        "theory_loss": (model.spectrum[0] + model.gap * risk) / 2,
        "theory_angle": curve.angular_update[:-1:every],
        "theory_norm_sq": curve.norm_sq[:-1:every],
    }


def finite_step(line: Arrays, model: NoisyRayleigh) -> float:
    """Bound on the difference between the risk of discrete steps and the diffusion's, to first order.

    A step differs from the diffusion by the share lr gap/M of all rates; so time is off by no more than this share, and
    the curve by no more than this share of t |dr/dt|, as long as the norm only falls.
    """
    share = model.gap * model.lr / line["theory_norm_sq"]
    return float(np.max(share * np.abs(line["step"] * np.gradient(line["theory_risk"], line["step"]))))


def judge_limit(text: str, source: Source, pair: Sequence[float] | Array, *, model: NoisyRayleigh) -> Claim:
    """Claim that a mean risk is the limiting one of the law, the effect of a finite step included."""
    limit = stationary_risk(model)
    return source.says(text).near(
        limit.risk * limit.finite_step, pair[0], relative=LIMIT_TOLERANCE, interval=interval(pair)
    )


def judge_curve(label: str, source: Source, line: Arrays, *, model: NoisyRayleigh) -> Claim:
    """Claim that the mean risk follows the exact curve of the diffusion."""
    return source.says(
        f"{label}: the whole curve is the diffusion's: largest difference of the risk; allowed is the first-order "
        "effect of a finite step and scatter"
    ).at_most(
        finite_step(line, model) + ERRORS * float(line["risk_error"].max()),
        float(np.max(np.abs(line["risk"] - line["theory_risk"]))),
    )


_PANELS = {
    "loss": ("loss", "linear"),
    "risk": ("risk $1 - (e_1^T X)^2/||X||^2$", "log"),
    "angle": ("angular update (rad)", "log"),
    "norm_sq": ("norm $||X||$", "linear"),
}


def draw_panels(
    figure: Figure, axes: Sequence[Axes], lines: Mapping[str, Arrays], *, letters: str, log_time: bool = False
) -> None:
    """Draw a row of figure 2: loss, risk, angular update and norm of each line, and the diffusion's curves."""
    first = 1 if log_time else 0
    for panel, letter, (name, (label, scale)) in zip(axes, letters, _PANELS.items(), strict=True):
        power = 0.5 if name == "norm_sq" else 1
        for colour, (legend, line) in zip(COLOURS, lines.items(), strict=False):
            step = line["step"][first:]
            panel.plot(step, line[name][first:] ** power, color=colour, lw=1.4, alpha=0.8, label=legend)
            panel.plot(step, line[f"theory_{name}"][first:] ** power, color=THEORY, lw=0.8, ls="--")
        panel.plot([], [], color=THEORY, lw=0.9, ls="--", label="diffusion, exact")
        panel.set(xlabel="step", ylabel=label, yscale=scale, xscale="log" if log_time else "linear")
        if scale == "log":
            plain_ticks(panel)
        label_panel(panel, letter, label.partition(" $")[0].removesuffix(" (rad)"))
    legend_above(figure, axes[0])


def finite_step_words(factor: float, tolerance: float) -> str:
    """The effect of a finite step on the risk, and whether it exceeds the tolerance of the claim."""
    share = abs(factor - 1)
    return f"a finite step's {100 * share:.1f} % included" + ("" if share > tolerance else ", too little to be tested")


def legend_above(figure: Figure, panel: Axes) -> None:
    """Put the legend of a panel above all panels, where it hides nothing."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))


def plain_ticks(panel: Axes) -> None:
    """Label a logarithmic axis 0.02 in place of 2 x 10^-2."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())

"""What the experiments on the noisy Rayleigh quotient share: a run, its averages with their errors, the four panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.lab.harness.experiment import Arrays
from equilibria.lab.harness.figures import COLOURS, THEORY, title
from equilibria.lab.problems.rayleigh import RayleighQuotient
from equilibria.lab.problems.simulation import Simulation, SimulationRun
from equilibria.theory.rayleigh import NoisyRayleigh
from equilibria.theory.rayleigh_curve import RiskCurve
from equilibria.theory.rules import SGD

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
ERRORS = 4.0
"""Standard errors to either side in every interval: of many numbers hardly one is outside by chance."""


def simulate(model: NoisyRayleigh, start: ArrayLike, **options: Any) -> SimulationRun:
    """The model's own step from given weights; ``options`` of `Simulation`."""
    problem = RayleighQuotient(model.spectrum, noise=model.noise)
    rule = SGD(model.lr, model.weight_decay)
    return Simulation(problem, start, **{"rule": rule, "record": ("risk", "norm", "angle"), **options}).run()


def starts(model: NoisyRayleigh, trials: int, *, norm_sq: float, risk: float | None = None, seed: int = 0) -> Array:
    """Weights of one norm, of one risk or in random directions."""
    return RayleighQuotient(model.spectrum).start(trials, norm_sq=norm_sq, risk=risk, seed=seed)


def averages(run: SimulationRun, model: NoisyRayleigh) -> dict[str, NDArray[Any]]:
    """Means over the trials of a two-level model: risk with its standard error, loss, angle (rms), squared norm."""
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
    """Means over the steps from ``first`` on, each with the standard error that the scatter of the trials gives."""
    inside = (run.steps >= first) & (run.steps < (run.steps[-1] + 1 if last is None else last))
    risk, angle_sq = run["risk"][inside].mean(0), np.mean(run["angle"][inside] ** 2, axis=0)
    angle = np.sqrt(angle_sq.mean())
    return {
        "risk": np.array([risk.mean(), standard_error(risk)]),
        "angle": np.array([angle, standard_error(angle_sq) / (2 * angle)]),
    }


def standard_error(values: ArrayLike) -> float:
    """Of the mean of independent values."""
    found = np.asarray(values)
    return float(found.std(ddof=1) / np.sqrt(found.size))


def interval(pair: Sequence[float] | Array) -> tuple[float, float]:
    """Ends of the interval around a mean with its standard error."""
    mean, error = (float(value) for value in pair)
    return mean - ERRORS * error, mean + ERRORS * error


def predicted(curve: RiskCurve, model: NoisyRayleigh, every: int) -> dict[str, Array]:
    """A theory curve at every so many steps, under the names of `averages`."""
    risk = curve.risk[:-1:every]
    return {
        "theory_risk": risk,
        "theory_loss": (model.spectrum[0] + model.gap * risk) / 2,
        "theory_angle": curve.angular_update[:-1:every],
        "theory_norm_sq": curve.norm_sq[:-1:every],
    }


def finite_step(line: Arrays, model: NoisyRayleigh) -> float:
    """By how much the risk of the steps may differ from the diffusion's, to first order, while the norm only falls.

    A step differs from the diffusion by the share lr gap/M of all rates; so time is off by no more than this share, and
    the curve by no more than this share of t |dr/dt|.
    """
    share = model.gap * model.lr / line["theory_norm_sq"]
    return float(np.max(share * np.abs(line["step"] * np.gradient(line["theory_risk"], line["step"]))))


_PANELS = {
    "loss": ("loss", "linear"),
    "risk": ("risk $1 - (e_1^T X)^2/||X||^2$", "log"),
    "angle": ("angular update (rad)", "log"),
    "norm_sq": ("norm $||X||$", "linear"),
}


def draw_panels(
    figure: Figure, axes: Sequence[Axes], lines: Mapping[str, Arrays], *, letters: str, log_time: bool = False
) -> None:
    """A row of figure 2: loss, risk, angular update and norm of each line, with the diffusion's curve on top."""
    first = 1 if log_time else 0
    for panel, letter, (name, (label, scale)) in zip(axes, letters, _PANELS.items(), strict=True):
        power = 0.5 if name == "norm_sq" else 1
        for colour, (legend, found) in zip(COLOURS, lines.items(), strict=False):
            step = found["step"][first:]
            panel.plot(step, found[name][first:] ** power, color=colour, lw=1.4, alpha=0.8, label=legend)
            panel.plot(step, found[f"theory_{name}"][first:] ** power, color=THEORY, lw=0.8, ls="--")
        panel.plot([], [], color=THEORY, lw=0.9, ls="--", label="diffusion, exact")
        panel.set(xlabel="step", ylabel=label, yscale=scale, xscale="log" if log_time else "linear")
        if scale == "log":
            plain_ticks(panel)
        title(panel, letter, label.partition(" $")[0].removesuffix(" (rad)"))
    legend_above(figure, axes[0])


def finite_step_words(factor: float, tolerance: float) -> str:
    """What a finite step does to the risk, and whether the tolerance of the claim leaves it to be tested."""
    share = abs(factor - 1)
    return f"a finite step's {100 * share:.1f} % included" + ("" if share > tolerance else ", too little to be tested")


def legend_above(figure: Figure, panel: Axes) -> None:
    """The legend of a panel above all of them, where it hides nothing."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))


def plain_ticks(panel: Axes) -> None:
    """0.02 instead of 2 x 10^-2 on a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())

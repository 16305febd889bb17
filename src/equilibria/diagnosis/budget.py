"""The norm budget of a layer: why its norm grows or falls, from its norms, angles and settings.

Over a window of samples ``change of ln ||w||^2 = decay + pull + diffusion`` (`equilibria.theory.gain`). Decay is
-2 sum eps, diffusion F sum angle^2 with the F of the optimizer, and the pull of the gradient before momentum is the
rest: no gradient is needed. Between two samples lr x wd and squared angles are interpolated linearly.

The constants below are those of the growth gain that the monitor measures (`equilibria.monitor.gain`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equilibria.diagnosis.run import SampledRun, decays
from equilibria.diagnosis.series import Array, Series
from equilibria.theory.gain import growth_budget, growth_gain
from equilibria.theory.requested import norm_power
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Rule

BATCHES = 8  # of a growth gain and its standard error
LEAST_STEPS, LEAST_SAMPLES = 10, 3  # in a batch
KNOWN = 2  # standard errors from 0 from which a gain counts as positive
_STRETCHES = 40  # of a run, in the budget over time
_SMALL = 0.1  # change of a logarithm up to which it is the relative change: 10 % for 10.5 %
_PER = 100  # steps
_UNEVEN = 0.26  # share of the diffusion that unevenly scaled gradients (lognormal, sigma 2) may lack
_FORMULAS: dict[type[Rule], str] = {
    SGD: "(1 - momentum)/(4 lr wd)",
    SGDW: "1/(4 lr wd)",
    AdamL2: "1/(2 eps), eps the decay in force,",
}


@dataclass(frozen=True, slots=True)
class LayerBudget:
    """Why ||w||^2 of one layer changed over a window of steps; parts of the change of ln ||w||^2, per 100 steps.

    Attributes:
        first_step: of the window.
        last_step: of the window.
        growth: change of ln ||w||^2 per 100 steps.
        decay: -2 eps, with eps the decay in force.
        pull: of the gradient as the optimizer scales it, before momentum; negative inward.
        diffusion: F angle^2, what random steps alone add.
        settling: time constant of the norm in steps at the largest lr x wd of the run, 1/(2 p eps) with p = 2 for SGD;
            None without decay.
        formula: of that time, in the settings of the optimizer.
        scaled: how the optimizer scales the gradient, in words.
    """

    first_step: int
    last_step: int
    growth: float
    decay: float
    pull: float
    diffusion: float
    settling: float | None
    formula: str
    scaled: str

    @property
    def sentence(self) -> str:
        """The change of the norm and its causes, in per cent of ||w||^2 per 100 steps; the largest cause first.

        A change of more than a tenth is a factor, and the causes are parts of its logarithm.

        Example:
            >>> rates = {"growth": 0.062, "decay": -0.018, "pull": -0.172, "diffusion": 0.252}
            >>> words = {"formula": "1/(2 lr wd)", "scaled": "Adam-scaled gradient"}
            >>> LayerBudget(first_step=100, last_step=600, **rates, settling=5556.0, **words).sentence
            'grows 6.2 % in ||w||² per 100 steps over steps 100-600: random steps +25.2, Adam-scaled gradient -17.2, \
decay -1.8. The gradient holds it more than decay does'
        """
        causes = {"random steps": self.diffusion, self.scaled: self.pull, "decay": self.decay}
        is_factor = abs(self.growth) > _SMALL
        shown = {name: f"{value:+.3f}" if is_factor else f"{100 * value:+.1f}" for name, value in causes.items()}
        ordered = sorted(causes, key=lambda name: -abs(causes[name]))
        listed = ", ".join(f"{name} {shown[name]}" for name in ordered if float(shown[name]))
        verb = "grows" if self.growth > 0 else "falls"
        size, unit = f"{100 * abs(self.growth):.1f} %", ""
        if is_factor:
            size = f"by a factor of {math.exp(min(abs(self.growth), 700)):.3g}"
            unit = f"{self.growth:+.3f} in its logarithm, "
        text = f"{verb} {size} in ||w||² per {_PER} steps over steps {self.first_step:,}-{self.last_step:,}: "
        text += unit + listed if listed else "no cause above 0.05"
        if self.pull + _UNEVEN * self.diffusion < 2 * self.decay:
            text += ". The gradient holds it more than decay does"
        return text


def layer_budgets(run: SampledRun, window: Series) -> list[LayerBudget | None]:
    """The budget of every layer over a window of its samples; None with fewer than two samples, or without a rule."""
    return [parts[0] if parts else None for parts in _budgets(run, window, stretches=1)]


def budgets_over_time(run: SampledRun) -> list[list[LayerBudget]]:
    """The budgets of every layer over up to 40 stretches of the run, in their order."""
    return _budgets(run, run.taken, stretches=_STRETCHES)


def _budgets(run: SampledRun, series: Series, *, stretches: int) -> list[list[LayerBudget]]:
    decay, strongest = decays(series, run.entries), _strongest_decay(run)
    budgets: list[list[LayerBudget]] = []
    for position, rule in enumerate(run.rules):
        rows = series.of(position)
        own = decay[series.first[position] : series.first[position + 1]]
        known = np.isfinite(rows["norm"]) & np.isfinite(rows["angle"]) & np.isfinite(own)
        columns = (rows["step"][known], rows["norm"][known], rows["angle"][known], own[known])
        budgets.append([] if rule is None else _of_layer(rule, *columns, strongest[position], stretches))
    return budgets


def _strongest_decay(run: SampledRun) -> list[float]:
    """The largest decay in force of each layer over the run; 0 where it is unknown."""
    decay = np.append(np.nan_to_num(decays(run.taken, run.entries)), 0.0)
    largest = np.maximum.reduceat(decay, run.taken.first[:-1])
    return [float(value) for value in np.where(run.taken.counts > 0, largest, 0.0)]


def _of_layer(
    rule: Rule, step: Array, norm: Array, angle: Array, decay: Array, strongest: float, stretches: int
) -> list[LayerBudget]:
    if len(step) < 2:
        return []
    ends = np.unique(np.linspace(0, len(step) - 1, stretches + 1).astype(np.int64))
    growth = np.diff(2 * np.log(norm[ends]))
    angle_sq = _integral(step, angle**2, ends)
    budget = growth_budget(growth_gain(rule), log_growth=growth, decay=_integral(step, decay, ends), angle_sq=angle_sq)
    rates = _PER / np.diff(step[ends]) * np.array([growth, budget.decay, budget.pull, budget.diffusion])
    return [
        LayerBudget(
            first_step=int(step[first]),
            last_step=int(step[last]),
            growth=parts[0],
            decay=parts[1],
            pull=parts[2],
            diffusion=parts[3],
            settling=1 / (2 * norm_power(rule) * strongest) if strongest > 0 else None,
            formula=_FORMULAS.get(type(rule), "1/(2 lr wd)"),
            scaled=f"{'Adam-scaled ' if isinstance(rule, AdamW | AdamL2) else ''}gradient",
        )
        for first, last, parts in zip(ends[:-1].tolist(), ends[1:].tolist(), rates.T.tolist(), strict=True)
    ]


def _integral(step: Array, values: Array, ends: Array) -> Array:
    """The sum over the steps between two ends of each pair, by the trapezoidal rule."""
    parts = np.append(0.0, np.cumsum(np.diff(step) * (values[1:] + values[:-1]) / 2))
    return np.asarray(np.diff(parts[ends]))


def missing_gain(shape: Sequence[int] | None, *, samples: int, steps: int) -> tuple[str, str]:
    """Why a layer has no growth gain: a clause about one layer and one about several.

    Args:
        shape: of the layer, None if unknown.
        samples: of the layer, of steps that were taken.
        steps: from the first of them to the last.

    Example:
        >>> missing_gain((64, 64), samples=20, steps=200)[0].format("it")
        'it needs 5 more samples for a growth gain'
    """
    if shape is not None and len(shape) < 2:
        return "{} is a vector, whose growth gain is not steady", "{} are vectors, whose growth gain is not steady"
    more = BATCHES * LEAST_SAMPLES + 1 - samples
    later = BATCHES * LEAST_STEPS - steps
    for count, noun in ((more, "sample"), (later, "step")):
        if count > 0:
            what = f"{count} more {noun}{'s' if count > 1 else ''} for a growth gain"
            return f"{{}} needs {what}", f"{{}} need {what}"
    return "{} has no growth gain in these samples", "{} have no growth gain in these samples"

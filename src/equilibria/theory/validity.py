"""The assumptions of a prediction as data: which they are, whether they hold, how large the error is otherwise."""

from __future__ import annotations

from dataclasses import dataclass

ROUNDED_AWAY = {"float32": 2.0**-25, "bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Relative change per step below which rounding to nearest leaves every weight unchanged: half an ulp at worst."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """One condition under which a prediction holds.

    Attributes:
        name: short name of the assumption.
        met: True or False where the inputs decide it, None where only a measurement of the run can.
        error: relative error of the affected quantity (of ||w||^2 where that is the norm), at these inputs if ``met``
            is decided, else the size seen when the assumption fails; None where no single number is known.
        affects: the predicted quantities that it affects.
        detail: one sentence with the condition and the consequence if it fails.
    """

    name: str
    met: bool | None
    error: float | None
    affects: str
    detail: str


def invariant_weight() -> Assumption:
    """The loss does not change when the weight is scaled; only a measurement can decide this."""
    return Assumption(
        "scale-invariant weight",
        None,
        None,
        "norm, angle",
        "the weight must feed a normalisation layer: |cos(w, gradient)| < 1e-3, and it must be decayed",
    )


def stationary_gradient(time_constant: float) -> Assumption:
    """The unit gradient changes little within three time constants."""
    return Assumption(
        "stationary unit gradient",
        None,
        None,
        "norm, angle",
        f"L must stay put for about {3 * time_constant:.3g} steps (3 time constants); "
        "if it drifts, ||w||^2 lags by half the relative drift per time constant",
    )


def noise_dominated() -> Assumption:
    """Successive gradients are nearly uncorrelated."""
    return Assumption(
        "noise-dominated gradient",
        None,
        0.1,
        "norm, angle",
        "successive gradients must be nearly uncorrelated: 1-2 % off at small batch, 10-25 % near interpolation",
    )


def no_oscillation(product: float, threshold: float, *, saturates: bool) -> Assumption:
    """The approach is monotone near equilibrium: lr·wd is below the oscillation threshold."""
    met = product <= threshold
    faster = "more weight decay no longer speeds it up" if saturates else "it still speeds up with weight decay"
    return Assumption(
        "no oscillation near equilibrium",
        met,
        None,
        "rate, time_constant",
        f"lr*wd = {product:.3g} against the threshold {threshold:.3g}; above it the norm overshoots and {faster}",
    )

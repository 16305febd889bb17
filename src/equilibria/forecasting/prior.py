"""What is known about L before a run says anything: how it usually answers to the angle, and how it drifts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from equilibria.forecasting.observed import ForecastRule
from equilibria.theory.rules import AdamL2, AdamW


@dataclass(frozen=True, slots=True)
class Prior:
    """Means and standard deviations over layers.

    Attributes:
        power: of the squared angle in L.
        power_sd: its scatter.
        drift: of ln L per e-fold of the sum of squared angles.
        drift_sd: its scatter.
        rate: per step, at which L follows the angle.
        wander: of ln L around what the fit says, for as long as one looks.
        block_sd: of ln L of a block of samples, where to begin.
        angle: ln of measured over predicted angle.
        angle_sd: its scatter.
        size_sd: of ln of the mean square update that makes the norm grow (Adam).
    """

    power: float
    power_sd: float
    drift: float
    drift_sd: float
    rate: float
    wander: float
    block_sd: float
    angle: float
    angle_sd: float
    size_sd: float


_SGD = Prior(
    power=0.015,
    power_sd=0.03,
    drift=-0.35,
    drift_sd=0.3,
    rate=0.05,
    wander=0.15,
    block_sd=0.15,
    angle=0.0,
    angle_sd=0.0,
    size_sd=0.0,
)
_ADAM = replace(_SGD, angle=-0.03, angle_sd=0.015, size_sd=0.08)


def prior_of(rule: ForecastRule) -> Prior:
    """The prior of an optimizer."""
    return _ADAM if isinstance(rule, AdamW | AdamL2) else _SGD

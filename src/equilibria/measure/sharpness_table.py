"""The table of a sharpness tracker: one row per query, with units."""

from __future__ import annotations

import pyarrow as pa

_WORDS = pa.dictionary(pa.int32(), pa.string())
_UNITS = {  # "1" is a pure number, "w" the unit of the weights, "loss" that of the loss
    "sharpness": "loss/w^2",  # loss if spherical: |w|^2 times the eigenvalue at w
    "bound": "1",  # of its relative error; an estimate where certified is 0
    "hvps": "products",
    "certified": "1",  # 1 if the search began at random, 0 if it began at the previous result
    "threshold": "loss/w^2",  # where the optimizer becomes unstable; in the unit of the sharpness
    "ratio": "1",  # R = sharpness / threshold
    "ratio_mean": "1",  # over this step and the one before, if both were queried; else R itself
    "norm_sq": "w^2",
    "lr": "w^2/loss",
    "weight_decay": "loss/w^2",
    "effective_lr": "1/loss",  # lr / (c |w|^2), null unless spherical
    "secant": "loss/w^2",  # along the last step, from two gradients of training; null unless on the full batch
    "turned_back": "1",  # share of the last ten steps that turned back on the one before
    "loss": "loss",
    "steps_to_crossing": "steps",  # until R = 1; null without a forecast
    "steps_to_oscillation": "steps",  # until the loss jumps, about: as it grows out of the rounding of the weights
    "loss_predicted": "loss",  # above its minimum, at the edge of stability; the largest value, of g = 0
    "period": "steps",  # of the slow oscillation there, once it is small
}


def _field(name: str, kind: pa.DataType, *, unit: str = "", nullable: bool = True) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"unit": unit} if unit else None)


SHARPNESS_FIELDS = pa.schema(
    [
        _field("step", pa.int64(), unit="steps", nullable=False),
        *(_field(name, pa.float64(), unit=unit) for name, unit in _UNITS.items()),
        _field("state", _WORDS),
    ]
)
"""Names, types and units. Null means not measured, or no law."""

STABLE, APPROACHING, PAST, EDGE = "stable", "approaching", "past the edge", "edge of stability"
DIVERGING, DIVERGED = "diverging", "diverged"
STATES = (STABLE, APPROACHING, PAST, EDGE, DIVERGING, DIVERGED)
"""What ``state`` may say. Approaching: R grows as weight decay alone makes it grow, so that its crossing of 1 is known.
Past the edge: R is above 1, but no oscillation is seen yet, or it still grows. Edge of stability: R is held at 1 by an
oscillation. Diverging: R is above 1, steps turn back, and the loss has grown far beyond where it began and still
grows. Diverged: the loss is as far beyond, where R is below 1 again: of a dead network that says nothing."""

"""The sample table: one row per sampled step and parameter (or row of a parameter), with units."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from equilibria.errors import EquilibriaError

WORDS = pa.dictionary(pa.int32(), pa.string())

_UNITS = {  # "1" is a pure number, "w" the unit of the weights, "g" that of the loss per unit of weight
    "lr": "w/g",  # plain SGD's; other optimizers give the number another unit
    "weight_decay": "g/w",
    "momentum": "1",  # beta1 for the Adam family and Lion
    "norm": "w",  # before the step, like grad_norm, cosine and the predictions
    "grad_norm": "g",
    "cosine": "1",  # of weight and gradient
    "update_norm": "w",
    "angle": "rad",
    "relative_update": "1",
    "effective_lr": "1/(g w)",  # lr / ||w||^2
    "unit_grad_sq": "(g w)^2",  # ||g||^2 ||w||^2, one sample of L
    "momentum_unit_grad_sq": "(g w)^2",  # the same with the correlation of gradient and momentum: h~
    "angle_equilibrium": "rad",
    "norm_equilibrium": "w",
    "angle_predicted": "rad",
    "norm_predicted": "w",
    "steps_to_settle": "steps",
    "epochs_to_settle": "epochs",
}


def _field(name: str, kind: pa.DataType, *, unit: str = "", nullable: bool = True) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"unit": unit} if unit else None)


SAMPLE_FIELDS = pa.schema(
    [
        _field("step", pa.int64(), unit="steps", nullable=False),
        _field("param", WORDS, nullable=False),
        *(_field(name, pa.float64(), unit=unit) for name, unit in _UNITS.items()),
        _field("state", WORDS),
        _field("note", WORDS),
    ]
)
"""Names, types and units. Null means not measured or no law, NaN means measured and not a number."""

NUMBERS = tuple(_UNITS)
"""The columns that hold measured or predicted numbers."""

APPROACHING, SETTLED, DISTURBED, NO_EQUILIBRIUM = "approaching", "settled", "disturbed", "no equilibrium"
STATES = (APPROACHING, SETTLED, DISTURBED, NO_EQUILIBRIUM)
"""What ``state`` may say; disturbed means that lr, wd or momentum jumped, or the weights themselves were changed, since
it was settled. A smooth schedule disturbs nothing: what falls behind it is approaching."""

SKIPPED, NOT_FINITE, CHANGED_OUTSIDE, NO_GRADIENT = (
    "step skipped",
    "gradient not finite",
    "changed outside step",
    "no gradient",
)
NOTES = (SKIPPED, NOT_FINITE, CHANGED_OUTSIDE, NO_GRADIENT)
"""What ``note`` may say; null where all is well."""


def unit(column: str) -> str:
    """The unit of a column of the sample table, "" for words.

    Example:
        >>> unit("angle"), unit("step"), unit("param")
        ('rad', 'steps', '')
    """
    if column not in SAMPLE_FIELDS.names:
        raise EquilibriaError(f"got column {column!r}; expected one of: {', '.join(SAMPLE_FIELDS.names)}")
    metadata: Mapping[bytes, bytes] = SAMPLE_FIELDS.field(column).metadata or {}
    return metadata.get(b"unit", b"").decode()

"""The sample table: one row per sampled step and parameter (or row of a parameter), with units."""

from __future__ import annotations

import re
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

SETTLING, SETTLED, DISTURBED, NO_EQUILIBRIUM = "settling", "settled", "disturbed", "none"
STATES = (SETTLING, SETTLED, DISTURBED, NO_EQUILIBRIUM)
"""What ``state`` may say; disturbed means that lr, wd or momentum jumped, or the weights themselves were changed, since
it was settled. A smooth schedule disturbs nothing: what falls behind it is settling."""

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


_WORDS = pa.dictionary(pa.int32(), pa.string())
_SHARPNESS_UNITS = {  # "1" is a pure number, "w" the unit of the weights, "loss" that of the loss
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


def _sharpness_field(name: str, kind: pa.DataType, *, unit: str = "", nullable: bool = True) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"unit": unit} if unit else None)


SHARPNESS_FIELDS = pa.schema(
    [
        _sharpness_field("step", pa.int64(), unit="steps", nullable=False),
        *(_sharpness_field(name, pa.float64(), unit=unit) for name, unit in _SHARPNESS_UNITS.items()),
        _sharpness_field("state", _WORDS),
    ]
)
"""Names, types and units. Null means not measured, or no law."""

STABLE, APPROACHING_EDGE, PAST, EDGE = "stable", "approaching", "past the edge", "edge of stability"
DIVERGING, DIVERGED = "diverging", "diverged"
EDGE_STATES = (STABLE, APPROACHING_EDGE, PAST, EDGE, DIVERGING, DIVERGED)
"""What ``state`` may say. Approaching: R grows as weight decay alone makes it grow, so that its crossing of 1 is known.
Past the edge: R is above 1, but no oscillation is seen yet, or it still grows. Edge of stability: R is held at 1 by an
oscillation. Diverging: R is above 1, steps turn back, and the loss has grown far beyond where it began and still
grows. Diverged: the loss is as far beyond, where R is below 1 again: of a dead network that says nothing."""


FORMAT = "1.1"
"""Version of the files, major.minor: a new column or table raises the minor, what older readers misread the major."""

FORMAT_KEY = b"equilibria.format"
"""The entry of the Arrow schema's metadata that holds the version."""

SAMPLE_SCHEMA = SAMPLE_FIELDS.with_metadata({FORMAT_KEY: FORMAT})
"""The sample table. Null means not measured, NaN means measured and not a number."""

SAMPLES, SHARPNESS = "samples", "sharpness"

TABLES = {SAMPLES: SAMPLE_SCHEMA, SHARPNESS: SHARPNESS_FIELDS.with_metadata({FORMAT_KEY: FORMAT})}
"""What a run may hold, by the name of its files. A column that is not nullable must be given."""


def check_format(version: object, *, where: str) -> None:
    """Refuse what this version of the library would misread: a newer major number, or no version at all.

    Args:
        version: what the file says, "major.minor".
        where: the file, for the message.

    Raises:
        EquilibriaError: if the major number is newer, or ``version`` is not a version.

    Example:
        >>> check_format("1.7", where="run.json")
        >>> check_format("2.0", where="run.json")
        Traceback (most recent call last):
        ...
        equilibria.errors.EquilibriaError: run.json: written in format 2.0 by a newer equilibria; this one reads 1.x:
        pip install --upgrade equilibria
    """
    match = re.fullmatch(r"(\d+)\.(\d+)", version) if isinstance(version, str) else None
    if match is None:
        raise EquilibriaError(f"{where}: got format {version!r}; expected a version such as {FORMAT}")
    major = FORMAT.split(".")[0]
    if int(match[1]) > int(major):
        raise EquilibriaError(
            f"{where}: written in format {version} by a newer equilibria; this one reads {major}.x: "
            "pip install --upgrade equilibria"
        )

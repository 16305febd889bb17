"""The tables of a run: their columns with units, the words of their text columns, and the version of their format.

A run has a sample table, one row per sampled step and parameter (or row of a parameter); a diffusion table, one row per
parameter and pair of steps whose weights were compared; if a sharpness tracker recorded into it, a sharpness table, one
row per query; and if the training logged numbers of its own, such as the loss, a metrics table, one row per number.
Null means not measured or no law; NaN means measured and not a number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal

import pyarrow as pa

from equilibria.errors import EquilibriaError

TableName = Literal["samples", "sharpness", "metrics", "diffusion"]
SAMPLES: Final = "samples"
SHARPNESS: Final = "sharpness"
METRICS: Final = "metrics"
DIFFUSION: Final = "diffusion"

_TEXT = pa.dictionary(pa.int32(), pa.string())


def _schema(required: Mapping[str, pa.DataType], units: Mapping[str, str], text: tuple[str, ...]) -> pa.Schema:
    """Columns that are never null, then numbers with their units, then text."""
    steps = {b"unit": b"steps"}
    return pa.schema(
        [
            *(
                pa.field(name, kind, False, steps if name in ("step", "distance") else None)
                for name, kind in required.items()
            ),
            *(pa.field(name, pa.float64(), metadata={"unit": unit}) for name, unit in units.items()),
            *(pa.field(name, _TEXT) for name in text),
        ]
    )


# ---- samples

_SAMPLE_UNITS = {  # "1" is a pure number, "w" the unit of the weights, "g" that of the loss per unit of weight
    "lr": "w/g",  # for plain SGD; other optimizers give lr another unit
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
    "pull": "g w",  # <g, w - w of the step before>, from 1,024 coordinates; null under heavy-ball momentum: h~ has it
    "scaled_grad_sq": "g",  # Adam only: <g, g/sqrt(v)>, from the same coordinates
    "update_intended": "w",  # 16-bit weights only: of the update before rounding, from 1,024 coordinates
    "update_gain": "1",  # AdamW only: kappa = (1 + b1)/(1 - b1) mean((m/sqrt(v))^2), 1 for independent gradients
    "growth": "1",  # ||w'||^2 / ||w||^2 - 1 of the step
    "gain": "1",  # G = (change of ln ||w||^2 + 2 sum eps) / sum angle^2 over the last 6 % of the steps, 80 at least
    "gain_error": "1",  # its standard error, from eight batches of these steps
}

SAMPLE_FIELDS = _schema({"step": pa.int64(), "param": _TEXT}, _SAMPLE_UNITS, ("state", "note", "law"))
"""Names, types and units of the sample table's columns."""

NUMBERS = tuple(_SAMPLE_UNITS)
"""The columns of the sample table that hold measured or predicted numbers."""

SETTLING, SETTLED, DISTURBED, NO_EQUILIBRIUM = "settling", "settled", "disturbed", "none"
STATES = (SETTLING, SETTLED, DISTURBED, NO_EQUILIBRIUM)
"""Values of the sample table's ``state``. A layer is disturbed if, since it was settled, lr, wd or momentum jumped or
its weights were changed outside a step. A smooth schedule disturbs nothing: a layer that lags behind it is settling.
One sample does not tell a layer at rest from one that passes its equilibrium: summaries do (`diagnosis.passing`)."""

FORMER_STATES = {"approaching": SETTLING, "no equilibrium": NO_EQUILIBRIUM}
"""Values of ``state`` that versions before format 1.2 wrote into the sample table, and their present names."""

SKIPPED, NOT_FINITE, CHANGED_OUTSIDE, NO_GRADIENT, RESCALED, REMOVED = (
    "step skipped",
    "gradient not finite",
    "changed outside step",
    "no gradient",
    "rescaled by controller",
    "not in the optimizer",
)
NOTES = (SKIPPED, NOT_FINITE, CHANGED_OUTSIDE, NO_GRADIENT, RESCALED, REMOVED)
"""Values of the sample table's ``note``; null for an ordinary sample. A controller of this package that rescales a
weight announces it, and predictions continue across it; any other change between two steps is outside."""

INVARIANT_LAW, GAIN_LAW = "invariant", "measured gain"
LAWS = (INVARIANT_LAW, GAIN_LAW)
"""Values of the sample table's ``law``: the law that a row's prediction comes from. That of scale-invariant weights
needs no measured norm after its start; for other matrices the growth gain is measured. Null without a prediction, for
an angle that a controller promises, and in records before format 1.4, whose predictions are those of invariant
weights."""

WORDS: Final[dict[str, tuple[str, ...]]] = {"state": STATES, "note": NOTES, "law": LAWS}
"""The words of the sample table's text columns."""


def unit(column: str) -> str:
    """The unit of a column of the sample table, "" for text.

    Example:
        >>> unit("angle"), unit("step"), unit("param")
        ('rad', 'steps', '')
    """
    if column not in SAMPLE_FIELDS.names:
        raise EquilibriaError(f"got column {column!r}; expected one of: {', '.join(SAMPLE_FIELDS.names)}")
    metadata: Mapping[bytes, bytes] = SAMPLE_FIELDS.field(column).metadata or {}
    return metadata.get(b"unit", b"").decode()


# ---- sharpness

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
    "steps_to_crossing": "steps",  # until R = 1: a forecast; negative once the crossing was observed; null if unknown
    "crossing_spread": "steps",  # half the width of the range of that step
    "steps_to_oscillation": "steps",  # roughly, until the oscillation has grown from rounding error to a jump in loss
    "loss_predicted": "loss",  # above its minimum, at the edge of stability; the largest value, of g = 0
    "period": "steps",  # of the slow oscillation there, once it is small
}

SHARPNESS_FIELDS = _schema({"step": pa.int64()}, _SHARPNESS_UNITS, ("state",))
"""Names, types and units of the sharpness table's columns."""

STABLE, APPROACHING_EDGE, PAST, EDGE = "stable", "approaching", "past the edge", "edge of stability"
DIVERGING, DIVERGED = "diverging", "diverged"
EDGE_STATES = (STABLE, APPROACHING_EDGE, PAST, EDGE, DIVERGING, DIVERGED)
"""Values of the sharpness table's ``state``. Approaching: R grows steadily enough to forecast the step at which it
crosses 1. Past the edge: R is above 1, and no oscillation is visible yet, or it still grows. Edge of
stability: an oscillation holds R at 1. Diverging: R is above 1, steps turn back, and the loss is far above its first
value and still grows. Diverged: the loss is as far above, and R is below 1 again, which means nothing for a dead
network."""


# ---- metrics

METRIC_FIELDS = _schema({"step": pa.int64(), "name": _TEXT, "value": pa.float64()}, {}, ())
"""Names and types of the columns of the metrics table: the numbers that a training logs itself, such as its loss."""


# ---- diffusion

DIFFUSION_FIELDS = _schema({"step": pa.int64(), "param": _TEXT, "distance": pa.int64()}, {"turned": "1"}, ())
"""Names, types and units of the columns of the diffusion table: how far weights turn over many steps.

``turned`` is -ln cos of the angle between the weight before ``step`` and the weight ``distance`` steps of its optimizer
later, over at most 1,024 coordinates of the tensor (at least 64 of each row, if rows are watched), the same in every
row of the table; null from a right angle on. Sharded tensors have no rows."""


# ---- the files

FORMAT = "1.4"
"""Version of the files, major.minor: a new column or table raises the minor; a change that older readers would misread
raises the major."""

FORMAT_KEY = b"equilibria.format"
"""The entry of an Arrow schema's metadata that holds the version."""

CHECKED_SINCE = (1, 2)
"""The version since which ``run.json`` and every block of a stream have a checksum."""

SAMPLE_SCHEMA = SAMPLE_FIELDS.with_metadata({FORMAT_KEY: FORMAT})
"""The sample table as it is on disk. Null means not measured, NaN means measured and not a number."""

TABLES: dict[TableName, pa.Schema] = {
    SAMPLES: SAMPLE_SCHEMA,
    SHARPNESS: SHARPNESS_FIELDS.with_metadata({FORMAT_KEY: FORMAT}),
    METRICS: METRIC_FIELDS.with_metadata({FORMAT_KEY: FORMAT}),
    DIFFUSION: DIFFUSION_FIELDS.with_metadata({FORMAT_KEY: FORMAT}),
}
"""The tables that a run may have, by the name of their files. Columns that are not nullable are required."""


def check_format(version: object, *, where: str) -> tuple[int, int]:
    """The numbers of a version; raises if this library would misread the file: a newer major number, or no version.

    Args:
        version: the version that the file states, "major.minor".
        where: the file, for the message.

    Raises:
        EquilibriaError: if the major number is newer, or ``version`` is not a version.

    Example:
        >>> check_format("1.7", where="run.json")
        (1, 7)
        >>> check_format("2.0", where="run.json")
        Traceback (most recent call last):
        ...
        equilibria.errors.EquilibriaError: run.json: written in format 2.0 by a newer equilibria; this one reads 1.x:
        pip install --upgrade equilibria
    """
    match = re.fullmatch(r"([0-9]{1,9})\.([0-9]{1,9})", version) if isinstance(version, str) else None
    if match is None:
        raise EquilibriaError(f"{where}: got format {version!r}; expected a version such as {FORMAT}")
    major = FORMAT.split(".")[0]
    if int(match[1]) > int(major):
        raise EquilibriaError(
            f"{where}: written in format {version} by a newer equilibria; this one reads {major}.x: "
            "pip install --upgrade equilibria"
        )
    return int(match[1]), int(match[2])

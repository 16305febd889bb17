"""The tables as a run keeps them: with the version of the format."""

from __future__ import annotations

import re

from equilibria.errors import EquilibriaError
from equilibria.measure.samples import SAMPLE_FIELDS
from equilibria.measure.sharpness_table import SHARPNESS_FIELDS

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

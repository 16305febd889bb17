"""What a run leaves on disk: samples that survive ``kill -9``, a full disk and a resumed training.

A run directory holds ``run.json`` (what the run is), ``samples-000.arrows``, ``samples-001.arrows``, ... (one Arrow IPC
stream per session, readable by any Arrow library), ``sharpness-000.arrows`` ... if a tracker wrote some, and
``writer.lock``.

- `RunWriter`: append samples.
- `read_run`: read them back, as Arrow, Parquet, CSV or pandas.
- `compare`: two runs side by side.
"""

from __future__ import annotations

from equilibria.records._comparison import Comparison, compare
from equilibria.records._manifest import Session
from equilibria.records._reader import Run, read_run
from equilibria.records._writer import RecordWarning, RunWriter
from equilibria.records.tables import FORMAT, SAMPLE_SCHEMA

__all__ = [
    "FORMAT",
    "SAMPLE_SCHEMA",
    "Comparison",
    "RecordWarning",
    "Run",
    "RunWriter",
    "Session",
    "compare",
    "read_run",
]

"""A run on disk: samples that survive ``kill -9``, a full disk and a resumed training.

A run directory holds ``run.json`` (the identity of the run and its sessions), ``samples-000.arrows``,
``samples-001.arrows``, ... (one Arrow IPC stream per session, readable by any Arrow library), ``sharpness-000.arrows``
... if a sharpness tracker recorded into it, ``metrics-000.arrows`` ... if the training logged numbers of its own, and
``writer.lock``.

- `RecordWriter`: append samples.
- `read_record`: read them, as Arrow, Parquet, CSV or pandas; `Record.verify` says what is whole.
- `compare`: two runs side by side.
"""

from __future__ import annotations

from equilibria.records._comparison import Comparison, compare
from equilibria.records._manifest import Session
from equilibria.records._reader import Record, read_record
from equilibria.records._verification import TableCheck, Verification
from equilibria.records._writer import RecordWarning, RecordWriter
from equilibria.records.tables import FORMAT, SAMPLE_SCHEMA

__all__ = [
    "FORMAT",
    "SAMPLE_SCHEMA",
    "Comparison",
    "Record",
    "RecordWarning",
    "RecordWriter",
    "Session",
    "TableCheck",
    "Verification",
    "compare",
    "read_record",
]

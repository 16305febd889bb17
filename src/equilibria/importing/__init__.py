"""Runs of others: a run from the log of another tool, or from a folder of checkpoints.

- `import_run`: norms and angles of a W&B, TensorBoard or MLflow run, of a CSV or Parquet table, or of checkpoints, as a
  run that every report, forecast and page takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from equilibria._lazy import lazy_names

if TYPE_CHECKING:
    from equilibria.importing._run import import_run

__all__ = ["import_run"]

__getattr__, __dir__ = lazy_names(__name__, {"import_run": "_run"})

"""Which run directory a training that is resumed from a checkpoint goes on in: the one of its own run, and no other."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from equilibria.errors import EquilibriaError
from equilibria.record.manifest import read_manifest


def record_at(directory: Path | None) -> dict[str, str]:
    """What a checkpoint keeps of the run that is recorded there; empty if there is none."""
    found = None if directory is None else _run_id(directory)
    return {} if found is None else {"directory": str(directory), "id": found}


def own_run(log_dir: Path, record: Mapping[str, str]) -> Path | None:
    """The directory of the run that a checkpoint is of: ``log_dir`` or one beside it; None if it is not there.

    A second run with the same ``log_dir`` was recorded beside it (``runs/a-2``), so the name alone does not tell.

    Args:
        log_dir: what was asked for.
        record: what `record_at` gave when the checkpoint was saved.
    """
    own = [each for each in _with_same_name(log_dir) if record and _run_id(each) == record["id"]]
    # of copies, the one of the same name
    return min(own, key=lambda each: each.name != Path(record["directory"]).name, default=None)


def _with_same_name(log_dir: Path) -> list[Path]:
    """It, and the numbered ones beside it."""
    pattern = re.compile(re.escape(log_dir.name) + r"(-\d+)?")
    beside = log_dir.parent.iterdir() if log_dir.parent.is_dir() else ()
    return sorted(each for each in beside if pattern.fullmatch(each.name))


def _run_id(directory: Path) -> str | None:
    with contextlib.suppress(OSError, EquilibriaError):  # damaged, or not a run's: not the one that is looked for
        manifest = read_manifest(directory)
        return None if manifest is None else manifest.id
    return None

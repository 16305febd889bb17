"""The folder of a training: what it holds, and what it may hold that a kill left before the first checkpoint."""

from __future__ import annotations

from pathlib import Path

from equilibria.errors import EquilibriaError
from equilibria.record.lock import LOCK_FILE
from equilibria.record.manifest import TEMPORARY, read_manifest
from equilibria.record.schema import TABLES
from equilibria.record.segment import segment_paths

CHECKPOINT, RECORD = "checkpoint.pt", "record"


def refuse_foreign(place: Path) -> None:
    """Refuse a folder without a whole checkpoint if it holds anything that no training wrote.

    Where a damaged checkpoint shows whose folder it is, only the record must be a training's: it will be removed.

    Raises:
        EquilibriaError: it does.
    """
    is_damaged = (place / CHECKPOINT).exists()
    foreign = [
        path.name
        for path in place.iterdir()
        if not (_is_record(path) if path.name == RECORD else is_damaged or path.name == LOCK_FILE)
    ]
    if foreign:
        raise EquilibriaError(
            f"got folder={str(place)!r}, which holds other things ({', '.join(sorted(foreign)[:3])}); expected a "
            "folder that is new, empty or of an earlier training: choose another"
        )


def _is_record(path: Path) -> bool:
    """Whether it is a run; or what is left of one that was killed while it was begun or removed."""
    if not path.is_dir():
        return False
    segments = {each.name for table in TABLES for each in segment_paths(path, table=table).values()}
    names = {each.name for each in path.iterdir()}
    return read_manifest(path) is not None or names <= {LOCK_FILE, TEMPORARY, *segments}

"""Checkpoints that are complete or not there."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from equilibria.errors import EquilibriaError
from equilibria.records._files import write_whole
from equilibria.records._lock import LOCK_FILE
from equilibria.records._manifest import TEMPORARY, read_manifest
from equilibria.records._segment import segment_paths
from equilibria.records.tables import TABLES

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


State = dict[str, Any]
"""Numbers, words and tensors in dicts, lists and tuples."""

_EXPECTED = "expected numbers, words and tensors in dicts, lists and tuples"


class Checkpoint:
    """The checkpoint of one training, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_tried = False

    def write(self, state: State) -> None:
        """Put a state in place, on the disk: a kill leaves the old one or the new one.

        Raises:
            EquilibriaError: a state that could not be read again, which is tried out the first time.
        """
        content = io.BytesIO()
        torch.save(state, content)
        if not self._is_tried:
            _try_out(content.getvalue())
            self._is_tried = True
        write_whole(self._path, content.getvalue())


def remove_leftovers(path: Path) -> None:
    """Remove what kills in the middle of a write left beside a checkpoint."""
    for left in path.parent.glob(f".{path.name}-*.tmp"):
        left.unlink(missing_ok=True)


def read_checkpoint(path: Path) -> State | None:
    """The state, its tensors on the CPU, or None if there is none or it is damaged; what is read runs no code.

    Raises:
        EquilibriaError: a whole one that holds what is not read, for it would run code.
        OSError: a file that is there and cannot be had, so that nobody may take it for none.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        state = _read(content)
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        if _is_refused(error):
            raise EquilibriaError(f"got the checkpoint {path}, which holds {_refused(error)}; {_EXPECTED}") from error
        return None  # damaged: as if it were not there
    return state if isinstance(state, dict) else None


def _read(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _try_out(content: bytes) -> None:
    try:
        _read(content)
    except pickle.UnpicklingError as error:
        raise EquilibriaError(
            f"got a state with {_refused(error)}, which could not be read again; {_EXPECTED}, from the optimizer's "
            "settings, control and measures alike"
        ) from error


def _is_refused(error: Exception) -> bool:
    return isinstance(error, pickle.UnpicklingError) and "Unsupported" in str(error)


def _refused(error: Exception) -> str:
    """What torch would not read, out of its long advice."""
    words = str(error).partition("GLOBAL ")[2].split()
    return f"an object of {words[0]}" if words else "an object that torch does not read"

"""Checkpoint files, which are whole or absent, and the folder of a training."""

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


def refuse_foreign(folder: Path) -> None:
    """Check that a folder without a readable checkpoint holds only files that a training wrote.

    If there is a damaged checkpoint, the folder is a training's: only the record, which will be removed, is checked.

    Raises:
        EquilibriaError: the folder holds other files.
    """
    is_damaged = (folder / CHECKPOINT).exists()
    foreign = [
        path.name
        for path in folder.iterdir()
        if not (_is_record(path) if path.name == RECORD else is_damaged or path.name == LOCK_FILE)
    ]
    if foreign:
        raise EquilibriaError(
            f"got folder={str(folder)!r}, which holds other things ({', '.join(sorted(foreign)[:3])}); expected a "
            "folder that is new, empty or of an earlier training: choose another"
        )


def _is_record(path: Path) -> bool:
    """Whether it is a run, or the remains of one that was killed while it was created or removed."""
    if not path.is_dir():
        return False
    segments = {file.name for table in TABLES for file in segment_paths(path, table=table).values()}
    names = {file.name for file in path.iterdir()}
    return read_manifest(path) is not None or names <= {LOCK_FILE, TEMPORARY, *segments}


State = dict[str, Any]
"""Numbers, strings and tensors in dicts, lists and tuples."""

_EXPECTED = "expected numbers, strings and tensors in dicts, lists and tuples"


class Checkpoint:
    """The checkpoint of one training, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_checked = False

    def write(self, state: State) -> None:
        """Write a state atomically: a kill leaves the old one or the new one.

        Raises:
            EquilibriaError: the state could not be read again; checked at the first write.
        """
        content = io.BytesIO()
        torch.save(state, content)
        if not self._is_checked:
            _check_readable(content.getvalue())
            self._is_checked = True
        write_whole(self._path, content.getvalue())


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files that kills in the middle of a write left."""
    for left in path.parent.glob(f".{path.name}-*.tmp"):
        left.unlink(missing_ok=True)


def read_checkpoint(path: Path) -> State | None:
    """The state with its tensors on the CPU, or None if there is none or it is damaged. Reading runs no code.

    Raises:
        EquilibriaError: the checkpoint is whole but holds objects whose reading would run code.
        OSError: the file exists but cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        state = _read(content)
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        if _is_unsafe(error):
            raise EquilibriaError(f"got the checkpoint {path}, which holds {_unsafe(error)}; {_EXPECTED}") from error
        return None  # damaged: counts as none
    return state if isinstance(state, dict) else None


def _read(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _check_readable(content: bytes) -> None:
    try:
        _read(content)
    except pickle.UnpicklingError as error:
        raise EquilibriaError(
            f"got a state with {_unsafe(error)}, which could not be read again; {_EXPECTED}, from the optimizer's "
            "settings, control and measures alike"
        ) from error


def _is_unsafe(error: Exception) -> bool:
    return isinstance(error, pickle.UnpicklingError) and "Unsupported" in str(error)


def _unsafe(error: Exception) -> str:
    """The object that torch refuses to read, from its long message."""
    words = str(error).partition("GLOBAL ")[2].split()
    return f"an object of {words[0]}" if words else "an object that torch does not read"

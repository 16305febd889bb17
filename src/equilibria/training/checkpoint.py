"""Checkpoints that are complete or not there."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from equilibria.record.files import write_whole

State = dict[str, Any]
"""Numbers, words and tensors in dicts, lists and tuples."""


def write_checkpoint(path: Path, state: State) -> None:
    """Put a state in place, on the disk: a kill leaves the old one or the new one."""
    content = io.BytesIO()
    torch.save(state, content)
    write_whole(path, content.getvalue())


def read_checkpoint(path: Path) -> State | None:
    """The state, or None if there is none that can be read; what is read runs no code."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    try:
        state = torch.load(io.BytesIO(content), weights_only=True)
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError):  # damaged: as if it were not there
        return None
    return state if isinstance(state, dict) else None

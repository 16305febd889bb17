"""Files that appear complete or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its target and move it into place, so that no reader and no power cut sees half of it."""
    beside = path.with_name(f".{path.name}-{secrets.token_hex(8)}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)

"""Files that appear complete or not at all, and files that are what they seem."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from stat import S_ISREG

from equilibria.errors import EquilibriaError


def write_whole(path: Path, content: bytes, *, temporary: Path | None = None) -> None:
    """Replace a file in one step: a reader, a kill or a power cut finds the old content or the new, never a part.

    A device or a pipe is written to and stays what it is.

    Args:
        path: the file to write.
        content: its bytes.
        temporary: a file in the same folder to write first and then rename, for a caller that is the only writer and
            recognises what a kill leaves behind; by default one with a random name.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    written = path.with_name(f".{path.name}-{secrets.token_hex(8)}.tmp") if temporary is None else temporary
    try:
        with written.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)


def check_own_file(path: Path) -> None:
    """Raise unless a path is a regular file in its own folder: opening a pipe blocks, and a link may lead anywhere.

    Raises:
        EquilibriaError: if it is something else.
        OSError: if there is no such file, or it cannot be looked at.
    """
    target, folder = (Path(os.path.realpath(place)) for place in (path, path.parent))
    if path.is_symlink() and not target.is_relative_to(folder):
        raise EquilibriaError(f"{path.name} is a link that leads out of the run")
    if not S_ISREG(path.stat().st_mode):
        raise EquilibriaError(f"{path.name} is not a file")


def check_outside_runs(path: Path) -> None:
    """Raise EquilibriaError for a path inside the directory of a run, where a written file could replace its record."""
    inside, *above = path.resolve().parents
    runs = [inside] if (inside / "run.json").exists() else []
    runs += [folder for folder in (inside, *above) if any(folder.glob("*-[0-9][0-9][0-9]*.arrows"))]
    for directory in runs[:1]:
        raise EquilibriaError(
            f"got path={str(path)!r}, inside the run {directory}; expected a path outside it, such as "
            f"{directory.parent / (directory.name + (path.suffix or '.html'))}",
            argument="path",
        )

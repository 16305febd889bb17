"""``run.json``: what a run is, and which sessions wrote it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from equilibria.errors import EquilibriaError
from equilibria.records.tables import FORMAT, check_format

RUN_FILE = "run.json"
TEMPORARY = RUN_FILE + ".tmp"


@dataclass(frozen=True, slots=True)
class Session:
    """One process's share of a run; times are UTC in ISO 8601, ``ended`` is None while it runs or if it was killed."""

    file: str
    started: str
    ended: str | None
    pid: int
    host: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of ``run.json``; times are UTC in ISO 8601, ``updated`` when a session last began or ended."""

    id: str
    format: str
    created: str
    updated: str
    sessions: tuple[Session, ...]

    def begin(self, session: Session) -> Manifest:
        """With a session more."""
        return replace(self, format=FORMAT, updated=session.started, sessions=(*self.sessions, session))

    def end(self, metadata: Mapping[str, Any]) -> Manifest:
        """With its last session ended now, and what is known only then."""
        time = now()
        *before, last = self.sessions
        ended = replace(last, ended=time, metadata={**last.metadata, **metadata})
        return replace(self, updated=time, sessions=(*before, ended))


def now() -> str:
    """The present moment, UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_manifest(directory: Path) -> Manifest | None:
    """What ``run.json`` says, or None if there is none.

    Raises:
        EquilibriaError: if it is of a newer major format, or is not a run's.
        OSError: if it cannot be read.
    """
    path = directory / RUN_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        content = json.loads(text)
        check_format(content["format"], where=str(path))
        sessions = tuple(_known(Session, session) for session in content["sessions"])
        manifest: Manifest = _known(Manifest, {**content, "sessions": sessions})
    except EquilibriaError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EquilibriaError(f"{path}: not the description of a run ({type(error).__name__}: {error})") from None
    return manifest


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace ``run.json`` in one stroke: a reader, or a crash, finds the old one or the new one whole."""
    temporary = directory / TEMPORARY
    # What UTF-8 cannot hold (half a surrogate pair) becomes an escape, which JSON reads back as what it was.
    with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(asdict(manifest), file, indent=2, allow_nan=False, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / RUN_FILE)


def check_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``metadata`` as JSON gives it back.

    Raises:
        EquilibriaError: if JSON cannot hold it.
    """
    try:
        text = json.dumps(dict(metadata), allow_nan=False)
        text.encode("utf-8")
        copy: dict[str, Any] = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise EquilibriaError(f"got metadata that JSON cannot hold: {error}; expected text, numbers, lists") from None
    return copy


def _known(kind: Any, values: Mapping[str, Any]) -> Any:
    """An instance from the fields it knows: a later minor version may have added some."""
    return kind(**{name: values[name] for name in kind.__slots__})

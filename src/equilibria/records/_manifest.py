"""``run.json``: the identity of a run, and the sessions that recorded it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from equilibria.errors import EquilibriaError
from equilibria.records._files import write_whole
from equilibria.records.tables import FORMAT, check_format

RUN_FILE = "run.json"
TEMPORARY = RUN_FILE + ".tmp"  # a writer that was killed may leave it behind


@dataclass(frozen=True, slots=True)
class Session:
    """The part of a run that one process recorded; times are UTC in ISO 8601.

    Attributes:
        file: the name of its file of samples.
        started: when it began.
        ended: when it closed its writer; None while it runs, and if it was killed.
        pid: its process id.
        host: the name of its machine.
        metadata: from its writer.
    """

    file: str
    started: str
    ended: str | None
    pid: int
    host: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of ``run.json``; times are UTC in ISO 8601.

    Attributes:
        id: 32 hexadecimal digits, the same for all sessions.
        format: the version of the files.
        created: when the first session began.
        updated: when a session last began or ended.
        sessions: in order.
    """

    id: str
    format: str
    created: str
    updated: str
    sessions: tuple[Session, ...]

    @property
    def metadata(self) -> dict[str, Any]:
        """Of all sessions; where two have the same key, the later one's value."""
        return {key: value for session in self.sessions for key, value in session.metadata.items()}

    def begin(self, session: Session) -> Manifest:
        """The manifest with another session."""
        return replace(self, format=FORMAT, updated=session.started, sessions=(*self.sessions, session))

    def end(self, metadata: Mapping[str, Any]) -> Manifest:
        """The manifest with its last session ended now, and ``metadata`` added to that session's."""
        time = now()
        *before, last = self.sessions
        ended = replace(last, ended=time, metadata={**last.metadata, **metadata})
        return replace(self, updated=time, sessions=(*before, ended))


def now() -> str:
    """The current time, UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a run directory, or None without a ``run.json``.

    Raises:
        EquilibriaError: if it has a newer major format, or does not describe a run.
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
    """Replace ``run.json`` in one step."""
    text = json.dumps(asdict(manifest), indent=2, allow_nan=False, ensure_ascii=False)
    # Characters that UTF-8 cannot hold (half a surrogate pair) become escapes, which JSON turns back.
    content = f"{text}\n".encode("utf-8", "backslashreplace")
    write_whole(directory / RUN_FILE, content, temporary=directory / TEMPORARY)


def check_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``metadata`` after a round trip through JSON.

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
    """An instance from its own fields only: a later minor version may have added others."""
    return kind(**{name: values[name] for name in kind.__slots__})

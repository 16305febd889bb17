"""``run.json``: the identity of a run, and the sessions that recorded it.

The segments hold the same: should ``run.json`` be damaged or lost, `find_manifest` takes it from them.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from equilibria.errors import EquilibriaError
from equilibria.records._files import check_own_file, write_whole
from equilibria.records._segment import Segment, segment_paths
from equilibria.records.tables import CHECKED_SINCE, FORMAT, check_format

RUN_FILE = "run.json"
TEMPORARY = RUN_FILE + ".tmp"  # a writer that was killed may leave it behind
_CHECKSUM = "crc32"


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
        after: the last sampled step before it, as the checkpoint knows it that the session resumed from; None for a
            first session, and if unknown.
        resumed_at: the first step of the session, as that checkpoint knows it: rows of this step and later ones in
            earlier sessions are of a branch that was given up; None for a first session, and before format 1.4.
        rows: how many rows it wrote into each table; None while it runs, if it was killed, and before format 1.2.
    """

    file: str
    started: str
    ended: str | None
    pid: int
    host: str
    metadata: Mapping[str, Any]
    after: int | None = None
    resumed_at: int | None = None
    rows: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of ``run.json``; times are UTC in ISO 8601.

    Attributes:
        id: 32 hexadecimal digits, the same for all sessions.
        format: the version of the files.
        created: when the first session began.
        updated: when a session last began or ended.
        sessions: in order.
        note: a sentence about damage of the file; not part of it.
    """

    id: str
    format: str
    created: str
    updated: str
    sessions: tuple[Session, ...]
    note: str = field(default="", compare=False)

    @property
    def metadata(self) -> dict[str, Any]:
        """Of all sessions; where two have the same key, the later one's value."""
        return {key: value for session in self.sessions for key, value in session.metadata.items()}

    def begin(self, session: Session) -> Manifest:
        """The manifest with another session."""
        return replace(self, format=FORMAT, updated=session.started, sessions=(*self.sessions, session), note="")

    def describe_last(self) -> dict[str, Any]:
        """The run and its last session, for the schema of a segment."""
        return {"id": self.id, "created": self.created, "session": asdict(self.sessions[-1])}

    def end(self, ending: Mapping[str, Any]) -> Manifest:
        """The manifest with its last session ended.

        Args:
            ending: when it ended, its rows, and ``metadata`` to add to that session's.
        """
        *before, last = self.sessions
        return replace(self, updated=ending["ended"], sessions=(*before, _ended(last, ending)))


def now() -> str:
    """The current time, UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def find_manifest(directory: Path) -> Manifest | None:
    """The manifest of a run directory, from its segments if ``run.json`` is damaged or lost; None if it holds no run.

    Raises:
        EquilibriaError: if ``run.json`` has a newer major format, or is damaged and the segments do not describe the
            run: they do since format 1.2.
        OSError: if a file cannot be read.
    """
    fault: EquilibriaError | None = None
    try:
        manifest = read_manifest(directory)
    except _NewerFormatError:
        raise
    except EquilibriaError as error:
        manifest, fault = None, error
    if manifest is not None and not manifest.note:
        return manifest
    recovered = _from_segments(directory) if directory.is_dir() else None
    if recovered is None:
        if fault is not None:
            raise fault
        return manifest
    reason = str(fault).replace(f"{directory}{os.sep}", "") if fault else f"{RUN_FILE} is missing"
    return replace(recovered, note=f"{manifest.note if manifest else reason}; what it said is taken from the segments")


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest in ``run.json``, with a note if it does not match its checksum; None without the file.

    Raises:
        EquilibriaError: if it has a newer major format, or does not describe a run.
        OSError: if it cannot be read.
    """
    path = directory / RUN_FILE
    try:
        check_own_file(path)
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        content = json.loads(text.decode("utf-8"))
        version, stated = content["format"], content.pop(_CHECKSUM, None)
        is_whole = None if stated is None else stated == _checksum(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _not_a_description(path, error) from None
    try:
        numbers = check_format(version, where=str(path))
    except EquilibriaError as error:
        raise EquilibriaError(str(error)) if is_whole is False else _NewerFormatError(str(error)) from None
    try:
        sessions = tuple(_session(values) for values in content["sessions"])
        _check(content["id"], "id", str)
        _check_time(content["created"], "created")
        _check_time(content["updated"], "updated")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _not_a_description(path, error) from None
    is_whole = numbers < CHECKED_SINCE if is_whole is None else is_whole
    note = "" if is_whole else f"{RUN_FILE} was changed after it was written, or is damaged"
    return Manifest(content["id"], version, content["created"], content["updated"], sessions, note)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace ``run.json`` in one step."""
    content = asdict(manifest)
    del content["note"]
    text = json.dumps(content | {_CHECKSUM: _checksum(content)}, indent=2, allow_nan=False, ensure_ascii=False)
    # Characters that UTF-8 cannot hold (half a surrogate pair) become escapes, which JSON turns back.
    write_whole(directory / RUN_FILE, f"{text}\n".encode("utf-8", "backslashreplace"), temporary=directory / TEMPORARY)


def notes_of_import(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Where an imported run comes from, and what that source cannot tell, in sentences; none for a watched run."""
    imported = metadata.get("imported")
    return tuple(map(str, imported.get("notes", ()))) if isinstance(imported, Mapping) else ()


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


class _NewerFormatError(EquilibriaError):
    """``run.json`` is whole, and this version cannot read it; nor can it read the segments."""


def _not_a_description(path: Path, error: Exception) -> EquilibriaError:
    reason = "lists in lists" if isinstance(error, RecursionError) else f"{type(error).__name__}: {error}"
    return EquilibriaError(f"{path}: not the description of a run ({reason[:200]})")


def _checksum(content: Mapping[str, Any]) -> str:
    """Of the values, whatever the spaces between them."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode('ascii')):08x}"


def _session(values: Mapping[str, Any]) -> Session:
    """A session from its own fields only: a later minor version may have added others."""
    file, started, pid, host, metadata = (values[name] for name in ("file", "started", "pid", "host", "metadata"))
    kinds = {"file": str, "host": str, "pid": int, "metadata": dict}
    for name, kind in kinds.items():
        _check(values[name], name, kind)
    _check_time(started, "started")
    known = {name: _check(values.get(name), name, int | None) for name in ("after", "resumed_at")}
    begun = Session(file, started, None, pid, host, metadata, **known)
    if values["ended"] is None:
        return begun
    return _ended(begun, {"ended": values["ended"], "rows": values.get("rows"), "metadata": {}})


def _ended(session: Session, ending: Mapping[str, Any]) -> Session:
    """The session with what was known at its end."""
    _check_time(ending["ended"], "ended")
    rows = _check(ending["rows"], "rows", dict | None)
    for count in (rows or {}).values():
        _check(count, "rows", int)
    metadata = {**session.metadata, **_check(ending["metadata"], "metadata", dict)}
    return replace(session, ended=ending["ended"], rows=rows, metadata=metadata)


def _check(value: Any, name: str, kind: Any) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name} is of type {type(value).__name__}")
    return value


def _check_time(value: Any, name: str) -> None:
    try:
        datetime.fromisoformat(_check(value, name, str)).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{name} is not a time") from None


def _from_segments(directory: Path) -> Manifest | None:
    """What the segments say of the run; None if none of them says anything."""
    described: list[tuple[Mapping[str, Any], Session]] = []
    for path in segment_paths(directory).values():
        try:
            segment = Segment(path)
            description, ending = segment.description or {}, segment.ending
            session = _session(description["session"])
            _check(description["id"], "id", str)
            _check_time(description["created"], "created")
            described.append((description, _ended(session, ending) if ending else session))
        except (EquilibriaError, KeyError, TypeError, ValueError, AttributeError):
            continue  # of another version, or damaged: `read_record` says so
    if not described:
        return None
    first, sessions = described[0][0], tuple(session for _, session in described)
    updated = sessions[-1].ended or sessions[-1].started
    return Manifest(first["id"], FORMAT, first["created"], updated, sessions)

"""What of a run is whole: rows, steps, damage and holes of every session and table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibria.findings import counted
from equilibria.records._lock import is_writer_alive
from equilibria.records._manifest import Session
from equilibria.records._segment import Segment, session_number
from equilibria.records.tables import SAMPLES, TABLES

_RECENT = 100  # sampled steps whose spacing decides whether a session's end is missing
_WIDER = 2.0  # times the widest of these spacings: "auto" may sample less often from one step to the next


@dataclass(frozen=True, slots=True)
class TableCheck:
    """One file of a run.

    Attributes:
        session: its number.
        table: the name of the table.
        file: the name of the file.
        rows: that can be read.
        first_step: of the first row that can be read; None without any.
        last_step: of the last one.
        checked: whether it has checksums; streams before format 1.2 have none but for their steps.
        closed: whether its writer closed it; False while it writes, and if it was killed.
        damage: sentences about what cannot be read.
    """

    session: int
    table: str
    file: str
    rows: int
    first_step: int | None
    last_step: int | None
    checked: bool
    closed: bool
    damage: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `Record.verify`; it prints as one line per file.

    Attributes:
        path: the run directory.
        whole: whether every row that was written is there, unchanged.
        tables: one per file.
        damage: sentences about ``run.json``, and about files that are missing or end too early.
        holes: sentences about steps that were sampled and never written.
    """

    path: Path
    whole: bool
    tables: tuple[TableCheck, ...]
    damage: tuple[str, ...]
    holes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The same in values that JSON can hold."""
        return {**asdict(self), "path": str(self.path)}

    def __str__(self) -> str:
        lines = [f"{self.path}: {'whole' if self.whole else 'damaged'}"]
        for table in self.tables:
            steps = "" if table.first_step is None else f", steps {table.first_step:,} to {table.last_step:,}"
            unchecked = "" if table.checked else ", no checksums (format 1.1 or older)"
            unclosed = "" if table.closed else ", not closed"
            lines.append(f"  {table.file}: {counted(table.rows, 'row')}{steps}{unchecked}{unclosed}")
        sentences = [*self.damage, *(line for table in self.tables for line in table.damage), *self.holes]
        return "\n".join([*lines, *(f"  ! {sentence}" for sentence in sentences)])


def verify_run(
    path: Path, sessions: Sequence[Session], segments: Mapping[str, Mapping[int, Segment]], notes: Sequence[str]
) -> Verification:
    """Look at every file of a run, those of tables that this version does not know included.

    Args:
        path: the run directory.
        sessions: of the run.
        segments: its files by table and session.
        notes: sentences about ``run.json`` and about files that are not of this run.
    """
    last_write = max((file.stat().st_mtime for file in path.glob("*.arrows") if file.exists()), default=None)
    is_written = bool(sessions) and is_writer_alive(path, sessions[-1], last_write=last_write)
    last = session_number(sessions[-1].file) if sessions else None
    tables = tuple(
        _check(number, table, segment, is_written=is_written and number == last)
        for table in (*TABLES, *sorted(segments.keys() - set(TABLES)))
        for number, segment in segments.get(table, {}).items()
    )
    damage = (*notes, *missing_rows(sessions, segments))
    lost = tuple(holes(sessions, segments.get(SAMPLES, {})))
    is_whole = not damage and not lost and not any(table.damage for table in tables)
    return Verification(path, is_whole, tables, damage, lost)


def missing_rows(sessions: Sequence[Session], segments: Mapping[str, Mapping[int, Segment]]) -> list[str]:
    """Sentences about sessions that were closed, and whose files are missing or end too early."""
    notes = []
    for session in sessions:
        number = session_number(session.file)
        promised: Mapping[str, int | None] = session.rows or {SAMPLES: None}
        for table, rows in promised.items() if session.ended else ():
            segment = None if number is None else segments.get(table, {}).get(number)
            name = session.file if table == SAMPLES else session.file.replace(SAMPLES, table, 1)
            if segment is None:
                notes.append(
                    f"{name} is missing" if rows is None else f"{name} is missing, with {counted(rows, 'row')}"
                )
            elif not segment.is_closed and not segment.notes:
                whole = "" if rows is None else f" of {rows:,}"
                notes.append(f"{name}: its end is missing, {segment.table.num_rows:,}{whole} rows read")
            elif rows is not None and rows != segment.table.num_rows and not segment.notes:
                notes.append(f"{name}: {segment.table.num_rows:,} rows read, and {rows:,} were written")
    return notes


def holes(sessions: Sequence[Session], samples: Mapping[int, Segment]) -> list[str]:
    """Sentences about steps between two sessions that were sampled and are not there.

    A session that resumed from a checkpoint knows the last step sampled before it. Where it does not (a record before
    format 1.2), a gap after a session that was not closed counts if it is wider than twice the spacing before it.
    """
    notes = []
    by_number = {session_number(session.file): session for session in sessions}
    line, is_ended = np.zeros(0, dtype=np.int64), True
    for number, segment in samples.items():
        steps = _steps(segment)
        session = by_number.get(number)
        if len(steps):
            resumed_at = None if session is None else session.resumed_at
            line = line[line < (steps[0] if resumed_at is None else min(steps[0], resumed_at))]
            last = int(line[-1]) if len(line) else -1
            lost = _last_lost(line, int(steps[0]), after=session.after if session else None, is_ended=is_ended)
            if lost > last:
                span = f"step {lost:,}" if lost == last + 1 else f"steps {last + 1:,} to {lost:,}"
                notes.append(f"{segment.name}: samples of {span}, before it, were not written")
            line = np.concatenate([line, steps])
        is_ended = session is None or session.ended is not None
    return notes


def _last_lost(line: NDArray[np.int64], first: int, *, after: int | None, is_ended: bool) -> int:
    """The last step before ``first`` whose samples may be missing; at most the last of ``line`` if none are."""
    if after is not None:
        return min(after, first - 1)
    recent = np.diff(line[-_RECENT:])
    is_gap = not is_ended and len(recent) > 0 and first - line[-1] > _WIDER * recent.max()
    return first - 1 if is_gap else -1


def _steps(segment: Segment) -> NDArray[np.int64]:
    """The sampled steps of a session in order, without those that it went back over."""
    steps = segment.table["step"].to_numpy()
    lowest = np.minimum.accumulate(steps[::-1])[::-1]
    return np.asarray(lowest[np.append(True, np.diff(lowest) > 0)]) if len(lowest) else lowest


def _check(number: int, table: str, segment: Segment, *, is_written: bool) -> TableCheck:
    rows = segment.table
    steps = rows["step"] if "step" in rows.column_names and rows.num_rows else None
    damage = segment.notes[:-1] if is_written and segment.is_torn else segment.notes
    return TableCheck(
        session=number,
        table=table,
        file=segment.name,
        rows=rows.num_rows,
        first_step=None if steps is None else steps[0].as_py(),
        last_step=None if steps is None else steps[-1].as_py(),
        checked=segment.is_checked,
        closed=segment.is_closed,
        damage=tuple(damage),
    )

"""Read a run directory, also while its writer is at work and after a kill.

`read_record` reads all of it, `RecordTail` what was appended since the last look. Opening a record reads its
description and the columns' names. The rows are verified against their checksums, and searched for steps that the run
went back over, when they are first used.
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError
from equilibria.findings import counted
from equilibria.records._files import check_outside_runs
from equilibria.records._manifest import RUN_FILE, Manifest, Session, find_manifest, notes_of_import
from equilibria.records._metrics import in_one_line
from equilibria.records._segment import (
    Segment,
    SegmentReader,
    all_segments,
    segment_name,
    segment_paths,
    session_number,
)
from equilibria.records._verification import Verification, holes, missing_rows, verify_run
from equilibria.records.tables import DIFFUSION, FORMAT, FORMAT_KEY, METRICS, SAMPLES, SHARPNESS, TABLES, TableName

_DEPTH = 4  # folders below the one that is searched for runs


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Record:
    """A run as it was on disk at the moment of reading; a column stays on disk until it is used.

    A record is one line of steps. Where a run went back, because a later session resumed from an earlier step or
    training was rolled back, the record leaves out the rows that were superseded, and `notes` says so. Steps therefore
    never decrease from row to row.

    Attributes:
        path: the run directory.
        id: 32 hexadecimal digits, the same for all sessions.
        metadata: from the writers; where two sessions have the same key, the later one's value.
        sessions: one per writer, in order.
    """

    path: Path
    id: str
    metadata: Mapping[str, Any]
    sessions: tuple[Session, ...]
    _rows: _Rows

    def __repr__(self) -> str:
        steps = self.samples(["step"])["step"]
        parts = [counted(len(self.params), "parameter")]
        if len(steps):
            parts.append(f"steps {steps[0].as_py():,} to {steps[-1].as_py():,}")  # they never decrease
        queries = self.sharpness().num_rows
        parts += [f"{queries:,} sharpness {'query' if queries == 1 else 'queries'}"] if queries else []
        parts += [counted(len(steps), "sample"), *([counted(len(self.notes), "note")] if self.notes else [])]
        return f"<{type(self).__name__} {self.path}: {', '.join(parts)}>"

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about rows that are missing and why; empty if the record is complete.

        Those of an imported run begin with where it comes from, and what that source cannot tell.
        """
        return self._rows.notes

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns: those of the sample table, then any that a later version has added."""
        return tuple(self._rows.samples.table.column_names)

    @property
    def params(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of their first samples."""
        return tuple(self.samples(["param"])["param"].unique().to_pylist())

    def samples(self, columns: Sequence[str] | None = None, params: Sequence[str] | None = None) -> pa.Table:
        """The sample table, or part of it; reads only the requested columns from disk.

        Args:
            columns: names, in the order wanted; None for all.
            params: names of parameters; None for all.

        Raises:
            EquilibriaError: if this run has no column or parameter of that name.
        """
        names = self.columns if columns is None else _known_names("column", columns, self.columns)
        rows, kept = self._rows.samples.table, self._rows.samples.kept
        table = rows.select(names)
        if params is not None:
            every_param = rows["param"].unique().to_pylist()  # also those of rows that were superseded
            wanted = pa.array(_known_names("param", params, every_param), pa.string())
            chosen = pc.is_in(rows["param"].cast(pa.string()), value_set=wanted).to_numpy()
            kept = chosen if kept is None else kept & chosen
        if kept is not None:
            table = table.filter(pa.array(kept))
        return table.unify_dictionaries()

    def sharpness(self) -> pa.Table:
        """The measurements of an `equilibria.SharpnessTracker`, one row per query; empty if there was none."""
        rows = self._rows.sharpness
        return rows.table if rows.kept is None else rows.table.filter(pa.array(rows.kept))

    def metrics(self) -> pa.Table:
        """The numbers that the training logged with ``monitor.log``, sorted by step; empty if it logged none.

        Returns:
            Columns ``step``, ``name`` and ``value``.
        """
        return self._rows.metrics

    def diffusion(self) -> pa.Table:
        """How far weights turned over 1, 2, 4, ..., 1,024 steps; empty if the run was recorded before format 1.4.

        Returns:
            Columns ``step``, ``param``, ``distance`` and ``turned`` = -ln cos of the angle between the weight before
            ``step`` and the weight ``distance`` steps later, null from a right angle on.
        """
        return self._rows.diffusion

    def verify(self) -> Verification:
        """What is whole: rows, steps, damage and holes of every session and table, as of the moment of reading."""
        return verify_run(self.path, self.sessions, self._rows.segments, self._rows.file_notes)

    def to_parquet(self, path: str | Path) -> None:
        """Write the samples to a Parquet file outside the run, units included."""
        parquet = importlib.import_module("pyarrow.parquet")
        _export(path, lambda: parquet.write_table(self.samples(), str(path)))

    def to_csv(self, path: str | Path) -> None:
        """Write the samples to a CSV file outside the run; not measured is empty, not a number is ``nan``."""
        csv = importlib.import_module("pyarrow.csv")
        _export(path, lambda: csv.write_csv(without_dictionaries(self.samples()), str(path)))

    def to_pandas(self) -> Any:
        """The samples as a pandas DataFrame, text as categories.

        Raises:
            EquilibriaError: if pandas is not installed.
        """
        try:
            importlib.import_module("pandas")
        except ImportError:
            raise EquilibriaError("to_pandas() needs pandas: pip install pandas") from None
        return self.samples().to_pandas()


def runs_below(root: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Folders with a run, by name, also one that has lost its run file; looks neither inside a run nor behind links."""
    # False in a folder without permission; Path.exists raises
    if any(os.path.exists(root / name) for name in (RUN_FILE, segment_name(0))):  # noqa: PTH110
        yield root
    elif depth:
        try:
            inside = sorted(entry.path for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))
        except OSError:
            return
        for path in inside:
            if not Path(path).name.startswith("."):
                yield from runs_below(Path(path), depth - 1)


def read_record(path: str | Path) -> Record:
    """Read a run directory; whatever cannot be read becomes a sentence in `Record.notes`.

    Args:
        path: the directory of a `RecordWriter`, which may still be at work.

    Raises:
        EquilibriaError: if there is no run at ``path``, or a newer version of equilibria wrote it.
    """
    if not isinstance(path, str | os.PathLike):
        raise EquilibriaError(f"got path={path!r}; expected the directory of a run", argument="path")
    directory = Path(path)
    try:
        manifest = find_manifest(directory)
        if manifest is None:
            raise EquilibriaError(_not_a_run(directory), argument="path")
        rows = _Rows(directory, manifest)
    except (OSError, ValueError) as error:  # ValueError: a zero in the path
        if isinstance(error, EquilibriaError):
            raise
        raise EquilibriaError(
            f"cannot read {directory}: {getattr(error, 'strerror', None) or error}", argument="path"
        ) from error
    return Record(path=directory, id=manifest.id, metadata=manifest.metadata, sessions=manifest.sessions, _rows=rows)


class _Rows:
    """The rows of a run, as they were on disk when this object was made; read when they are first used."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._sessions = manifest.sessions
        self._of_import = notes_of_import(manifest.metadata)
        self.segments: dict[str, dict[int, Segment]] = {
            table: {number: Segment(path, table=table if table in TABLES else None) for number, path in paths.items()}
            for table, paths in all_segments(directory).items()
        }
        foreign = _remove_foreign(self.segments, manifest.id)
        self.file_notes = [*([manifest.note] if manifest.note else []), *foreign]
        for table in TABLES:  # raises if the sessions disagree
            _concatenated([segment.schema.empty_table() for segment in self._of(table)], table)

    @cached_property
    def samples(self) -> _TableRows:
        return _TableRows(self.segments.get(SAMPLES, {}), SAMPLES, self._resumed_at)

    @cached_property
    def sharpness(self) -> _TableRows:
        return _TableRows(self.segments.get(SHARPNESS, {}), SHARPNESS, self._resumed_at)

    @cached_property
    def metrics(self) -> pa.Table:
        return in_one_line(*self._with_sessions(METRICS), resumed=self._resumed)

    @cached_property
    def diffusion(self) -> pa.Table:
        return compared_in_one_line(*self._with_sessions(DIFFUSION), resumed=self._resumed)

    def _with_sessions(self, table: TableName) -> tuple[pa.Table, NDArray[np.int64]]:
        """All rows of a table, and the session of each."""
        segments = self.segments.get(table, {})
        counts = [segment.table.num_rows for segment in segments.values()]
        sessions = np.repeat(np.array(list(segments), dtype=np.int64), counts)
        return _concatenated([segment.table for segment in segments.values()], table), sessions

    @property
    def _resumed(self) -> dict[int, int]:
        """By session, its first step: that of the checkpoint, or the first sampled one."""
        sampled = {
            number: int(segment.table["step"].to_numpy().min())
            for number, segment in self.segments.get(SAMPLES, {}).items()
            if segment.table.num_rows
        }
        return sampled | {number: min(step, sampled.get(number, step)) for number, step in self._resumed_at.items()}

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Sentences about rows that are missing and why."""
        known = [segment for table in TABLES for segment in self._of(table)]
        return (
            *self._of_import,
            *self.file_notes,
            *(note for segment in known for note in segment.notes),
            *missing_rows(self._sessions, self.segments),
            *holes(self._sessions, self.segments.get(SAMPLES, {})),
            *self.samples.superseded,
            *self.sharpness.superseded,
        )

    @property
    def _resumed_at(self) -> dict[int, int]:
        """By session that resumed from a checkpoint, its first step."""
        begun = {session_number(session.file): session.resumed_at for session in self._sessions}
        return {number: step for number, step in begun.items() if number is not None and step is not None}

    def _of(self, table: TableName) -> list[Segment]:
        return list(self.segments.get(table, {}).values())


def _remove_foreign(segments: dict[str, dict[int, Segment]], run_id: str) -> list[str]:
    """Take out the segments that say they are of another run, as copied files do; a note for each."""
    notes = []
    for of_table in segments.values():
        for number, segment in list(of_table.items()):
            if note := segment.foreign_note(run_id):
                del of_table[number]
                notes.append(note)
    return notes


class _TableRows:
    """The rows of one table, in one line of steps.

    Attributes:
        table: all of them.
        kept: which of them no later row supersedes; None for all.
        superseded: a note for each session that has others.
    """

    def __init__(self, segments: Mapping[int, Segment], name: TableName, resumed_at: Mapping[int, int]) -> None:
        self.table = _concatenated([segment.table for segment in segments.values()], name)
        self.kept, self.superseded = _one_line_of_steps(segments, resumed_at)


def without_dictionaries(table: pa.Table) -> pa.Table:
    """The same table with text as plain strings."""
    fields = [
        column.with_type(column.type.value_type) if pa.types.is_dictionary(column.type) else column
        for column in table.schema
    ]
    return table.cast(pa.schema(fields, metadata=table.schema.metadata))


def _concatenated(tables: Sequence[pa.Table], name: TableName) -> pa.Table:
    """All rows. The empty table first: it fixes the order, and columns an older version did not write become null."""
    plain = [table.replace_schema_metadata({FORMAT_KEY: FORMAT}) for table in tables]
    try:
        return pa.concat_tables([TABLES[name].empty_table(), *plain], promote_options="default")
    except pa.ArrowException as error:
        raise EquilibriaError(f"the sessions of this run disagree about a column: {error}") from None


def _one_line_of_steps(
    segments: Mapping[int, Segment], resumed_at: Mapping[int, int]
) -> tuple[NDArray[np.bool_] | None, list[str]]:
    """Which rows no later row supersedes (None for all), and a note for each session that has others."""
    masks: list[NDArray[np.bool_]] = []
    notes: list[str] = []
    later: list[int] = []  # the lowest step of each later session
    for number, segment in reversed(list(segments.items())):
        steps = segment.table["step"].to_numpy()
        kept = not_superseded(steps)
        if later:
            kept &= steps < min(later)
        if not kept.all():
            back_to = min([*later, *steps[1:][steps[1:] < steps[:-1]].tolist()])
            count = np.count_nonzero(~kept)
            notes.append(f"{segment.name}: {count:,} rows left out, the run went back to step {back_to:,} after them")
        masks.append(kept)
        later += [int(steps.min())] if steps.size else []
        later += [resumed_at[number]] if number in resumed_at else []
    return (np.concatenate(masks[::-1]) if notes else None), notes[::-1]


def not_superseded(steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows of a session no later row of it goes back over.

    Example:
        >>> not_superseded(np.array([0, 10, 20, 15, 25])).tolist()
        [True, True, False, True, True]
    """
    return np.asarray(steps == np.minimum.accumulate(steps[::-1])[::-1])


def compared_in_one_line(table: pa.Table, sessions: NDArray[np.int64], *, resumed: Mapping[int, int]) -> pa.Table:
    """The rows of a diffusion table whose comparison no later one supersedes.

    A run that goes back to a step makes the comparisons from there on again: of each parameter those rows stay that no
    later row of it, and no later session, comes before. Of one step shorter distances come first.

    Args:
        table: a diffusion table.
        sessions: of every row, in ascending order.
        resumed: by session, its first sampled step.
    """
    distance = table["distance"].to_numpy()
    made = table["step"].to_numpy() + distance  # the step before which weights were compared
    kept = np.ones(len(made), dtype=bool)
    for session, first in resumed.items():
        kept &= (sessions >= session) | (made < first)
    codes = np.asarray(table["param"].unify_dictionaries().combine_chunks().indices.to_numpy())
    place = made * (np.max(distance, initial=0) + 1) + distance
    order = np.argsort(codes, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(codes[order]) != 0, True)) + 1
    for begin, end in zip([0, *ends[:-1]], ends, strict=True) if len(order) else ():
        rows = order[begin:end]
        later = np.minimum.accumulate(np.append(place[rows][1:], np.iinfo(np.int64).max)[::-1])[::-1]
        kept[rows] &= place[rows] < later
    return table.filter(pa.array(kept)).unify_dictionaries()


def _known_names(what: str, names: Sequence[str], known: Sequence[str]) -> list[str]:
    wanted = [names] if isinstance(names, str) else list(names)
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3) or list(known[:3])
            has = f"{len(known)}, such as: {', '.join(near)}" if known else "none yet"
            raise EquilibriaError(f"got {what} {name!r}; this run has {has}")
    return wanted


def _export(path: str | Path, write: Callable[[], object]) -> None:
    check_outside_runs(Path(path))
    try:
        write()
    except OSError as error:
        raise EquilibriaError(f"cannot write {path}: {error.strerror or error}", argument="path") from error


def _not_a_run(directory: Path) -> str:
    if not directory.exists():
        return f"there is no directory {directory}"
    if not directory.is_dir():
        return f"{directory} is a file; expected a run directory"
    runs = sorted(path.parent.name for path in directory.glob(f"*/{RUN_FILE}"))
    hint = f"; it holds the runs {', '.join(runs[:5])}" if runs else ""
    return f"{directory} is not a run: it has no {RUN_FILE}{hint}"


# ---- a run that grows


@dataclass(frozen=True, slots=True, eq=False)
class AppendedBatch:
    """Rows that were appended to a table of a run, and the number of their session."""

    table: TableName
    session: int
    batch: pa.RecordBatch


class RecordTail:
    """Reads what was appended to a run directory since the last look, and no row twice."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._readers: dict[tuple[str, int], SegmentReader] = {}
        self._foreign: dict[tuple[str, int], str] = {}
        self._run_id: str | None = None

    @property
    def foreign(self) -> tuple[str, ...]:
        """Sentences about segments of other runs, which are left out."""
        return tuple(self._foreign.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about rows left out: those of other runs, and bytes that cannot be read.

        A living writer may be about to complete the last batch.
        """
        own = (reader for key, reader in self._readers.items() if key not in self._foreign)
        return (*self.foreign, *(note for reader in own for note in reader.notes))

    def read(self) -> Iterator[AppendedBatch]:
        """The appended batches, session by session; raises as `SegmentReader.read` and `find_manifest` do."""
        if self._run_id is None:
            manifest = find_manifest(self._directory)
            if manifest is None:
                return
            self._run_id = manifest.id
        for table in TABLES:
            for session, path in segment_paths(self._directory, table=table).items():
                key = table, session
                if key in self._foreign:
                    continue
                reader = self._readers.setdefault(key, SegmentReader(path, table=table))
                for batch in reader.read():
                    if reader.foreign_note(self._run_id):
                        break
                    yield AppendedBatch(table, session, batch)
                if note := reader.foreign_note(self._run_id):
                    self._foreign[key] = note

    def last_write(self) -> float | None:
        """When a sample was last written, in seconds since 1970; None if none was yet."""
        files = [path for table in TABLES for path in segment_paths(self._directory, table=table).values()]
        return max((path.stat().st_mtime for path in files), default=None)

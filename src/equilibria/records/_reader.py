"""Read a run directory, also while it is being written and after its writer was killed."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError
from equilibria.findings import counted
from equilibria.records._manifest import RUN_FILE, Session, read_manifest
from equilibria.records._segment import Segment, read_segment, segment_paths
from equilibria.records.tables import SAMPLES, SHARPNESS, TABLES


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Run:
    """A run as it was on disk at the moment of reading; the samples stay there until they are asked for.

    A run is one line of steps. Where it goes back, because a later session resumed from an earlier step or because
    training was rolled back, the rows it goes back over are left out and `notes` says so. Steps therefore never
    decrease from row to row.

    Attributes:
        path: the run directory.
        id: 32 hexadecimal digits, the same for all sessions.
        metadata: what the writers were given; of two sessions that give the same key, the later.
        sessions: one per writer, in order.
        notes: what a reader should know, as sentences; empty if all is well.
    """

    path: Path
    id: str
    metadata: Mapping[str, Any]
    sessions: tuple[Session, ...]
    notes: tuple[str, ...]
    _table: pa.Table
    _kept: NDArray[np.bool_] | None
    _sharpness: pa.Table

    def __repr__(self) -> str:
        steps, known = self.samples(["step"])["step"], len(self.params)
        parts = [counted(known, "parameter")]
        if len(steps):
            parts.append(f"steps {steps[0].as_py():,} to {steps[-1].as_py():,}")  # they never decrease
        queries = self._sharpness.num_rows
        parts += [f"{queries:,} sharpness {'query' if queries == 1 else 'queries'}"] if queries else []
        parts += [counted(len(steps), "sample"), *([counted(len(self.notes), "note")] if self.notes else [])]
        return f"<{type(self).__name__} {self.path}: {', '.join(parts)}>"

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns: the sample table's, then any that this version does not know."""
        return tuple(self._table.column_names)

    @property
    def params(self) -> tuple[str, ...]:
        """The names of the parameters, in the order in which they first appear."""
        return tuple(self.samples(["param"])["param"].unique().to_pylist())

    def samples(self, columns: Sequence[str] | None = None, params: Sequence[str] | None = None) -> pa.Table:
        """The sample table, or part of it; only the asked columns are read from disk.

        Args:
            columns: names, in the order wanted; None for all.
            params: names of parameters; None for all.

        Raises:
            EquilibriaError: if a name is not in this run.
        """
        names = self.columns if columns is None else _asked("column", columns, self.columns)
        table = self._table.select(names)
        kept = self._kept
        if params is not None:
            asked = pa.array(_asked("param", params, self._all_params()), pa.string())
            wanted = pc.is_in(self._table["param"].cast(pa.string()), value_set=asked).to_numpy()
            kept = wanted if kept is None else kept & wanted
        if kept is not None:
            table = table.filter(pa.array(kept))
        return table.unify_dictionaries()

    def sharpness(self) -> pa.Table:
        """What a `equilibria.SharpnessTracker` measured, one row per query; empty if there was none."""
        return self._sharpness

    def to_parquet(self, path: str | Path) -> None:
        """Write the samples as a Parquet file, units included."""
        parquet = importlib.import_module("pyarrow.parquet")
        _export(path, lambda: parquet.write_table(self.samples(), str(path)))

    def to_csv(self, path: str | Path) -> None:
        """Write the samples as a CSV file with a header; not measured is empty, not a number is ``nan``."""
        csv = importlib.import_module("pyarrow.csv")
        _export(path, lambda: csv.write_csv(without_dictionaries(self.samples()), str(path)))

    def to_pandas(self) -> Any:
        """The samples as a pandas DataFrame, words as categories.

        Raises:
            EquilibriaError: if pandas is not installed.
        """
        try:
            importlib.import_module("pandas")
        except ImportError:
            raise EquilibriaError("to_pandas() needs pandas: pip install pandas") from None
        return self.samples().to_pandas()

    def _all_params(self) -> list[str]:
        names: list[str] = self._table["param"].unique().to_pylist()
        return names


def read_run(path: str | Path) -> Run:
    """A run directory, with what is wrong with it in `Run.notes`.

    Args:
        path: the directory that a `RunWriter` was given. It may be writing still.

    Raises:
        EquilibriaError: if there is no run at ``path``, or a newer version of equilibria wrote it.
    """
    if not isinstance(path, str | os.PathLike):
        raise EquilibriaError(f"got path={path!r}; expected the directory of a run")
    directory = Path(path)
    try:
        manifest = read_manifest(directory)
        if manifest is None:
            raise EquilibriaError(_not_a_run(directory))
        segments, queries = (_segments(directory, table) for table in (SAMPLES, SHARPNESS))
    except OSError as error:
        raise EquilibriaError(f"cannot read {directory}: {error.strerror or error}") from error
    kept, superseded = _one_line_of_steps(segments)
    kept_queries, superseded_queries = _one_line_of_steps(queries)
    sharpness = _together(queries, SHARPNESS)
    return Run(
        path=directory,
        id=manifest.id,
        metadata={key: value for session in manifest.sessions for key, value in session.metadata.items()},
        sessions=manifest.sessions,
        notes=(*_notes([*segments, *queries]), *superseded, *superseded_queries),
        _table=_together(segments, SAMPLES),
        _kept=kept,
        _sharpness=sharpness if kept_queries is None else sharpness.filter(pa.array(kept_queries)),
    )


def without_dictionaries(table: pa.Table) -> pa.Table:
    """The same table with words as plain strings."""
    fields = [
        column.with_type(column.type.value_type) if pa.types.is_dictionary(column.type) else column
        for column in table.schema
    ]
    return table.cast(pa.schema(fields, metadata=table.schema.metadata))


def _segments(directory: Path, table: str) -> list[Segment]:
    return [read_segment(file, table=table) for file in segment_paths(directory, table=table).values()]


def _notes(segments: Iterable[Segment]) -> list[str]:
    return [segment.note for segment in segments if segment.note]


def _together(segments: Iterable[Segment], name: str) -> pa.Table:
    """All rows. The empty table first: it fixes the order, and columns an older version did not write become null."""
    tables = [TABLES[name].empty_table(), *(segment.table for segment in segments)]
    try:
        return pa.concat_tables(tables, promote_options="default")
    except pa.ArrowException as error:
        raise EquilibriaError(f"the sessions of this run disagree about a column: {error}") from None


def _one_line_of_steps(segments: Sequence[Segment]) -> tuple[NDArray[np.bool_] | None, list[str]]:
    """Which rows no later row goes back over (None for all), and a note for each session that has others."""
    masks: list[NDArray[np.bool_]] = []
    notes: list[str] = []
    after: list[int] = []  # the lowest step of each later session
    for segment in reversed(segments):
        steps = segment.table["step"].to_numpy()
        lowest_to_come = np.minimum.accumulate(steps[::-1])[::-1]
        kept = steps == lowest_to_come
        if after:
            kept &= steps < min(after)
        if not kept.all():
            back_to = min([*after, *steps[1:][steps[1:] < steps[:-1]].tolist()])
            count = np.count_nonzero(~kept)
            notes.append(f"{segment.name}: {count:,} rows left out, the run went back to step {back_to:,} after them")
        masks.append(kept)
        after += [int(steps.min())] if steps.size else []
    return (np.concatenate(masks[::-1]) if notes else None), notes[::-1]


def _asked(what: str, names: Sequence[str], known: Sequence[str]) -> list[str]:
    asked = [names] if isinstance(names, str) else list(names)
    for name in asked:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3) or list(known[:3])
            has = f"{len(known)}, such as: {', '.join(near)}" if known else "none yet"
            raise EquilibriaError(f"got {what} {name!r}; this run has {has}")
    return asked


def _export(path: str | Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise EquilibriaError(f"cannot write {path}: {error.strerror or error}") from error


def _not_a_run(directory: Path) -> str:
    if not directory.exists():
        return f"there is no directory {directory}"
    if not directory.is_dir():
        return f"{directory} is a file; expected a run directory"
    inside = sorted(path.parent.name for path in directory.glob(f"*/{RUN_FILE}"))
    found = f"; it holds the runs {', '.join(inside[:5])}" if inside else ""
    return f"{directory} is not a run: it has no {RUN_FILE}{found}"

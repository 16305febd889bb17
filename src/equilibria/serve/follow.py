"""One run, followed while it grows: reads each sample once, keeps a bounded part, makes one page for all viewers."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from html import unescape
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np
import pyarrow as pa

from equilibria.diagnosis import diagnose
from equilibria.diagnosis.sharpness import sharpness_findings
from equilibria.errors import EquilibriaError
from equilibria.findings import Finding, counted
from equilibria.records._lock import is_writer_alive
from equilibria.records._manifest import RUN_FILE, Manifest, find_manifest, notes_of_import
from equilibria.records._metrics import KeptMetrics
from equilibria.records._reader import RecordTail, compared_in_one_line, not_superseded
from equilibria.records._segment import segment_paths, session_number
from equilibria.records._thinning import ThinnedSamples
from equilibria.records.tables import DIFFUSION, METRICS, SHARPNESS, TABLES
from equilibria.views.run.page import report_page
from equilibria.views.words import sentence_case

TRAINING, FINISHED, INTERRUPTED = "training now", "finished", "interrupted"
DAMAGED, DELETED = "damaged", "deleted"
UNREADABLE = (DAMAGED, DELETED)
_ROWS_AT_ONCE = 50_000
_STRETCHES = 150  # of a line: the page draws it again every few seconds, also on a phone
_MOST_QUERIES = 50_000  # of a sharpness tracker; each of them took several passes over the network
_MOST_COMPARISONS = 200_000  # rows of the diffusion table
_SHARE, _LEAST_SECONDS = 0.1, 1.0  # the part of one core that new views of a run may take; seconds between two views


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of a run in the list of runs.

    Attributes:
        state: training now, finished, interrupted (no recorded end, and its process is gone), damaged or deleted.
        steps: last sampled step + 1, None before the first sample.
        samples: recorded rows.
        updated: when it was last written, in seconds since 1970; None if it never was.
        message: why it cannot be read, "" if it can.
    """

    state: str
    steps: int | None = None
    samples: int = 0
    updated: float | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class RunView:
    """The page of a run at one moment.

    Attributes:
        number: grows with every view of the run.
        payload: JSON for the page's script: the inside of the page and the data of its charts.
        headline: one sentence.
        worst: the most serious finding, None without any.
    """

    number: int
    payload: bytes
    headline: str
    worst: Finding | None


@dataclass(frozen=True, slots=True, eq=False)
class RunSnapshot:
    """The samples of a run at one moment, in the form that `equilibria.forecasting` takes.

    Attributes:
        name: of the run.
        metadata: of the run.
        table: the kept samples.
        logged: the kept numbers that the training logged.
    """

    name: str
    metadata: Mapping[str, Any]
    table: pa.Table
    logged: pa.Table

    def samples(self) -> pa.Table:
        """The sample table."""
        return self.table

    def metrics(self) -> pa.Table:
        """The metrics table."""
        return self.logged


class FollowedRun:
    """A run directory, its state and its page; call all methods from one thread.

    `look` checks the files, `read` takes in what was appended, `show` makes the page.

    Attributes:
        name: as the pages show it.
        status: as of the last `look` or `read`.
        view: the last page; None before the first, and after `forget`.
        headline: of the last page, also after `forget`.
        worst: the most serious finding of the last page.
        version: grows whenever something that the page shows has changed.
    """

    def __init__(self, directory: Path, *, name: str) -> None:
        self.name = name
        self._directory = directory
        self.status = RunStatus(INTERRUPTED)
        self.view: RunView | None = None
        self.headline: str | None = None
        self.worst: Finding | None = None
        self.version = 0
        self._shown_version = -1
        self._next_view = 0.0
        self._views = 0
        self._manifest: Manifest | None = None
        self._manifest_stat: tuple[int, int] | None = None
        self.forget()

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Of all sessions; where two have the same key, the later one's value."""
        return self._manifest.metadata if self._manifest else {}

    @property
    def is_loaded(self) -> bool:
        """Whether its samples are in memory."""
        return self._loaded

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of its layers."""
        return self._samples.layers

    def chart_table(self) -> pa.Table:
        """The kept samples, for charts."""
        return self._samples.chart_table()

    def metrics(self) -> pa.Table:
        """The numbers that the training logged, sorted by step; beyond a million, part of them."""
        return self._metrics.table(resumed=self._resumed())

    def _diffusion(self) -> pa.Table:
        sessions = np.repeat([session for session, _ in self._compared], [len(batch) for _, batch in self._compared])
        batches = pa.Table.from_batches([batch for _, batch in self._compared], TABLES[DIFFUSION].remove_metadata())
        return compared_in_one_line(batches, sessions.astype(np.int64), resumed=self._resumed())

    def _resumed(self) -> dict[int, int]:
        """By session that went back, the step that it went back to."""
        resumed: dict[int, int] = {}
        for back in self._samples.rollbacks:
            resumed[back.session] = min(back.step, resumed.get(back.session, back.step))
        return resumed

    def snapshot(self) -> RunSnapshot:
        """Samples and metadata of this moment, for another thread."""
        if self.status.state in UNREADABLE:
            raise EquilibriaError(self.status.message)
        return RunSnapshot(self.name, self.metadata, self._samples.table(), self.metrics())

    def forget(self) -> None:
        """Free the memory of the samples and the page; the entry in the list of runs stays."""
        self._loaded = False
        self._tail = RecordTail(self._directory)
        self._samples = ThinnedSamples()
        self._metrics = KeptMetrics()
        self._queries: list[pa.RecordBatch] = []
        self._compared: list[tuple[int, pa.RecordBatch]] = []  # of the diffusion table, with their sessions
        self._failure = ""
        self._reading_seconds = 0.0  # since the last view
        self.view = None
        self._shown_version = -1

    def look(self) -> bool:
        """Check the times of the files and the writer, without reading samples; whether the status has changed."""
        before = self.status
        try:
            self._read_manifest()
            status = self._current_status()
            if self._failure:
                status = replace(status, state=DAMAGED, message=self._failure)
        except FileNotFoundError:
            status = replace(before, state=DELETED, message="Its folder is gone")
        except Exception as error:  # any folder that no writer made: the other runs stay unaffected
            status = replace(before, state=DAMAGED, message=self._sentence(error))
        self.status = status
        if (status.state, status.updated, status.message) == (before.state, before.updated, before.message):
            return False
        self.version += 1
        return True

    def fail(self, error: Exception) -> bool:
        """Mark the run as damaged from now on; whether it was not before."""
        before, self._failure = self._failure, self._sentence(error)
        self.status = replace(self.status, state=DAMAGED, message=self._failure)
        self.version += before != self._failure
        return before != self._failure

    def read(self) -> None:
        """Read the samples that were appended since the last call."""
        rows, numbers = self._samples.counts.rows, self._metrics.count
        began = time.monotonic()
        if not self._failure and self.status.state != DELETED:
            try:
                self._take_appended()
            except Exception as error:  # any damage of a file: the other runs stay unaffected
                self.fail(error)
        counts, steps = self._samples.counts, self._steps_taken()
        state, message = (DAMAGED, self._failure) if self._failure else (self.status.state, self.status.message)
        self.status = RunStatus(state, steps, counts.rows, self.status.updated, message)
        self.version += (counts.rows, self._metrics.count) != (rows, numbers)
        self._loaded = True
        self._reading_seconds += time.monotonic() - began

    def is_due(self) -> bool:
        """Whether the page is out of date and a new one fits the time budget, a tenth of a core."""
        return self.version != self._shown_version and time.monotonic() >= self._next_view

    def show(self) -> RunView:
        """The page as of now; computed only if something has changed."""
        if self.view is None or self.version != self._shown_version:
            began = time.monotonic()
            version = self.version
            self._views += 1
            try:
                self.view = self._make_view(self._views)
            except Exception as error:  # a defect must not cost the other runs their pages
                message = f"Cannot be shown: {self._sentence(error)}"
                self.view = _encode_view(self._views, {"damaged": message}, message, None)
            self.headline, self.worst = self.view.headline, self.view.worst
            self._shown_version = version
            now = time.monotonic()
            spent, self._reading_seconds = now - began + self._reading_seconds, 0.0
            self._next_view = now + max(_LEAST_SECONDS, spent / _SHARE)
        return self.view

    # ---- reading

    def _read_manifest(self) -> None:
        """Read ``run.json`` if it has changed; from the segments if it is damaged or lost."""
        try:
            stat = (self._directory / RUN_FILE).stat()
            if not S_ISREG(stat.st_mode):  # opening a pipe would block
                raise EquilibriaError(f"{RUN_FILE} is not a file")
            state = stat.st_mtime_ns, stat.st_size
        except FileNotFoundError:
            segments = segment_paths(self._directory)
            if not segments:
                raise
            state = -1, len(segments)
        if state == self._manifest_stat:
            return
        before, self._manifest = self._manifest, find_manifest(self._directory)
        self._manifest_stat = state
        if before and self._manifest and before.id != self._manifest.id:  # another run in the same place
            self.forget()

    def _current_status(self) -> RunStatus:
        updated = self._tail.last_write()
        session = self._manifest.sessions[-1] if self._manifest and self._manifest.sessions else None
        if session is None or session.ended is not None:
            state = FINISHED
        else:
            state = TRAINING if is_writer_alive(self._directory, session, last_write=updated) else INTERRUPTED
        note = self._manifest.note if self._manifest else ""
        return RunStatus(state, self.status.steps, self.status.samples, updated, note)

    def _sentence(self, error: Exception) -> str:
        """An error as a sentence, without the path of the run, which is not for viewers."""
        if isinstance(error, OSError) and error.strerror:
            return f"Cannot be read: {error.strerror}"
        return sentence_case(str(error).replace(f"{self._directory}{os.sep}", ""))

    def _take_appended(self) -> None:
        self._take_batches()
        if not self._samples.is_exact:  # again from the start, now that the superseded rows are known
            self._tail, self._queries, self._metrics = RecordTail(self._directory), [], KeptMetrics()
            self._compared = []
            self._samples = ThinnedSamples(rollbacks=self._samples.rollbacks)
            self._take_batches()

    def _take_batches(self) -> None:
        for begun in self._manifest.sessions if self._manifest else ():
            number = session_number(begun.file)
            if number is not None and begun.resumed_at is not None:
                self._samples.resume(number, begun.resumed_at)
        batches: list[pa.RecordBatch] = []
        session = rows = 0
        for appended in self._tail.read():
            if appended.table == SHARPNESS:
                self._take_query(appended.batch)
                continue
            if appended.table == METRICS:
                self._metrics.add_batch(appended.batch, session=appended.session)
                continue
            if appended.table == DIFFUSION:
                self._take_comparisons(appended.session, appended.batch)
                continue
            if batches and (rows >= _ROWS_AT_ONCE or appended.session != session):
                self._samples.add(batches, session=session)
                batches, rows = [], 0
            session = appended.session
            batches.append(appended.batch)
            rows += appended.batch.num_rows
        if batches:
            self._samples.add(batches, session=session)

    def _take_query(self, batch: pa.RecordBatch) -> None:
        self._queries.append(batch)
        if sum(queries.num_rows for queries in self._queries) > 2 * _MOST_QUERIES:
            self._queries = self._sharpness().combine_chunks().to_batches()

    def _take_comparisons(self, session: int, batch: pa.RecordBatch) -> None:
        self._compared.append((session, batch.replace_schema_metadata(None)))
        rows = sum(len(batch) for _, batch in self._compared)
        while rows > _MOST_COMPARISONS and len(self._compared) > 1:
            rows -= len(self._compared.pop(0)[1])

    def _sharpness(self) -> pa.Table:
        empty = TABLES[SHARPNESS].empty_table()
        table = pa.Table.from_batches(self._queries).unify_dictionaries() if self._queries else empty
        table = pa.concat_tables([empty, table], promote_options="default")
        return table.filter(pa.array(not_superseded(table["step"].to_numpy())))[-_MOST_QUERIES:]

    def _steps_taken(self) -> int | None:
        """Steps recorded at the end of the run, which come after the last sample; until then, sampled steps."""
        last, recorded = self._samples.counts.last_step, self.metadata.get("steps")
        if last is None:
            return None
        return max(last + 1, recorded) if isinstance(recorded, int) and self.status.state != TRAINING else last + 1

    # ---- the page

    def _make_view(self, number: int) -> RunView:
        if self.status.state in UNREADABLE:
            return _encode_view(number, {"damaged": self.status.message}, self.status.message, None)
        samples, sharpness, counts = self._samples.table(), self._sharpness(), self._samples.counts
        metadata = {**self.metadata, "steps": self._steps_taken() or 0}
        metrics = self.metrics()
        findings = diagnose(samples, metadata=metadata, metrics=metrics)
        about_sharpness = sharpness_findings(sharpness, metadata=metadata) if sharpness.num_rows else ()
        page = report_page(
            samples,
            metadata=metadata,
            title=self.name,
            notes=self._notes(),
            findings=(*findings, *about_sharpness),
            sharpness=sharpness if sharpness.num_rows else None,
            metrics=metrics,
            diffusion=self._diffusion(),
            drawn=self.chart_table(),
            sampled=(counts.steps, counts.rows),
            stretches=_STRETCHES,
        )
        content = {"inside": page.inside(), "data": page.data}
        return _encode_view(number, content, unescape(page.parts["headline"]), next(iter(findings), None))

    def _notes(self) -> list[str]:
        """Sentences about the record, and about samples that are not in memory."""
        samples, counts = self._samples, self._samples.counts
        notes = [*notes_of_import(self.metadata)]
        notes += self._tail.foreign if self.status.state == TRAINING else self._tail.notes
        notes += [self._manifest.note] if self._manifest and self._manifest.note else []
        went_back = Counter(rollback.step for rollback in samples.rollbacks)
        notes += [
            f"the run went back to step {step:,}{_times(count)}; the samples that this superseded are left out"
            for step, count in list(went_back.items())[-3:]
        ]
        if samples.stride > 1:
            notes.append(
                f"a long run: findings, table and the lines of norms and predictions use every "
                f"{_ordinal(samples.stride)} sample of a layer; the angles in the charts use all {counts.rows:,} "
                "(equilibria report uses all of them for everything)"
            )
            for note, (count, last) in counts.notes.items():
                notes.append(
                    f"{counted(count, 'sample')} in all {'is' if count == 1 else 'are'} marked “{note}”, the last "
                    f"at step {last:,}"
                )
        return notes


def _encode_view(number: int, content: Mapping[str, object], headline: str, worst: Finding | None) -> RunView:
    payload = json.dumps({"view": number, **content}, allow_nan=False, separators=(",", ":")).encode()
    return RunView(number, payload, headline, worst)


def _times(count: int) -> str:
    return "" if count == 1 else f", {count:,} times"


def _ordinal(number: int) -> str:
    """Of powers of two."""
    return f"{number}nd" if number % 10 == 2 and number % 100 != 12 else f"{number}th"

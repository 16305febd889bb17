"""One run, followed while it grows: read once, kept bounded, shown to everyone from one computation."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
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
from equilibria.records._lock import LOCK_FILE, Holder
from equilibria.records._manifest import RUN_FILE, Manifest, Session, read_manifest
from equilibria.records.tables import SHARPNESS, TABLES
from equilibria.serve import process
from equilibria.serve.tail import RunTail
from equilibria.serve.thinned import Thinned
from equilibria.views.run.page import report_page
from equilibria.views.words import sentence_case

TRAINING, FINISHED, INTERRUPTED = "training now", "finished", "interrupted"
DAMAGED, DELETED = "damaged", "deleted"
UNREADABLE = (DAMAGED, DELETED)
_ROWS_AT_ONCE = 50_000
_STRETCHES = 150  # of a line: drawn again every few seconds, also on a phone
_MOST_QUERIES = 50_000  # of a sharpness tracker; each of them cost several passes over the network
_SILENCE = 120  # seconds after which a writer on another machine, which cannot be asked, is taken for gone
_LONG_SILENCE = 3600  # the same of a writer here, where the system does not tell when a process began
_CLOCKS = 10  # seconds by which the clocks of processes and of records may differ
_MOST_PID = 2**31 - 1  # as the system has it
_SHARE, _LEAST_SECONDS = 0.1, 1.0  # of one core that new views of a run may take; from one view to the next


@dataclass(frozen=True, slots=True)
class Status:
    """What the list says about a run.

    Attributes:
        state: training now, finished, interrupted (no end was recorded, and its process is gone), damaged or deleted.
        steps: last sampled step + 1, None before the first sample.
        samples: recorded rows.
        updated: seconds since 1970 of the last write, None without any.
        message: why it cannot be read, "" if it can.
    """

    state: str
    steps: int | None = None
    samples: int = 0
    updated: float | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """A run's page at one moment.

    Attributes:
        number: grows with every view of the run.
        payload: JSON, ready to be sent: the inside of the page and what its charts draw.
        headline: one sentence.
        worst: the most serious finding, None without any.
    """

    number: int
    payload: bytes
    headline: str
    worst: Finding | None


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """A run at one moment, as `equilibria.forecasting` takes it.

    Attributes:
        name: of the run.
        metadata: of the run.
        table: the samples that are kept.
    """

    name: str
    metadata: Mapping[str, Any]
    table: pa.Table

    def samples(self) -> pa.Table:
        """The sample table."""
        return self.table


class Followed:
    """A run directory; all methods are called from one thread."""

    def __init__(self, directory: Path, *, name: str) -> None:
        self.name = name
        self._directory = directory
        self.status = Status(INTERRUPTED)
        self.view: View | None = None
        self.headline: str | None = None  # of the last view, also when that is forgotten
        self.worst: Finding | None = None
        self.version = 0  # of what was read
        self._viewed = -1  # the version that the view shows
        self._next_view = 0.0
        self._views = 0
        self._manifest: Manifest | None = None
        self._manifest_seen: tuple[int, int] | None = None
        self.forget()

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Of all sessions; of two that give the same key, the later."""
        sessions = self._manifest.sessions if self._manifest else ()
        return {key: value for session in sessions for key, value in session.metadata.items()}

    @property
    def is_loaded(self) -> bool:
        """Whether its samples are in memory."""
        return self._loaded

    def drawn(self) -> pa.Table:
        """The samples that are kept, for charts."""
        return self._thinned.drawn()

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of its layers."""
        return self._thinned.names

    def seen(self) -> Seen:
        """Samples and metadata of this moment, for another thread."""
        if self.status.state in UNREADABLE:
            raise EquilibriaError(self.status.message)
        return Seen(self.name, self.metadata, self._thinned.table())

    def forget(self) -> None:
        """Give the memory back; what the list shows stays."""
        self._loaded = False
        self._tail = RunTail(self._directory)
        self._thinned = Thinned()
        self._queries: list[pa.RecordBatch] = []
        self._failure = ""
        self._reading = 0.0
        self.view = None
        self._viewed = -1

    def look(self) -> bool:
        """Whether something may have changed, without reading samples: the files' sizes and the writer."""
        before = self.status
        try:
            self._read_manifest()
            status = self._standing()
            if self._failure:
                status = replace(status, state=DAMAGED, message=self._failure)
        except FileNotFoundError:
            status = replace(before, state=DELETED, message="Its folder is gone")
        except Exception as error:  # whatever an odd folder leads to: the other runs must not suffer
            status = replace(before, state=DAMAGED, message=self._sentence(error))
        self.status = status
        if (status.state, status.updated, status.message) == (before.state, before.updated, before.message):
            return False
        self.version += 1
        return True

    def fail(self, error: Exception) -> bool:
        """Take the run for damaged from now on; whether it was not before."""
        before, self._failure = self._failure, self._sentence(error)
        self.status = replace(self.status, state=DAMAGED, message=self._failure)
        self.version += before != self._failure
        return before != self._failure

    def read(self) -> None:
        """Read what was appended."""
        rows = self._thinned.totals.rows
        began = time.monotonic()
        if not self._failure and self.status.state != DELETED:
            try:
                self._take()
            except Exception as error:  # whatever a damaged file leads to: the other runs must not suffer
                self.fail(error)
        totals, steps = self._thinned.totals, self._steps_taken()
        state, message = (DAMAGED, self._failure) if self._failure else (self.status.state, self.status.message)
        self.status = Status(state, steps, totals.rows, self.status.updated, message)
        self.version += totals.rows != rows
        self._loaded = True
        self._reading += time.monotonic() - began

    def is_due(self) -> bool:
        """Whether there is something new, and time for another view: making them takes a tenth of a core at most."""
        return self.version != self._viewed and time.monotonic() >= self._next_view

    def show(self) -> View:
        """The page as it is now; made again only where something changed."""
        if self.view is None or self.version != self._viewed:
            began = time.monotonic()
            version = self.version
            self._views += 1
            try:
                self.view = self._make(self._views)
            except Exception as error:  # a defect must not cost the other runs their pages
                said = f"Cannot be shown: {self._sentence(error)}"
                self.view = _view(self._views, {"damaged": said}, said, None)
            self.headline, self.worst = self.view.headline, self.view.worst
            self._viewed = version
            spent, self._reading = time.monotonic() - began + self._reading, 0.0
            self._next_view = time.monotonic() + max(_LEAST_SECONDS, spent / _SHARE)
        return self.view

    # ---- reading

    def _read_manifest(self) -> None:
        stat = (self._directory / RUN_FILE).stat()
        if not S_ISREG(stat.st_mode):  # opening a pipe would wait for ever
            raise EquilibriaError(f"{RUN_FILE} is not a file")
        if (stat.st_mtime_ns, stat.st_size) == self._manifest_seen:
            return
        try:
            before, self._manifest = self._manifest, read_manifest(self._directory)
        except RecursionError:
            raise EquilibriaError(f"{RUN_FILE}: not the description of a run (lists in lists)") from None
        self._manifest_seen = stat.st_mtime_ns, stat.st_size
        if before and self._manifest and before.id != self._manifest.id:  # another run in the same place
            self.forget()

    def _standing(self) -> Status:
        updated = self._tail.updated()
        session = self._manifest.sessions[-1] if self._manifest and self._manifest.sessions else None
        if session is None or session.ended is not None:
            state = FINISHED
        else:
            state = TRAINING if self._writer_lives(session, updated) else INTERRUPTED
        return Status(state, self.status.steps, self.status.samples, updated)

    def _writer_lives(self, session: Session, updated: float | None) -> bool:
        """By the process that the lock file names: taking the lock to see would keep a writer out."""
        holder = self._holder()
        if holder is None or (holder.pid, holder.host) != (session.pid, session.host):
            return False
        silence = math.inf if updated is None else time.time() - updated
        if not _is_here(holder.host):
            return silence < _SILENCE
        return holder.is_alive_here() and (silence < _SILENCE or _is_old_enough(holder.pid, session, silence))

    def _holder(self) -> Holder | None:
        path = self._directory / LOCK_FILE
        try:
            if not path.is_file():
                return None
            pid, host = path.read_text(encoding="utf-8").split()
            number = int(pid)
        except (OSError, ValueError):
            return None
        return Holder(number, host) if 0 < number <= _MOST_PID else None  # 0 and below are groups of processes

    def _sentence(self, error: Exception) -> str:
        """What is wrong, without the path: who looks need not know where it is."""
        if isinstance(error, OSError) and error.strerror:
            return f"Cannot be read: {error.strerror}"
        return sentence_case(str(error).replace(f"{self._directory}{os.sep}", ""))

    def _take(self) -> None:
        self._take_appended()
        if not self._thinned.exact:  # from the start, now that it is known what does not count
            self._tail, self._queries = RunTail(self._directory), []
            self._thinned = Thinned(returns=self._thinned.returns)
            self._take_appended()

    def _take_appended(self) -> None:
        batches: dict[int, list[pa.RecordBatch]] = {}
        rows = 0
        for found in self._tail.read():
            if found.table == SHARPNESS:
                self._take_query(found.batch)
                continue
            if rows >= _ROWS_AT_ONCE or (batches and found.session not in batches):
                self._flush(batches)
                rows = 0
            batches.setdefault(found.session, []).append(found.batch)
            rows += found.batch.num_rows
        self._flush(batches)

    def _take_query(self, batch: pa.RecordBatch) -> None:
        self._queries.append(batch)
        if sum(each.num_rows for each in self._queries) > 2 * _MOST_QUERIES:
            self._queries = self._sharpness().combine_chunks().to_batches()

    def _flush(self, batches: dict[int, list[pa.RecordBatch]]) -> None:
        for session, together in batches.items():
            self._thinned.add(together, session=session)
        batches.clear()

    def _sharpness(self) -> pa.Table:
        table = pa.Table.from_batches(self._queries) if self._queries else TABLES[SHARPNESS].empty_table()
        table = pa.concat_tables(
            [TABLES[SHARPNESS].empty_table(), table.unify_dictionaries()], promote_options="default"
        )
        steps = table["step"].to_numpy()
        one_line = steps <= np.minimum.accumulate(steps[::-1])[::-1] if len(steps) else np.zeros(0, dtype=bool)
        return table.filter(pa.array(one_line))[-_MOST_QUERIES:]

    def _steps_taken(self) -> int | None:
        """As many as were recorded at the end of a run, for the last sample comes before it; else as were sampled."""
        last, told = self._thinned.totals.last_step, self.metadata.get("steps")
        if last is None:
            return None
        return max(last + 1, told) if isinstance(told, int) and self.status.state != TRAINING else last + 1

    # ---- the page

    def _make(self, number: int) -> View:
        if self.status.state in UNREADABLE:
            return _view(number, {"damaged": self.status.message}, self.status.message, None)
        samples, sharpness, totals = self._thinned.table(), self._sharpness(), self._thinned.totals
        metadata = {**self.metadata, "steps": self._steps_taken() or 0}
        findings = diagnose(samples, metadata=metadata)
        about_sharpness = sharpness_findings(sharpness, metadata=metadata) if sharpness.num_rows else ()
        page = report_page(
            samples,
            metadata=metadata,
            title=self.name,
            notes=self._notes(),
            findings=(*findings, *about_sharpness),
            sharpness=sharpness if sharpness.num_rows else None,
            drawn=self._thinned.drawn(),
            sampled=(totals.steps, totals.rows),
            stretches=_STRETCHES,
        )
        content = {"inside": page.inside(), "data": page.data}
        return _view(number, content, unescape(page.parts["headline"]), next(iter(findings), None))

    def _notes(self) -> list[str]:
        """About the record, and about what is left out of memory."""
        thinned, totals = self._thinned, self._thinned.totals
        notes = list(self._tail.notes) if self.status.state != TRAINING else []
        went_back = Counter(each.step for each in thinned.returns)
        notes += [
            f"the run went back to step {step:,}{_times(count)}; what was recorded after it is left out"
            for step, count in list(went_back.items())[-3:]
        ]
        if thinned.stride > 1:
            notes.append(
                f"a long run: findings and table rest on every {_ordinal(thinned.stride)} sample of a layer, and so do "
                f"the lines of norms and predictions; the angles drawn on all {totals.rows:,} (equilibria report reads "
                "all of them for everything)"
            )
            for word, (count, last) in totals.notes.items():
                notes.append(
                    f"{counted(count, 'sample')} in all {'is' if count == 1 else 'are'} marked “{word}”, the last "
                    f"at step {last:,}"
                )
        return notes


def _view(number: int, content: Mapping[str, object], headline: str, worst: Finding | None) -> View:
    payload = json.dumps({"view": number, **content}, allow_nan=False, separators=(",", ":")).encode()
    return View(number, payload, headline, worst)


def _is_old_enough(pid: int, session: Session, silence: float) -> bool:
    """Whether a process may be a session's: one that began after it has only inherited the number."""
    began = process.began(pid)
    if began is None:
        return silence < _LONG_SILENCE
    return began <= datetime.fromisoformat(session.started).timestamp() + _CLOCKS


def _is_here(host: str) -> bool:
    return host == socket.gethostname()


def _times(count: int) -> str:
    return "" if count == 1 else f", {count:,} times"


def _ordinal(number: int) -> str:
    """Of powers of two."""
    return f"{number}nd" if number % 10 == 2 and number % 100 != 12 else f"{number}th"

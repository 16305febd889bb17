"""Tells every viewer that something is new: one look at the disk for all of them, and none while nobody watches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from equilibria.serve.catalogue import Catalogue
from equilibria.serve.follow import TRAINING, Followed, View
from equilibria.serve.worker import EndedError, Worker
from equilibria.views.words import sentence_case

LOOK_SECONDS, SCAN_SECONDS, ALIVE_SECONDS = 1.0, 3.0, 15.0


class Hub:
    """What viewers wait for.

    Attributes:
        catalogue: the runs; touched only inside of the worker.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.worker = Worker("equilibria-serve-records")
        self._beat = asyncio.Event()  # set once something is new, and then replaced
        self._closing = False
        self._viewers = 0
        self._watched: dict[int, int] = {}
        self._scanned = -SCAN_SECONDS
        self._looking: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[None] | None = None
        self._list: list[dict[str, Any]] = []

    # ---- asked by requests

    @property
    def listing(self) -> dict[str, Any]:
        """What the list shows: runs, the folders without any, and whether some are left out."""
        return {"runs": self._list, "empty": self.catalogue.empty, "left_out": self.catalogue.left_out}

    async def runs(self) -> dict[str, Any]:
        """The list as it is now; what takes time to read follows as events."""
        await self.worker.do(self._look)
        self._begin_loading()
        return self.listing

    async def view(self, number: int) -> View | None:
        """The page of a run, None if there is no such number."""
        if number not in self.catalogue.runs:
            await self.worker.do(self.catalogue.scan)
        if self.catalogue.known(number) is None:
            return None
        return await self.worker.do(lambda: self._show(number))

    def _show(self, number: int) -> View:
        run = self.catalogue.loaded(number)
        return run.show() if run.view is None or run.is_due() else run.view

    async def list_events(self) -> AsyncIterator[bytes]:
        """The list whenever it changed."""
        sent: list[dict[str, Any]] | None = None
        async for _ in self._moments(None):
            if self._list != sent:
                sent = self._list
                yield event("runs", self.listing)
            else:
                yield ALIVE

    async def run_events(self, number: int) -> AsyncIterator[bytes]:
        """The status of a run whenever it changed, with the number of its newest view: fetch it if it is another."""
        sent: dict[str, Any] | None = None
        async for _ in self._moments(number):
            now = self._run_status(number)
            if now != sent:
                sent = now
                yield event("status", now)
            else:
                yield ALIVE

    def _run_status(self, number: int) -> dict[str, Any]:
        run = self.catalogue.known(number)
        assert run is not None
        status = run.status
        return {
            "view": None if run.view is None else run.view.number,
            "state": status.state,
            "steps": status.steps,
            "samples": status.samples,
            "updated": status.updated,
            "message": status.message,
        }

    async def _moments(self, number: int | None) -> AsyncIterator[None]:
        """Now, then after every change, and now and then without one."""
        self._viewers += 1
        if number is not None:
            self._watched[number] = self._watched.get(number, 0) + 1
        try:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._keep_looking())
            while not self._closing:
                beat = self._beat  # before the viewer looks: what comes meanwhile is not missed
                yield
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(beat.wait(), ALIVE_SECONDS)
        finally:
            self._viewers -= 1
            if number is not None:
                self._watched[number] -= 1

    def close(self) -> None:
        """End all streams, and all waiting."""
        self._closing = True
        self.worker.close()
        self._wake()

    def _wake(self) -> None:
        beat, self._beat = self._beat, asyncio.Event()
        beat.set()

    # ---- looking

    async def _keep_looking(self) -> None:
        with contextlib.suppress(EndedError):
            await self._look_again_and_again()

    async def _look_again_and_again(self) -> None:
        while self._viewers and not self._closing:
            watched = [number for number, viewers in self._watched.items() if viewers]
            if await self.worker.do(lambda watched=watched: self._look(watched)):  # type: ignore[misc]
                self._wake()
            self._begin_loading()
            await asyncio.sleep(LOOK_SECONDS)

    def _look(self, watched: Sequence[int] = ()) -> bool:
        """Look at all runs; of those that somebody watches, read what was appended and make a view when it is time."""
        thorough = time.monotonic() - self._scanned > SCAN_SECONDS
        if thorough:
            self.catalogue.scan()
            self._scanned = time.monotonic()
        changed = False
        for number, run in self.catalogue.runs.items():
            if not (thorough or number in watched or run.status.state == TRAINING):
                continue  # what is over changes rarely
            try:
                changed |= self._look_at(number, run, watched=number in watched)
            except Exception as error:  # a defect must not cost the other runs their updates
                changed |= run.fail(error)
        before_list, self._list = self._list, [_entry(number, run) for number, run in self.catalogue.runs.items()]
        return changed or before_list != self._list

    def _look_at(self, number: int, run: Followed, *, watched: bool) -> bool:
        fresh = run.look()
        if not watched or not (fresh or (run.is_loaded and run.is_due())):
            return fresh
        before = run.version, run.view
        self.catalogue.loaded(number)
        if run.is_due():
            run.show()
        return fresh or (run.version, run.view) != before

    def _begin_loading(self) -> None:
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._load_all())

    async def _load_all(self) -> None:
        with contextlib.suppress(EndedError):
            await self._load_one_by_one()

    async def _load_one_by_one(self) -> None:
        """Read the runs whose findings the list does not know yet."""
        for number, run in list(self.catalogue.runs.items()):
            stale = run.headline is None or (run.status.state == TRAINING and run.is_due())
            if stale and not self._watched.get(number) and not self._closing:
                await self.worker.do(lambda number=number: self._show(number))  # type: ignore[misc]
                self._list = [_entry(each, run) for each, run in self.catalogue.runs.items()]
                self._wake()


def _entry(number: int, run: Followed) -> dict[str, Any]:
    status = run.status
    return {
        "id": number,
        "name": run.name,
        "state": status.state,
        "steps": status.steps,
        "samples": status.samples,
        "updated": status.updated,
        "message": status.message,
        "headline": run.headline,
        "severity": None if run.worst is None else run.worst.severity,
        "worst": None if run.worst is None else sentence_case(run.worst.subject),
    }


ALIVE = b": still here\n\n"


def event(kind: str, data: object) -> bytes:
    r"""One Server-Sent Event; JSON has no line ends.

    Example:
        >>> event("status", {"step": 3})
        b'event: status\ndata: {"step":3}\n\n'
    """
    return f"event: {kind}\ndata: {json.dumps(data, allow_nan=False, separators=(',', ':'))}\n\n".encode()

"""Announces news to every viewer: one look at the disk for all of them, and none while nobody watches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any

from equilibria.serve.catalogue import Catalogue
from equilibria.serve.follow import TRAINING, FollowedRun, RunView
from equilibria.serve.worker import Worker, WorkerClosedError
from equilibria.views.words import sentence_case

LOOK_SECONDS, SCAN_SECONDS, ALIVE_SECONDS = 1.0, 3.0, 15.0


class Hub:
    """Reads the runs in its worker while somebody watches, and wakes the streams of events when something changed.

    Attributes:
        catalogue: the runs; used only inside the worker.
        worker: the thread that reads.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.worker = Worker("equilibria-serve-records")
        self._news = asyncio.Event()  # set when something changed, and replaced by a new one
        self._closing = False
        self._viewers = 0
        self._watched: dict[int, int] = {}  # viewers by run
        self._last_scan = -SCAN_SECONDS
        self._looking: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[None] | None = None
        self._list: list[dict[str, Any]] = []

    # ---- for requests

    @property
    def listing(self) -> dict[str, Any]:
        """The content of the list: runs, folders without any, and whether some runs are left out."""
        return {"runs": self._list, "empty": self.catalogue.empty, "left_out": self.catalogue.left_out}

    async def runs(self) -> dict[str, Any]:
        """The list as of now; headlines of runs that have to be read first follow as events."""
        await self.worker.do(self._look)
        self._begin_loading()
        return self.listing

    async def view(self, number: int) -> RunView | None:
        """The page of a run, None if there is no such number."""
        if number not in self.catalogue.runs:
            await self.worker.do(self.catalogue.scan)
        if self.catalogue.known(number) is None:
            return None
        return await self.worker.do(lambda: self._show(number))

    def _show(self, number: int) -> RunView:
        run = self.catalogue.loaded(number)
        return run.show() if run.view is None or run.is_due() else run.view

    async def list_events(self) -> AsyncIterator[bytes]:
        """The list, whenever it has changed."""
        sent: list[dict[str, Any]] | None = None
        async for _ in self._moments(None):
            if self._list != sent:
                sent = self._list
                yield event("runs", self.listing)
            else:
                yield ALIVE

    async def run_events(self, number: int) -> AsyncIterator[bytes]:
        """The status of a run, whenever it has changed, with the number of its newest view for the page to fetch."""
        sent: dict[str, Any] | None = None
        async for _ in self._moments(number):
            run = self.catalogue.known(number)
            assert run is not None
            now = {"view": None if run.view is None else run.view.number, **asdict(run.status)}
            if now != sent:
                sent = now
                yield event("status", now)
            else:
                yield ALIVE

    async def _moments(self, number: int | None) -> AsyncIterator[None]:
        """Now, then after every change, and every `ALIVE_SECONDS` without one."""
        self._viewers += 1
        if number is not None:
            self._watched[number] = self._watched.get(number, 0) + 1
        try:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._keep_looking())
            while not self._closing:
                news = self._news  # taken before the viewer looks, so that it misses no change
                yield
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), ALIVE_SECONDS)
        finally:
            self._viewers -= 1
            if number is not None:
                self._watched[number] -= 1

    def close(self) -> None:
        """End all streams and all waiting."""
        self._closing = True
        self.worker.close()
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    # ---- looking

    async def _keep_looking(self) -> None:
        with contextlib.suppress(WorkerClosedError):
            while self._viewers and not self._closing:
                watched = [number for number, viewers in self._watched.items() if viewers]
                if await self.worker.do(lambda watched=watched: self._look(watched)):  # type: ignore[misc]
                    self._wake()
                self._begin_loading()
                await asyncio.sleep(LOOK_SECONDS)

    def _look(self, watched: Sequence[int] = ()) -> bool:
        """Look at the runs; read the watched ones and make their views when due. Whether anything has changed."""
        thorough = time.monotonic() - self._last_scan > SCAN_SECONDS
        if thorough:
            self.catalogue.scan()
            self._last_scan = time.monotonic()
        changed = False
        for number, run in self.catalogue.runs.items():
            if not (thorough or number in watched or run.status.state == TRAINING):
                continue  # a finished run changes rarely
            try:
                changed |= self._look_at(number, run, watched=number in watched)
            except Exception as error:  # a defect must not cost the other runs their updates
                changed |= run.fail(error)
        before, self._list = self._list, self._entries()
        return changed or before != self._list

    def _look_at(self, number: int, run: FollowedRun, *, watched: bool) -> bool:
        changed = run.look()
        if not watched or not (changed or (run.is_loaded and run.is_due())):
            return changed
        before = run.version, run.view
        self.catalogue.loaded(number)
        if run.is_due():
            run.show()
        return changed or (run.version, run.view) != before

    def _begin_loading(self) -> None:
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._load_headlines())

    async def _load_headlines(self) -> None:
        """Read the runs whose headline the list does not have yet, or has from long ago."""
        with contextlib.suppress(WorkerClosedError):
            for number, run in list(self.catalogue.runs.items()):
                stale = run.headline is None or (run.status.state == TRAINING and run.is_due())
                if stale and not self._watched.get(number) and not self._closing:
                    await self.worker.do(lambda number=number: self._show(number))  # type: ignore[misc]
                    self._list = self._entries()
                    self._wake()

    def _entries(self) -> list[dict[str, Any]]:
        return [_entry(number, run) for number, run in self.catalogue.runs.items()]


def _entry(number: int, run: FollowedRun) -> dict[str, Any]:
    return {
        "id": number,
        "name": run.name,
        **asdict(run.status),
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

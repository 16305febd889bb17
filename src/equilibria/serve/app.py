"""The addresses of the server: pages, the data that their scripts fetch, and the streams that announce new data."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from equilibria.errors import EquilibriaError
from equilibria.serve.catalogue import Catalogue
from equilibria.serve.follow import RunSnapshot
from equilibria.serve.guard import LOOPBACK, Guard
from equilibria.serve.hub import Hub
from equilibria.serve.pages import asset, body, gallery, page
from equilibria.serve.queries import (
    MOST_COMPARED,
    QueryReaders,
    comparison_view,
    explanation_view,
    forecast_view,
    plan_view,
)
from equilibria.serve.worker import Worker, WorkerClosedError
from equilibria.views.words import full_stop, text

_FOREVER = "public, max-age=31536000, immutable"
_CACHED_PLANS = 64  # some tens of kilobytes each


class App:
    """The ASGI application.

    Args:
        catalogue: the runs.
        readers: read the queries of the planner and of forecasts.
        results: the folder of `equilibria reproduce`, which need not exist.
        hosts: names under which browsers may call this server.
        any_address: also by any IP address.

    Attributes:
        hub: the runs, and the streams of events about them.
        asgi: the application that a server runs.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        readers: QueryReaders,
        results: Path,
        hosts: Iterable[str] = LOOPBACK,
        any_address: bool = False,
    ) -> None:
        self.hub = Hub(catalogue)
        self._plan_worker = Worker("equilibria-serve-plans")
        self._gallery_worker = Worker("equilibria-serve-gallery")  # takes seconds, and plans should not wait for it
        self._readers, self._results = readers, results
        self._plan = lru_cache(_CACHED_PLANS)(self._compute_plan)
        handlers = {HTTPException: _error_response, WorkerClosedError: _closing_response}
        app = Starlette(routes=self._routes(), exception_handlers=handlers, lifespan=self._lifespan)
        self.asgi = Guard(app, hosts=hosts, any_address=any_address)

    def _routes(self) -> list[Route]:
        routes: dict[str, Callable[[Request], Any]] = {
            "/": self._list_page,
            "/runs": self._list,
            "/events": self._list_events,
            "/run/{number}": self._run_page,
            "/run/{number}/view": self._run_view,
            "/run/{number}/events": self._run_events,
            "/run/{number}/forecast": self._forecast_page,
            "/run/{number}/forecast/view": self._forecast_view,
            "/compare": self._compare_page,
            "/compare/view": self._compare_view,
            "/compare/explain/view": self._explain_view,
            "/plan": self._plan_page,
            "/plan/view": self._plan_view,
            "/gallery": self._gallery,
            "/asset/{tag}/{name}": _asset,
        }
        return [Route(path, answer, methods=["GET"]) for path, answer in routes.items()]

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        reading = asyncio.create_task(self._read_runs())
        yield
        reading.cancel()
        self.close()

    async def _read_runs(self) -> None:
        """Read the runs before the first request, so that the first viewer does not wait."""
        with suppress(WorkerClosedError):
            await self.hub.runs()

    def close(self) -> None:
        """End all streams, and answer all waiting requests with status 503."""
        self.hub.close()
        self._plan_worker.close()
        self._gallery_worker.close()

    # ---- runs

    async def _list_page(self, _: Request) -> Response:
        return HTMLResponse(page("Runs", here="/", body=body("runs.html"), styles=[], scripts=["live.js", "runs.js"]))

    async def _list(self, _: Request) -> Response:
        return _json(await self.hub.runs())

    async def _list_events(self, _: Request) -> Response:
        return _stream(self.hub.list_events())

    async def _run_page(self, request: Request) -> Response:
        number = await self._run_number(request)
        name = self.hub.catalogue.runs[number].name
        return HTMLResponse(
            page(
                name,
                here="/",
                body=body("run.html", number=str(number), name=text(name)),
                styles=["report.css"],
                scripts=["shared.js", "report.js", "live.js", "run.js", "plotly.js"],
            )
        )

    async def _run_view(self, request: Request) -> Response:
        number = await self._run_number(request)
        view = await self.hub.view(number)
        assert view is not None
        return _tagged(request, view.payload, f"{number}-{view.number}")

    async def _run_events(self, request: Request) -> Response:
        return _stream(self.hub.run_events(await self._run_number(request)))

    async def _run_number(self, request: Request) -> int:
        """The number in the path; status 404 if there is no such run."""
        number = _number(request.path_params["number"], status=404)
        if number not in self.hub.catalogue.runs:
            await self.hub.worker.do(self.hub.catalogue.scan)
        if number not in self.hub.catalogue.runs:
            gone = self.hub.catalogue.known(number)
            reason = f"There is no run {number}" if gone is None else f"The run {gone.name} was deleted"
            raise HTTPException(404, f"{reason}; the list at / has all of them.")
        return number

    # ---- several runs

    async def _compare_page(self, _: Request) -> Response:
        scripts = ["shared.js", "live.js", "compare.js", "plotly.js"]
        html = page("Compare runs", here="/compare", body=body("compare.html"), styles=["report.css"], scripts=scripts)
        return HTMLResponse(html)

    async def _compare_view(self, request: Request) -> Response:
        _allow_only(request, {"run", "layer"})
        numbers = await self._compared(request)
        layer = request.query_params.get("layer") or None

        def compare() -> dict[str, object]:
            return comparison_view({number: self.hub.catalogue.loaded(number) for number in numbers}, layer)

        return _json(await _do(request, self.hub.worker, compare))

    async def _explain_view(self, request: Request) -> Response:
        _allow_only(request, {"run"})
        numbers = await self._compared(request)
        if len(numbers) != 2:
            raise HTTPException(400, f"got {len(numbers)} runs; expected two to explain, A first.")

        def snapshots() -> list[RunSnapshot]:
            return [self.hub.catalogue.loaded(number).snapshot() for number in numbers]

        first, second = await _do(request, self.hub.worker, snapshots)
        return _json(await _do(request, self._plan_worker, lambda: explanation_view(first, second)))

    async def _compared(self, request: Request) -> list[int]:
        """The numbers of the chosen runs; status 400 if there are too many, or unknown ones."""
        numbers = list(dict.fromkeys(map(_number, request.query_params.getlist("run"))))
        if len(numbers) > MOST_COMPARED:
            raise HTTPException(400, f"got {len(numbers)} runs; expected at most {MOST_COMPARED} to compare.")
        if self._unknown(numbers):  # perhaps the server has only just started
            await self.hub.worker.do(self.hub.catalogue.scan)
        unknown = self._unknown(numbers)
        if unknown:
            raise HTTPException(400, f"got run={unknown[0]}; expected numbers of runs that the list has.")
        return numbers

    def _unknown(self, numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if self.hub.catalogue.known(number) is None]

    # ---- plans and forecasts

    async def _plan_page(self, _: Request) -> Response:
        scripts = ["shared.js", "plan-charts.js", "live.js", "plan.js", "plotly.js"]
        return HTMLResponse(page("Planner", here="/plan", body=body("plan.html"), styles=["plan.css"], scripts=scripts))

    async def _plan_view(self, request: Request) -> Response:
        options = tuple(sorted(_options(request).items()))
        payload = await _do(request, self._plan_worker, lambda: self._plan(options))
        return Response(payload, media_type="application/json")

    def _compute_plan(self, options: tuple[tuple[str, str], ...]) -> bytes:
        rest = dict(options)
        with_alternatives = rest.pop("alternatives", "") == "1"
        return _encoded(plan_view(self._readers.plan(rest), title="Planner", with_alternatives=with_alternatives))

    async def _forecast_page(self, request: Request) -> Response:
        number = await self._run_number(request)
        name = self.hub.catalogue.runs[number].name
        return HTMLResponse(
            page(
                f"Forecast: {name}",
                here="/",
                body=body("forecast.html", number=str(number), name=text(name)),
                styles=["forecast.css"],
                scripts=["shared.js", "forecast-charts.js", "live.js", "forecast.js", "plotly.js"],
            )
        )

    async def _forecast_view(self, request: Request) -> Response:
        number, options = await self._run_number(request), _options(request)
        snapshot = await _do(request, self.hub.worker, lambda: self.hub.catalogue.loaded(number).snapshot())
        return _json(await _do(request, self._plan_worker, lambda: forecast_view(snapshot, options, self._readers)))

    # ---- the reproduction

    async def _gallery(self, request: Request) -> Response:
        html = await _do(request, self._gallery_worker, lambda: gallery(self._results))
        return _tagged(request, html.content, html.tag, media_type=html.media_type)


async def _asset(request: Request) -> Response:
    known = asset(request.path_params["name"])
    if known is None or known.tag != request.path_params["tag"]:
        raise HTTPException(404, "There is no such file; load the page again.")
    answer = _tagged(request, known.content, known.tag, media_type=known.media_type)
    answer.headers["cache-control"] = _FOREVER
    return answer


# ---- work for a request


async def _do(request: Request, worker: Worker, work: Callable[[], Any]) -> Any:
    """The result of the work; status 400 and a sentence if it raises EquilibriaError."""
    try:
        return await _while_connected(request, worker.do(work))
    except EquilibriaError as error:
        raise HTTPException(400, full_stop(_without_dashes(str(error)))) from error


async def _while_connected(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of the work, cancelled if the viewer disconnects: later requests need not wait for it then."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(499, "The viewer has disconnected.")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# ---- queries


def _without_dashes(words: str) -> str:
    """Options of the command line under their names in a query.

    Example:
        >>> _without_dashes("got --steps-per-epoch 0 and --weight-decay 1, init_norm=None")
        'got steps_per_epoch 0 and wd 1, init_norm=None'
    """
    plain = re.sub(r"(?<!\w)--([a-z][a-z-]*)", lambda match: match[1].replace("-", "_"), words)
    return re.sub(r"\bweight_decay\b", "wd", plain)


def _options(request: Request) -> dict[str, str]:
    """The query, without empty fields; status 400 if it has a name twice."""
    items = request.query_params.multi_items()
    twice = next((name for name, _ in items if len(request.query_params.getlist(name)) > 1), None)
    if twice is not None:
        raise HTTPException(400, f"got {twice} more than once; expected it once.")
    return {name: value.strip() for name, value in items if value.strip()}


def _allow_only(request: Request, names: set[str]) -> None:
    unknown = sorted(set(request.query_params) - names)
    if unknown:
        raise HTTPException(400, f"got {unknown[0]}; expected only: {', '.join(sorted(names))}.")


def _number(word: str, *, status: int = 400) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", word):
        raise HTTPException(status, f"got run={word[:40]!r}; expected the number of a run, such as 1.")
    return int(word)


# ---- responses


async def _error_response(request: Request, error: Exception) -> Response:
    """An error as a sentence: JSON for scripts, text for people."""
    assert isinstance(error, HTTPException)
    message = error.detail
    if message == "Not Found":
        message = "There is nothing at this address; the list of runs is at /."
    if request.url.path.endswith("/view"):
        return _json({"error": message}, status=error.status_code)
    return PlainTextResponse(f"{message}\n", status_code=error.status_code, headers=error.headers)


async def _closing_response(request: Request, _: Exception) -> Response:
    return await _error_response(request, HTTPException(503, "The server is shutting down."))


def _encoded(data: object) -> bytes:
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()


def _json(data: object, *, status: int = 200) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(_encoded(data), status_code=status, media_type="application/json", headers=headers)


def _tagged(request: Request, content: bytes, tag: str, *, media_type: str = "application/json") -> Response:
    """The content, or status 304 if the browser has it already."""
    headers = {"etag": f'"{tag}"', "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=media_type, headers=headers)


def _stream(events: AsyncIterator[bytes]) -> Response:
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)

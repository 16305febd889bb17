"""The addresses: pages, what their scripts fetch, and the streams that say when to fetch again."""

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
from equilibria.serve.answers import MOST_COMPARED, comparison, forecast_view, plan_view
from equilibria.serve.assets import asset
from equilibria.serve.catalogue import Catalogue
from equilibria.serve.frame import body, frame, gallery
from equilibria.serve.guard import LOOPBACK, Guard
from equilibria.serve.hub import Hub
from equilibria.serve.requests import Readers
from equilibria.serve.worker import EndedError, Worker
from equilibria.views.words import full_stop, text

_FOREVER = "public, max-age=31536000, immutable"
_MOST_ANSWERS = 64  # plans that are kept, some tens of kilobytes each


class App:
    """What answers requests.

    Args:
        catalogue: the runs.
        readers: how queries are read.
        results: the folder of `equilibria reproduce`, which need not exist.
        hosts: names under which this server may be called.
        any_address: also by any IP address.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        readers: Readers,
        results: Path,
        hosts: Iterable[str] = LOOPBACK,
        any_address: bool = False,
    ) -> None:
        self.hub = Hub(catalogue)
        self._calculator = Worker("equilibria-serve-plans")
        self._gallery_maker = Worker("equilibria-serve-gallery")  # takes seconds, for which no plan should wait
        self._readers, self._results = readers, results
        self._plan = lru_cache(_MOST_ANSWERS)(self._plan_now)
        handlers = {HTTPException: _told, EndedError: _ended}
        app = Starlette(routes=self._routes(), exception_handlers=handlers, lifespan=self._lifespan)
        self.asgi = Guard(app, hosts=hosts, any_address=any_address)

    def _routes(self) -> list[Route]:
        routes: dict[str, Callable[[Request], Any]] = {
            "/": self._list_page,
            "/runs": self._list,
            "/events": self._list_events,
            "/run/{number:int}": self._run_page,
            "/run/{number:int}/view": self._run_view,
            "/run/{number:int}/events": self._run_events,
            "/run/{number:int}/forecast": self._forecast_page,
            "/run/{number:int}/forecast/view": self._forecast_view,
            "/compare": self._compare_page,
            "/compare/view": self._compare_view,
            "/plan": self._plan_page,
            "/plan/view": self._plan_view,
            "/gallery": self._gallery,
            "/asset/{tag}/{name}": _asset,
        }
        return [Route(path, answer, methods=["GET"]) for path, answer in routes.items()]

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        reading = asyncio.create_task(self._begin())
        yield
        reading.cancel()
        self.close()

    async def _begin(self) -> None:
        """Read before anybody asks, so that the first viewer does not wait."""
        with suppress(EndedError):
            await self.hub.runs()

    def close(self) -> None:
        """End all streams, and answer all who wait that the server ends."""
        self.hub.close()
        self._calculator.close()
        self._gallery_maker.close()

    # ---- runs

    async def _list_page(self, _: Request) -> Response:
        return HTMLResponse(frame("Runs", here="/", body=body("runs.html"), styles=[], scripts=["live.js", "runs.js"]))

    async def _list(self, _: Request) -> Response:
        return _json(await self.hub.runs())

    async def _list_events(self, _: Request) -> Response:
        return _stream(self.hub.list_events())

    async def _run_page(self, request: Request) -> Response:
        number = await self._known(request)
        name = self.hub.catalogue.runs[number].name
        return HTMLResponse(
            frame(
                name,
                here="/",
                body=body("run.html", number=str(number), name=text(name)),
                styles=["report.css"],
                scripts=["shared.js", "report.js", "live.js", "run.js", "plotly.js"],
            )
        )

    async def _run_view(self, request: Request) -> Response:
        number = await self._known(request)
        view = await self.hub.view(number)
        assert view is not None
        return _tagged(request, view.payload, f"{number}-{view.number}")

    async def _run_events(self, request: Request) -> Response:
        return _stream(self.hub.run_events(await self._known(request)))

    async def _known(self, request: Request) -> int:
        number: int = request.path_params["number"]
        if number not in self.hub.catalogue.runs:
            await self.hub.worker.do(self.hub.catalogue.scan)
        if number not in self.hub.catalogue.runs:
            gone = self.hub.catalogue.known(number)
            said = f"There is no run {number}" if gone is None else f"The run {gone.name} was deleted"
            raise HTTPException(404, f"{said}; the list at / has all of them.")
        return number

    # ---- several runs

    async def _compare_page(self, _: Request) -> Response:
        scripts = ["shared.js", "live.js", "compare.js", "plotly.js"]
        page = frame("Compare runs", here="/compare", body=body("compare.html"), styles=["report.css"], scripts=scripts)
        return HTMLResponse(page)

    async def _compare_view(self, request: Request) -> Response:
        _allow_only(request, {"run", "layer"})
        numbers = list(dict.fromkeys(map(_number, request.query_params.getlist("run"))))
        if len(numbers) > MOST_COMPARED:
            raise HTTPException(400, f"got {len(numbers)} runs; expected at most {MOST_COMPARED} to compare.")
        strangers = [number for number in numbers if self.hub.catalogue.known(number) is None]
        if strangers:
            raise HTTPException(400, f"got run={strangers[0]}; expected numbers of runs that the list has.")
        layer = request.query_params.get("layer") or None

        def work() -> dict[str, object]:
            return comparison({number: self.hub.catalogue.loaded(number) for number in numbers}, layer)

        return _json(await _answered(request, self.hub.worker, work))

    # ---- plans and forecasts

    async def _plan_page(self, _: Request) -> Response:
        scripts = ["shared.js", "plan-charts.js", "live.js", "plan.js", "plotly.js"]
        return HTMLResponse(
            frame("Planner", here="/plan", body=body("plan.html"), styles=["plan.css"], scripts=scripts)
        )

    async def _plan_view(self, request: Request) -> Response:
        query = tuple(sorted(_single(request).items()))
        found = await _answered(request, self._calculator, lambda: self._plan(query))
        return Response(found, media_type="application/json")

    def _plan_now(self, query: tuple[tuple[str, str], ...]) -> bytes:
        options = dict(query)
        full = options.pop("alternatives", "") == "1"
        asked = self._readers.plan(options)
        return _encoded(plan_view(asked, title="Planner", with_alternatives=full))

    async def _forecast_page(self, request: Request) -> Response:
        number = await self._known(request)
        name = self.hub.catalogue.runs[number].name
        return HTMLResponse(
            frame(
                f"Forecast: {name}",
                here="/",
                body=body("forecast.html", number=str(number), name=text(name)),
                styles=["forecast.css"],
                scripts=["shared.js", "forecast-charts.js", "live.js", "forecast.js", "plotly.js"],
            )
        )

    async def _forecast_view(self, request: Request) -> Response:
        number, query = await self._known(request), _single(request)
        seen = await _answered(request, self.hub.worker, lambda: self.hub.catalogue.loaded(number).seen())
        found = await _answered(request, self._calculator, lambda: forecast_view(seen, query, self._readers))
        return _json(found)

    # ---- the reproduction

    async def _gallery(self, request: Request) -> Response:
        page = await _answered(request, self._gallery_maker, lambda: gallery(self._results))
        return _tagged(request, page.content, page.tag, kind="text/html; charset=utf-8")


async def _asset(request: Request) -> Response:
    found = asset(request.path_params["name"])
    if found is None or found.tag != request.path_params["tag"]:
        raise HTTPException(404, "There is no such file; load the page again.")
    answer = _tagged(request, found.content, found.tag, kind=found.kind)
    answer.headers["cache-control"] = _FOREVER
    return answer


async def _answered(request: Request, worker: Worker, work: Callable[[], Any]) -> Any:
    """What the work gives; what it cannot do with this query becomes a sentence."""
    try:
        return await _while_connected(request, worker.do(work))
    except EquilibriaError as error:
        raise HTTPException(400, full_stop(_without_dashes(str(error)))) from error


async def _while_connected(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """What the work gives; given up where the viewer goes away: the next one would wait for nobody's answer."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(499, "The viewer has gone away.")  # which nobody reads
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _without_dashes(words: str) -> str:
    """Options as a query has them.

    Example:
        >>> _without_dashes("got --steps-per-epoch 0 and --weight-decay 1, init_norm=None")
        'got steps_per_epoch 0 and wd 1, init_norm=None'
    """
    plain = re.sub(r"(?<!\w)--([a-z][a-z-]*)", lambda match: match[1].replace("-", "_"), words)
    return re.sub(r"\bweight_decay\b", "wd", plain)


def _single(request: Request) -> dict[str, str]:
    """The query, of which nothing may be said twice; empty fields count as not filled in."""
    given = request.query_params.multi_items()
    twice = next((name for name, _ in given if len(request.query_params.getlist(name)) > 1), None)
    if twice is not None:
        raise HTTPException(400, f"got {twice} more than once; expected it once.")
    return {name: value.strip() for name, value in given if value.strip()}


def _allow_only(request: Request, names: set[str]) -> None:
    strangers = sorted(set(request.query_params) - names)
    if strangers:
        raise HTTPException(400, f"got {strangers[0]}; expected only: {', '.join(sorted(names))}.")


def _number(word: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", word):
        raise HTTPException(400, f"got run={word!r}; expected the number of a run, such as 1.")
    return int(word)


async def _told(request: Request, error: Exception) -> Response:
    """An error as a sentence: JSON for scripts, text for people."""
    assert isinstance(error, HTTPException)
    said = (
        "There is nothing at this address; the list of runs is at /." if error.detail == "Not Found" else error.detail
    )
    if request.url.path.endswith("/view"):
        return _json({"error": said}, status=error.status_code)
    return PlainTextResponse(f"{said}\n", status_code=error.status_code, headers=error.headers)


async def _ended(request: Request, _: Exception) -> Response:
    return await _told(request, HTTPException(503, "The server ends."))


def _encoded(data: object) -> bytes:
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()


def _json(data: object, *, status: int = 200) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(_encoded(data), status_code=status, media_type="application/json", headers=headers)


def _tagged(request: Request, content: bytes, tag: str, *, kind: str = "application/json") -> Response:
    """Sent only to who does not have it yet."""
    headers = {"etag": f'"{tag}"', "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)


def _stream(events: AsyncIterator[bytes]) -> Response:
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)

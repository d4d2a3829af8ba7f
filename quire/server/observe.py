"""What watches the server: middleware, GET /metrics and /load, the line of statistics, traces.

install() is called once, when the app has its routes. One `Telemetry` an app; it owns the board of
its process and knows everybody who counts on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.core.snapshot import Snapshot
from quire.errors import QuireError
from quire.server import metrics
from quire.server.board import Board
from quire.server.errors import error_response
from quire.server.events import Event
from quire.server.http_metrics import LOAD, Handled, HttpCounts, handler_of
from quire.server.keys import KeyRing
from quire.server.request_log import RequestLog
from quire.server.services import VERSION, Services
from quire.server.sse import json_response
from quire.server.statistics import Statistics
from quire.server.timing import KEY, Watch, sender
from quire.server.tracing import Tracing, tracing_to
from quire.text.inputs import Prepared

log = logging.getLogger(__name__)

router = APIRouter()

ENGINE_S = 5.0
"""So long the engine may take to tell its counters: it answers between two steps."""
LOAD_S = 0.5
"""The same for /load, which a balancer waits for."""


class Telemetry:
    """All that is counted and told of one app. A timing.Sink."""

    def __init__(
        self, to: Services, routes: Iterable[BaseRoute], tracing: Tracing | None, ring: KeyRing
    ) -> None:
        self._to = to
        self._ring = ring
        self.http = HttpCounts(routes)
        places = [*self.http.names(), *metrics.board_names(to.max_model_len)]
        self.board = Board(places, to.shared_folder)
        self.http.use(self.board)
        self.requests = RequestLog(to.options)
        self.tracing = tracing
        self.prefixes = {"both": ("quire", "vllm")}.get(
            to.options.metrics_prefix, (to.options.metrics_prefix,)
        )
        ring.counts = lambda result: self.board.add(f"key_file_reads {result}")
        over = None if tracing is None else tracing.over
        self.recorder = metrics.Recorder(self.board, to.max_model_len, over=over)
        if to.log_stats or tracing is not None:
            to.engine.observer = self.recorder

    # -- what one request says --------------------------------------------------------------------

    @property
    def logs_answers(self) -> bool:
        return self.requests.answers

    def handed(
        self, headers: Mapping[str, str], public_id: str, prepared: Sequence[Prepared]
    ) -> None:
        """These requests are given to the engine now."""
        self.requests.asked(public_id, prepared)
        if self.tracing is not None:
            self.tracing.handed(headers, [one.request.id for one in prepared])

    def said(self, public_id: str, texts: dict[int, str], events: Sequence[Event]) -> None:
        """This is what a generation says."""
        self.requests.said(public_id, texts, events)

    def over(self, seen: Watch, handled: Handled) -> None:
        """An HTTP request is over."""
        self.http.over(handled)
        if self.tracing is not None:
            self.tracing.forget([one for one in seen.request_ids if not self.recorder.knows(one)])

    # -- what is asked ----------------------------------------------------------------------------

    @property
    def load(self) -> int:
        """Requests under way, in all API processes."""
        return round(self.board.totals()[self.board.place[LOAD]])

    async def families(self) -> list[Family]:
        """Everything, now."""
        to, totals = self._to, self.board.totals()
        labels = {"model_name": to.names[0], "engine": "0"}
        found = list(self.http.families(totals))
        if not to.log_stats:
            return found
        now = await self.snapshot()
        for prefix in self.prefixes:
            found += metrics.of_requests(self.board, totals, to.max_model_len, labels, prefix)
            if now is not None:
                state = sleep_state(to.engine.sleeping)
                found += metrics.of_engine(now, state, to.engine.restarts, labels, prefix)
        if now is not None:
            found += metrics.of_keys(now, self._ring.names, labels)
        return _once(found)

    async def snapshot(self, within_s: float | None = None) -> Snapshot | None:
        """The engine's own; None if it does not answer."""
        try:
            return await asyncio.wait_for(self._to.engine.snapshot(0, False), within_s or ENGINE_S)
        except (QuireError, TimeoutError):
            return None

    # -- its life ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While the app does."""
        task = None
        interval = self._to.options.log_stats_interval
        if self._to.log_stats and self._to.process == 0 and interval:
            statistics = Statistics(self.board, self.snapshot)
            task = asyncio.create_task(statistics.tell_every(interval))
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
            if self.tracing is not None:
                await asyncio.to_thread(self.tracing.stop)


def sleep_state(sleeping: frozenset[str]) -> str:
    """The word for what sleeps. Weights that are kept and not used count as offloaded."""
    return "weights_offloaded" if "weights" in sleeping else "awake"


def _once(families: Iterable[Family]) -> list[Family]:
    """Ours have one name whatever the prefix, and so come twice with two."""
    return list({family.name: family for family in families}.values())


class Observed:
    """The outermost middleware: each HTTP request gets a Watch, and is counted when it is over.

    What nobody meant to raise ends here: further out the server would close the connection behind
    the answer, and the client's next request on it would be lost.
    """

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        headers = Headers(scope=scope)
        seen = scope[KEY] = Watch(began, headers, self._telemetry)
        answer: dict[str, Any] = {}
        self._telemetry.http.began(scope["method"])
        observed = sender(seen, send, answer.update)
        try:
            await self._app(scope, receive, observed)
        except Exception as error:
            if answer:
                raise  # it has begun: only the end of the connection says that this is no answer
            await error_response(error, scope)(scope, receive, observed)
        finally:
            handled = Handled(
                handler_of(scope),
                scope["method"],
                answer.get("status", 500),
                time.monotonic() - began,
                _length(headers),
                _length(Headers(raw=answer.get("headers", []))),
            )
            self._telemetry.over(seen, handled)


def _length(headers: Headers) -> int:
    """As it was said; a stream says nothing."""
    said = headers.get("content-length", "")
    return int(said) if said.isdecimal() else 0


@router.get("/metrics", tags=["metrics"])
async def show_metrics(http: Request) -> Response:
    """Counters for Prometheus, of all processes of this server."""
    telemetry = http.app.state.telemetry
    assert isinstance(telemetry, Telemetry), telemetry
    encode, kind = choose_encoder(http.headers.get("accept", ""))
    registry = _Registry(await telemetry.families(), http.app.state.services.shared_folder is None)
    return Response(await asyncio.to_thread(encode, registry), media_type=kind)  # takes 10 ms


@router.get("/load", tags=["metrics"])
async def show_load(http: Request) -> Response:
    """Requests under way, what waits in the engine, and when a request that came now would begin.

    What the engine does not tell in time is left out.
    """
    if not http.app.state.services.options.enable_server_load_tracking:
        raise HTTPException(404, "load is not tracked here (--no-enable-server-load-tracking)")
    telemetry = http.app.state.telemetry
    told: dict[str, float] = {"server_load": telemetry.load}
    now = await telemetry.snapshot(LOAD_S)
    if now is not None:
        door = now.door
        told |= {
            "queued_requests": door.requests,
            "queued_tokens": door.queued_tokens,
            "predicted_ttft_s": round(door.predicted_ttft_s, 4),
        }
        if door.max_requests:
            told["max_queued_requests"] = door.max_requests
        if door.max_queued_tokens:
            told["max_queued_tokens"] = door.max_queued_tokens
    return json_response(told)


class _Registry(CollectorRegistry):
    """What an encoder wants: an object that has families to collect.

    alone: there is one API process, so that its own figures mean something.
    """

    def __init__(self, families: Sequence[Family], alone: bool) -> None:
        super().__init__()
        self._families = families
        if alone:
            ProcessCollector(registry=self)
            PlatformCollector(registry=self)
            GCCollector(registry=self)

    def collect(self) -> Iterator[Family]:
        yield from self._families
        yield from super().collect()


def install(app: FastAPI, to: Services, routers: Iterable[APIRouter]) -> None:
    """Observe an app whose routes are those of `routers`. Raises ConfigError."""
    endpoint = to.options.otlp_traces_endpoint
    tracing = None if endpoint is None else tracing_to(endpoint, to.names[0], VERSION)
    routes = [route for one in (*routers, router, app.router) for route in one.routes]
    telemetry = Telemetry(to, routes, tracing, app.state.keys)
    app.state.telemetry = telemetry
    app.include_router(router)
    app.add_middleware(Observed, telemetry=telemetry)
    around = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with around(app) as state, telemetry.running():
            yield state

    app.router.lifespan_context = lifespan

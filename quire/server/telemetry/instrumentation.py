"""Installs the telemetry: middleware, GET /metrics and /load, the statistics log, traces.

install_telemetry() is called once, when the app has its routes. One `Telemetry` per app owns the
counters of its process and all that write to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from functools import partial
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
from quire.core.types import Request as CoreRequest
from quire.errors import QuireError
from quire.server.app_state import VERSION, AppState
from quire.server.auth.api_keys import KeySet
from quire.server.errors import error_response
from quire.server.formats.sse import build_json_response
from quire.server.generation.events import GenerationEvent
from quire.server.telemetry import metrics
from quire.server.telemetry.http_metrics import (
    LOAD_COUNTER,
    HandledRequest,
    HttpMetrics,
    route_handler,
)
from quire.server.telemetry.request_log import RequestLog
from quire.server.telemetry.request_timer import TIMER_SCOPE_KEY, RequestTimer, wrap_send
from quire.server.telemetry.shared_counters import SharedCounters
from quire.server.telemetry.stats_logger import StatsLogger
from quire.server.telemetry.tracing import RequestTracer, build_tracer
from quire.text.input_processor import PreparedRequest

log = logging.getLogger(__name__)

router = APIRouter()

SNAPSHOT_TIMEOUT_S = 5.0
"""Time that the engine may take to send its counters: it answers between two steps."""
LOAD_TIMEOUT_S = 0.5
"""The same for /load, which a balancer waits for."""


class Telemetry:
    """The telemetry of one app. A RequestObserver."""

    def __init__(
        self,
        state: AppState,
        routes: Iterable[BaseRoute],
        tracing: RequestTracer | None,
        keys: KeySet,
    ) -> None:
        self._app_state = state
        self._keys = keys
        self.http = HttpMetrics(routes)
        places = [*self.http.counter_names(), *metrics.request_counter_names(state.max_model_len)]
        self.counters = SharedCounters(places, state.counters_folder)
        self.http.attach(self.counters)
        self.request_log = RequestLog(state.options)
        self.tracing = tracing
        self.prefixes = {"both": ("quire", "vllm")}.get(
            state.options.metrics_prefix, (state.options.metrics_prefix,)
        )
        keys.reload_counts = lambda result: self.counters.add(f"key_file_reads {result}")
        on_http_end = None if tracing is None else tracing.on_request_end
        self.request_metrics = metrics.RequestMetrics(
            self.counters, state.max_model_len, over=on_http_end
        )
        if state.log_stats or tracing is not None:
            state.engine.observer = self.request_metrics
        if state.inputs.media is not None:
            state.inputs.media.pipeline.cache.on_find = self._count_lookup

    def _count_lookup(self, found: bool) -> None:
        self.counters.add("mm_cache_queries")
        if found:
            self.counters.add("mm_cache_hits")

    # -- one request ------------------------------------------------------------------------------

    @property
    def logs_answers(self) -> bool:
        return self.request_log.logs_outputs

    def on_submitted(
        self, headers: Mapping[str, str], public_id: str, prepared: Sequence[PreparedRequest]
    ) -> None:
        """These requests are given to the engine now."""
        self.request_log.log_request(public_id, prepared)
        if self.tracing is not None:
            self.tracing.on_submitted(headers, [one.request.id for one in prepared])

    def on_pooling_submitted(
        self, headers: Mapping[str, str], public_id: str, requests: Sequence[CoreRequest]
    ) -> None:
        """These pooling requests of one body are given to the engine now."""
        self.request_log.log_pooling(public_id, requests)
        if self.tracing is not None:
            self.tracing.on_submitted(headers, [one.id for one in requests])

    def on_events(
        self, public_id: str, texts: dict[int, str], events: Sequence[GenerationEvent]
    ) -> None:
        """A generation yielded these events."""
        self.request_log.log_events(public_id, texts, events)

    def on_http_end(self, seen: RequestTimer, handled: HandledRequest) -> None:
        """An HTTP request is over."""
        self.http.record_end(handled)
        if self.tracing is not None:
            self.tracing.forget(
                [one for one in seen.request_ids if not self.request_metrics.has(one)]
            )

    # -- queries ----------------------------------------------------------------------------------

    @property
    def requests_in_progress(self) -> int:
        """Requests under way, in all API processes."""
        return round(self.counters.totals()[self.counters.index_by_name[LOAD_COUNTER]])

    async def collect(self) -> list[Family]:
        """Everything, now."""
        state, totals = self._app_state, self.counters.totals()
        model = {"model_name": state.served_model_names[0]}
        labels = {**model, "engine": "0" if self.num_engines == 1 else "all"}
        found = list(self.http.collect(totals))
        if not state.log_stats:
            return found
        for prefix in self.prefixes:
            found += metrics.collect_request_metrics(
                self.counters, totals, state.max_model_len, labels, prefix
            )
        for engine, now in enumerate(await self.fetch_snapshots()):
            if now is not None:
                found += self._collect_engine(
                    engine, now, {**model, "engine": str(self._app_state.engine.ranks[engine])}
                )
        return _merge_families(found)

    def _collect_engine(
        self, engine: int, now: Snapshot, labels: metrics.Labels
    ) -> Iterator[Family]:
        client = self._app_state.engine.clients[engine]
        for prefix in self.prefixes:
            yield from metrics.collect_engine_metrics(
                now, sleep_state_label(client.sleeping_tags), client.restarts, labels, prefix
            )
        yield from metrics.collect_key_metrics(now, self._keys.names, labels)

    @property
    def num_engines(self) -> int:
        return len(self._app_state.engine.clients)

    async def fetch_snapshots(self, within_s: float | None = None) -> list[Snapshot | None]:
        """Each engine's own; None of one that does not answer."""
        each = (self.fetch_snapshot(engine, within_s) for engine in range(self.num_engines))
        return list(await asyncio.gather(*each))

    async def fetch_snapshot(
        self, engine: int = 0, within_s: float | None = None
    ) -> Snapshot | None:
        """One engine's own; None if it does not answer."""
        try:
            return await asyncio.wait_for(
                self._app_state.engine.snapshot(0, False, engine=engine),
                within_s or SNAPSHOT_TIMEOUT_S,
            )
        except (QuireError, TimeoutError):
            return None

    # -- its life ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While the app does."""
        tasks = []
        interval = self._app_state.options.log_stats_interval
        if self._app_state.log_stats and self._app_state.process_index == 0 and interval:
            for engine in range(self.num_engines):
                name = f"Engine {engine:03}: " if self.num_engines > 1 else ""
                look = partial(self.fetch_snapshot, engine)
                statistics = StatsLogger(self.counters, look, name=name)
                tasks.append(asyncio.create_task(statistics.log_every(interval)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            if self.tracing is not None:
                await asyncio.to_thread(self.tracing.shut_down)


def sleep_state_label(sleeping: frozenset[str]) -> str:
    """The word for what sleeps. Weights that are kept and not used count as offloaded."""
    return "weights_offloaded" if "weights" in sleeping else "awake"


def _merge_families(families: Iterable[Family]) -> list[Family]:
    """One family of each name, with the samples of all engines.

    Ours have one name whatever the prefix, and so come twice with two.
    """
    found: dict[str, Family] = {}
    for family in families:
        first = found.setdefault(family.name, family)
        if first is not family:
            first.samples += [one for one in family.samples if one not in first.samples]
    return list(found.values())


class MetricsMiddleware:
    """The outermost middleware: each HTTP request gets a Watch, and is counted when it is over.

    Unexpected exceptions end here: further out the server would close the connection behind
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
        seen = scope[TIMER_SCOPE_KEY] = RequestTimer(began, headers, self._telemetry)
        answer: dict[str, Any] = {}
        self._telemetry.http.record_start(scope["method"])
        observed = wrap_send(seen, send, answer.update)
        try:
            await self._app(scope, receive, observed)
        except Exception as error:
            if answer:
                raise  # it has begun: only the end of the connection shows the fault
            await error_response(error, scope)(scope, receive, observed)
        finally:
            handled = HandledRequest(
                route_handler(scope),
                scope["method"],
                answer.get("status", 500),
                time.monotonic() - began,
                _content_length(headers),
                _content_length(Headers(raw=answer.get("headers", []))),
            )
            self._telemetry.on_http_end(seen, handled)


def _content_length(headers: Headers) -> int:
    """The declared length; a stream has none."""
    length = headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


def get_telemetry(http: Request) -> Telemetry:
    """The telemetry of the app that this request came to."""
    found = http.app.state.telemetry
    assert isinstance(found, Telemetry), found
    return found


@router.get("/metrics", tags=["metrics"])
async def show_metrics(http: Request) -> Response:
    """Counters for Prometheus, of all processes of this server."""
    telemetry = get_telemetry(http)
    encode, kind = choose_encoder(http.headers.get("accept", ""))
    registry = _FamilyRegistry(
        await telemetry.collect(), http.app.state.app_state.counters_folder is None
    )
    return Response(await asyncio.to_thread(encode, registry), media_type=kind)  # takes 10 ms


@router.get("/load", tags=["metrics"])
async def show_load(http: Request) -> Response:
    """Requests under way, what waits in the engine, and when a request that came now would begin.

    What the engine does not send in time is left out.
    """
    if not http.app.state.app_state.options.enable_server_load_tracking:
        raise HTTPException(404, "load is not tracked here (--no-enable-server-load-tracking)")
    telemetry = get_telemetry(http)
    body: dict[str, float] = {"server_load": telemetry.requests_in_progress}
    found = await telemetry.fetch_snapshots(LOAD_TIMEOUT_S)
    admissions = [now.admission for now in found if now is not None]
    if admissions:
        body |= {
            "queued_requests": sum(one.requests for one in admissions),
            "queued_tokens": sum(one.queued_tokens for one in admissions),
            "predicted_ttft_s": round(min(one.predicted_ttft_s for one in admissions), 4),
        }
        for name in ("max_requests", "max_queued_tokens"):
            if most := sum(getattr(one, name) for one in admissions):
                body["max_queued_requests" if name == "max_requests" else name] = most
    return build_json_response(body)


class _FamilyRegistry(CollectorRegistry):
    """Registry for an encoder: it collects the given families.

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


def install_telemetry(app: FastAPI, state: AppState, routers: Iterable[APIRouter]) -> None:
    """Observe an app whose routes are those of `routers`. Raises ConfigError."""
    endpoint = state.options.otlp_traces_endpoint
    tracing = (
        None if endpoint is None else build_tracer(endpoint, state.served_model_names[0], VERSION)
    )
    routes = [route for one in (*routers, router, app.router) for route in one.routes]
    telemetry = Telemetry(state, routes, tracing, app.state.keys)
    app.state.telemetry = telemetry
    app.include_router(router)
    app.add_middleware(MetricsMiddleware, telemetry=telemetry)
    around = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with around(app) as lifespan_state, telemetry.running():
            yield lifespan_state

    app.router.lifespan_context = lifespan

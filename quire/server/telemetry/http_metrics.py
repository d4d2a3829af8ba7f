"""Counts HTTP requests by handler, method and status class, with times, sizes and active requests.

A handler is the path of a route as it was declared ("/v1/models/{name:path}"); a request without a
route has "none". Probes and reads of the metrics are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.core import Metric as Family
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from quire.server.telemetry import metric_specs as names
from quire.server.telemetry.metrics import add_histogram_series
from quire.server.telemetry.shared_counters import (
    SharedCounters,
    SharedHistogram,
    histogram_counter_names,
)

_EXCLUDED_PATHS = "/metrics /health /live /ready /load /ping /version /server_info /quire/live"
EXCLUDED_PATHS = frozenset(_EXCLUDED_PATHS.split())
NO_HANDLER = "none"
STATUSES = ("1xx", "2xx", "3xx", "4xx", "5xx")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
LOAD_COUNTER = "load"
"""Requests under way that may make the engine work."""


class HandledRequest(NamedTuple):
    """One request that is over."""

    handler: str
    method: str
    status: int
    seconds: float
    request_bytes: int
    response_bytes: int


class HttpMetrics:
    """Metrics of the handlers of an app."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._methods = _methods(routes)
        self._counters: SharedCounters | None = None
        self._times: dict[tuple[str, str], SharedHistogram] = {}

    def counter_names(self) -> Iterator[str]:
        """Names of the shared counters."""
        yield LOAD_COUNTER
        yield from histogram_counter_names("http all", names.HTTP_FINE_BUCKETS_S)
        for handler, method in self._handler_methods():
            yield from (f"http {handler} {method} {status}" for status in STATUSES)
            yield from histogram_counter_names(f"http {handler} {method}", names.HTTP_BUCKETS_S)
        for handler in self._methods:
            for way in ("request", "response"):
                yield f"http {handler} {way} count"
                yield f"http {handler} {way} bytes"

    def attach(self, board: SharedCounters) -> None:
        """Count on this board, which has our names."""
        self._counters = board
        self._all = SharedHistogram(board, "http all", names.HTTP_FINE_BUCKETS_S)
        for handler, method in self._handler_methods():
            place = f"http {handler} {method}"
            self._times[handler, method] = SharedHistogram(board, place, names.HTTP_BUCKETS_S)

    def record_start(self, method: str) -> None:
        """A request came."""
        if method == "POST" and self._counters is not None:
            self._counters.add(LOAD_COUNTER)

    def record_end(self, handled: HandledRequest) -> None:
        """A request was answered, or broke off."""
        board = self._counters
        assert board is not None, "use() comes first"
        if handled.method == "POST":
            board.add(LOAD_COUNTER, -1.0)
        handler, method, status, seconds, asked, answered = handled
        if handler in EXCLUDED_PATHS:
            return
        if method not in self._methods.get(handler, ()):
            handler, method = NO_HANDLER, method if method in METHODS else "GET"
        board.add(f"http {handler} {method} {status // 100}xx")
        self._times[handler, method].observe(seconds)
        self._all.observe(seconds)
        for way, size in (("request", asked), ("response", answered)):
            board.add(f"http {handler} {way} count")
            board.add(f"http {handler} {way} bytes", size)

    def collect(self, totals: Sequence[float]) -> Iterator[Family]:
        """The families, without series that are 0."""
        assert self._counters is not None, "use() comes first"
        place = self._counters.index_by_name
        about = {one.name: one.help for one in names.HTTP_METRICS}
        requests = CounterMetricFamily(
            "http_requests", about["http_requests_total"], labels=["handler", "method", "status"]
        )
        times = HistogramMetricFamily(
            "http_request_duration_seconds",
            about["http_request_duration_seconds"],
            labels=["handler", "method"],
        )
        for handler, method in self._handler_methods():
            for status in STATUSES:
                if count := totals[place[f"http {handler} {method} {status}"]]:
                    requests.add_metric([handler, method, status], count)
            numbers = _histogram_at(totals, place, f"http {handler} {method}", names.HTTP_BUCKETS_S)
            if any(numbers):
                add_histogram_series(times, names.HTTP_BUCKETS_S, numbers, [handler, method])
        yield requests
        yield times
        yield from self._collect_sizes(totals, place, about)
        name = "http_request_duration_highr_seconds"
        fine = HistogramMetricFamily(name, about[name], labels=[])
        numbers = _histogram_at(totals, place, "http all", names.HTTP_FINE_BUCKETS_S)
        add_histogram_series(fine, names.HTTP_FINE_BUCKETS_S, numbers, [])
        yield fine

    def _collect_sizes(
        self, totals: Sequence[float], place: Mapping[str, int], about: Mapping[str, str]
    ) -> Iterator[Family]:
        for way in ("request", "response"):
            name = f"http_{way}_size_bytes"
            family = SummaryMetricFamily(name, about[name], labels=["handler"])
            for handler in self._methods:
                if count := totals[place[f"http {handler} {way} count"]]:
                    total = totals[place[f"http {handler} {way} bytes"]]
                    family.add_metric([handler], int(count), total)
            yield family

    def _handler_methods(self) -> Iterator[tuple[str, str]]:
        for handler, methods in self._methods.items():
            for method in methods:
                yield handler, method


def route_handler(scope: Scope) -> str:
    """The route that took a request, after it was routed."""
    route = scope.get("route")
    return route.path if isinstance(route, Route) else NO_HANDLER


def _methods(routes: Iterable[BaseRoute]) -> dict[str, tuple[str, ...]]:
    """By handler."""
    found: dict[str, set[str]] = {}
    for route in routes:
        if isinstance(route, Route) and route.path not in EXCLUDED_PATHS:
            found.setdefault(route.path, set()).update(route.methods or METHODS)
    handlers = {path: tuple(sorted(found[path])) for path in sorted(found)}
    return {**handlers, NO_HANDLER: METHODS}


def _histogram_at(
    totals: Sequence[float], place: Mapping[str, int], name: str, bounds: Sequence[float]
) -> Sequence[float]:
    first = place[histogram_counter_names(name, bounds)[0]]
    return totals[first : first + len(bounds) + 2]

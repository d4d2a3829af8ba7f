"""Counts what requests do, and writes it down for Prometheus.

A `Recorder` watches the door to the engine (an Observer of EngineClient) and counts on the board
of its process; `exposition` adds the boards of all processes up and asks the engine for its own
counters, when somebody reads. Nothing is kept twice, and no window is kept at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)

from quire.core import figures
from quire.core.snapshot import Snapshot
from quire.core.timing import Timing
from quire.core.types import Request, Update
from quire.server import metric_names as names
from quire.server.board import Board, Histogram, histogram_names
from quire.server.metric_names import Metric

Clock = Callable[[], float]
Labels = Mapping[str, str]


class Life:
    """What is remembered of a request while it lives. Times by the clock; by index where of n."""

    __slots__ = ("cached", "firsts", "lasts", "open", "reasons", "request", "timings", "tokens")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.open = set(range(request.n))
        self.firsts: list[float | None] = [None] * request.n
        self.lasts = [0.0] * request.n
        self.tokens = [0] * request.n
        self.timings: list[Timing | None] = [None] * request.n
        self.reasons: list[str | None] = [None] * request.n
        self.cached = 0


class Recorder:
    """Observes one EngineClient. `over`: told of each request when its last sequence has ended."""

    def __init__(
        self,
        board: Board,
        max_model_len: int,
        *,
        over: Callable[[Life], None] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._board = board
        self._clock = clock
        self._over = over
        self._lives: dict[str, Life] = {}
        self._histograms = {
            one.name: Histogram(board, one.name, one.bounds_for(max_model_len))
            for one in names.OF_REQUESTS
            if one.kind == "histogram"
        }
        self._gaps = self._histograms["inter_token_latency_seconds"]

    def opened(self, requests: Sequence[Request]) -> None:
        """The engine has accepted these. A round of a larger search is no request of anybody."""
        for request in requests:
            if not request.hold:
                self._lives[request.id] = Life(request)

    def news(self, updates: Sequence[Update]) -> None:
        """Count tokens and ends. Runs for each token of each stream, so it is flat."""
        now, lives, see = self._clock(), self._lives, self._gaps.see
        for update in updates:
            life = lives.get(update.request_id)
            if life is None:
                continue
            count, index = len(update.token_ids), update.index
            if count:
                if life.firsts[index] is None:
                    self._first(life, update, now)
                else:
                    see((now - life.lasts[index]) / count, count)
                life.lasts[index] = now
                life.tokens[index] += count
            if update.timing is not None:
                life.timings[index] = update.timing
            if update.finish is not None:
                self._end(life, index, update.finish)

    def knows(self, request_id: str) -> bool:
        """The request lives."""
        return request_id in self._lives

    def ended(self, request_id: str, index: int) -> None:
        """A sequence was ended by its text."""
        life = self._lives.get(request_id)
        if life is not None and index in life.open:
            self._end(life, index, "stop")

    def only(self, request_ids: Container[str]) -> None:
        """The engine died, and another goes on with these only."""
        for life in [one for name, one in self._lives.items() if name not in request_ids]:
            for index in sorted(life.open):
                self._end(life, index, "abort")

    def _see(self, name: str, value: float) -> None:
        self._histograms[name].see(value)

    def _first(self, life: Life, update: Update, now: float) -> None:
        """The first update of a sequence; the only one, if the engine keeps news to the end."""
        timing, more = update.timing, len(update.token_ids) - 1
        at = now
        if more and timing is not None and timing.first_token_at is not None:
            at = timing.first_token_at
            self._gaps.see((timing.ended_at - at) / more, more)
        life.firsts[update.index] = at
        life.cached = update.cached_tokens
        self._see("time_to_first_token_seconds", at - life.request.arrived_at)

    def _end(self, life: Life, index: int, reason: str) -> None:
        life.reasons[index] = reason
        self._board.add(f"request_success {reason}")
        self._see("request_generation_tokens", life.tokens[index])
        timing, first, last = life.timings[index], life.firsts[index], life.lasts[index]
        if timing is not None:
            self._see("request_num_preemptions", timing.preemptions)
            self._see("request_queue_time_seconds", timing.aboard_at - timing.accepted_at)
            if first is not None and timing.first_token_at is not None:
                before = timing.aboard_at
                self._see("request_prefill_time_seconds", timing.first_token_at - before)
                self._see("request_inference_time_seconds", max(last - before, 0.0))
        if first is not None:
            self._see("request_decode_time_seconds", last - first)
            if life.tokens[index] > 1:
                mean = (last - first) / (life.tokens[index] - 1)
                self._see("request_time_per_output_token_seconds", mean)
        life.open.discard(index)
        if not life.open:
            self._forget(life)

    def _forget(self, life: Life) -> None:
        request = life.request
        del self._lives[request.id]
        self._see("e2e_request_latency_seconds", self._clock() - request.arrived_at)
        self._see("request_prompt_tokens", len(request.prompt))
        self._see("request_prefill_kv_computed_tokens", len(request.prompt) - life.cached)
        self._see("request_max_num_generation_tokens", max(life.tokens))
        self._see("request_params_max_tokens", request.stop.max_tokens)
        self._see("request_params_n", request.params.n)
        if self._over is not None:
            self._over(life)


def board_names(max_model_len: int) -> list[str]:
    """The numbers that a Recorder writes."""
    found: list[str] = []
    for one in names.OF_REQUESTS:
        if one.kind == "histogram":
            found += histogram_names(one.name, one.bounds_for(max_model_len))
        else:
            found += [f"{one.name} {value}" for value in one.values] or [one.name]
    return found


def of_requests(
    board: Board, totals: Sequence[float], max_model_len: int, labels: Labels, prefix: str
) -> Iterator[Family]:
    """What the API processes have counted."""
    for one in names.OF_REQUESTS:
        if one.kind == "histogram":
            bounds = one.bounds_for(max_model_len)
            first = board.place[histogram_names(one.name, bounds)[0]]
            numbers = totals[first : first + len(bounds) + 2]
            yield histogram(f"{prefix}:{one.name}", one.about, bounds, numbers, labels)
        else:
            cells = {
                value: totals[board.place[f"{one.name} {value}".rstrip()]]
                for value in one.values or ("",)
            }
            yield _plain(one, cells, labels, prefix)


def of_engine(
    now: Snapshot, sleep_state: str, restarts: int, labels: Labels, prefix: str
) -> Iterator[Family]:
    """What the engine has counted, and how it is."""
    cells = figures.gauges(now) | figures.counters(now)
    cells["engine_sleep_state"] = {one: float(one == sleep_state) for one in names.SLEEP_STATES}
    cells["engine_restarts"] = {"": float(restarts)}
    for one in names.OF_ENGINE:
        if one.name == "cache_config_info":
            yield _cache_info(one, now, labels, prefix)
        elif one.kind == "histogram":
            numbers = [*now.counters.step_tokens, now.counters.step_tokens_sum]
            bounds = one.bounds_for(0)
            yield histogram(f"{prefix}:{one.name}", one.about, bounds, numbers, labels)
        else:
            yield _plain(one, cells[one.name], labels, prefix)


def of_keys(now: Snapshot, keys: Mapping[bytes, str], labels: Labels) -> Iterator[Family]:
    """What the engine has counted of each key. keys: their names, by tenant."""
    found = figures.of_keys(now, keys)
    for one in names.OF_KEYS:
        if one.name in found:
            yield _plain(one, found[one.name], labels, "quire")


def histogram(
    name: str,
    about: str,
    bounds: Iterable[float],
    numbers: Sequence[float],
    labels: Labels,
) -> HistogramMetricFamily:
    """numbers: of each bucket by itself, of what is above, and the sum."""
    family = HistogramMetricFamily(name, about, labels=[*labels])
    add_histogram(family, bounds, numbers, [*labels.values()])
    return family


def add_histogram(
    family: HistogramMetricFamily,
    bounds: Iterable[float],
    numbers: Sequence[float],
    labels: Sequence[str],
) -> None:
    """One series of a family."""
    buckets, below = [], 0.0
    for bound, count in zip((*bounds, float("inf")), numbers):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), below))
    family.add_metric(labels, buckets, numbers[-1])


def _plain(one: Metric, cells: Mapping[str, float], labels: Labels, prefix: str) -> Family:
    """A counter or a gauge; cells: value of its own label -> number, "" if it has none."""
    prefix = "quire" if one.own else prefix
    kind = CounterMetricFamily if one.kind == "counter" else GaugeMetricFamily
    own = [] if one.label is None else [one.label]
    family = kind(f"{prefix}:{one.name}", one.about, labels=[*labels, *own])
    for value, number in cells.items():
        family.add_metric([*labels.values(), *([value] if own else [])], number)
    return family


def _cache_info(one: Metric, now: Snapshot, labels: Labels, prefix: str) -> Family:
    said = {
        **labels,
        "block_size": str(now.block_size),
        "num_gpu_blocks": str(now.stats.blocks),
        "num_cpu_blocks": str(now.stats.host_blocks),
    }
    family = GaugeMetricFamily(f"{prefix}:{one.name}", one.about, labels=[*said])
    family.add_metric([*said.values()], 1)
    return family

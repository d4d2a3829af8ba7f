"""Counts requests and exports the counters for Prometheus.

`RequestMetrics` observes the EngineClient and counts in the counters of its process; the export
adds the counters of all processes and reads those of the engine, on each scrape. Nothing is counted
twice, and there are no time windows.
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

from quire.core.accounting import metric_definitions
from quire.core.sequence_timing import SequenceTiming
from quire.core.snapshot import AdapterStats, Snapshot
from quire.core.types import Request, Update
from quire.server.telemetry import metric_specs as names
from quire.server.telemetry.metric_specs import MetricSpec
from quire.server.telemetry.shared_counters import (
    SharedCounters,
    SharedHistogram,
    histogram_counter_names,
)

Clock = Callable[[], float]
Labels = Mapping[str, str]


class RequestTimes:
    """Times of a request while it runs, by the clock; by index where it has n sequences."""

    __slots__ = (
        "cached_tokens",
        "finish_reasons",
        "first_token_times",
        "last_token_times",
        "open_indices",
        "request",
        "timings",
        "tokens",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.open_indices = set(range(request.n))
        self.first_token_times: list[float | None] = [None] * request.n
        self.last_token_times = [0.0] * request.n
        self.tokens = [0] * request.n
        self.timings: list[SequenceTiming | None] = [None] * request.n
        self.finish_reasons: list[str | None] = [None] * request.n
        self.cached_tokens = 0


class RequestMetrics:
    """Observes one EngineClient. `over` is called when all of a request has ended."""

    def __init__(
        self,
        board: SharedCounters,
        max_model_len: int,
        *,
        over: Callable[[RequestTimes], None] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._counters = board
        self._clock = clock
        self._on_request_end = over
        self._requests: dict[str, RequestTimes] = {}
        self._histograms = {
            one.name: SharedHistogram(board, one.name, one.bounds_for(max_model_len))
            for one in names.REQUEST_METRICS
            if one.kind == "histogram"
        }
        self._itl_histogram = self._histograms["inter_token_latency_seconds"]

    def on_requests_accepted(self, requests: Sequence[Request]) -> None:
        """The engine has accepted these. A round of a beam search does not count."""
        for request in requests:
            if not request.hold:
                self._requests[request.id] = RequestTimes(request)

    def on_updates(self, updates: Sequence[Update]) -> None:
        """Count tokens and ends. Runs for each token of each stream, so it is flat."""
        now, lives, see = self._clock(), self._requests, self._itl_histogram.observe
        for update in updates:
            life = lives.get(update.request_id)
            if life is None:
                continue
            count, index = len(update.token_ids), update.index
            if count:
                if life.first_token_times[index] is None:
                    self._record_first_token(life, update, now)
                else:
                    see((now - life.last_token_times[index]) / count, count)
                life.last_token_times[index] = now
                life.tokens[index] += count
            if update.timing is not None:
                life.timings[index] = update.timing
            if update.pooled is not None:
                life.cached_tokens = update.cached_tokens
            if update.finish is not None:
                self._record_end(life, index, update.finish)

    def has(self, request_id: str) -> bool:
        """The request lives."""
        return request_id in self._requests

    def on_sequence_ended(self, request_id: str, index: int) -> None:
        """A sequence was ended by its text."""
        life = self._requests.get(request_id)
        if life is not None and index in life.open_indices:
            self._record_end(life, index, "stop")

    def retain_requests(self, request_ids: Container[str]) -> None:
        """The engine died; its successor continues these requests only."""
        for life in [one for name, one in self._requests.items() if name not in request_ids]:
            for index in sorted(life.open_indices):
                self._record_end(life, index, "abort")

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def _record_first_token(self, life: RequestTimes, update: Update, now: float) -> None:
        """The first update of a sequence; the only one, if the engine keeps news to the end."""
        timing, more = update.timing, len(update.token_ids) - 1
        at = now
        if more and timing is not None and timing.first_token_at is not None:
            at = timing.first_token_at
            self._itl_histogram.observe((timing.ended_at - at) / more, more)
        life.first_token_times[update.index] = at
        life.cached_tokens = update.cached_tokens
        self._observe("time_to_first_token_seconds", at - life.request.arrived_at)

    def _record_end(self, life: RequestTimes, index: int, reason: str) -> None:
        life.finish_reasons[index] = reason
        self._counters.add(f"request_success {reason}")
        self._observe("request_generation_tokens", life.tokens[index])
        timing, first, last = (
            life.timings[index],
            life.first_token_times[index],
            life.last_token_times[index],
        )
        if timing is not None:
            self._observe("request_num_preemptions", timing.preemptions)
            self._observe("request_queue_time_seconds", timing.scheduled_at - timing.accepted_at)
            if life.request.pooling is not None:
                spent = timing.ended_at - timing.scheduled_at  # all of it is prompt
                self._observe("request_prefill_time_seconds", spent)
                self._observe("request_inference_time_seconds", spent)
            if first is not None and timing.first_token_at is not None:
                before = timing.scheduled_at
                self._observe("request_prefill_time_seconds", timing.first_token_at - before)
                self._observe("request_inference_time_seconds", max(last - before, 0.0))
        if first is not None:
            self._observe("request_decode_time_seconds", last - first)
            if life.tokens[index] > 1:
                mean = (last - first) / (life.tokens[index] - 1)
                self._observe("request_time_per_output_token_seconds", mean)
        life.open_indices.discard(index)
        if not life.open_indices:
            self._forget(life)

    def _forget(self, life: RequestTimes) -> None:
        request = life.request
        del self._requests[request.id]
        self._observe("e2e_request_latency_seconds", self._clock() - request.arrived_at)
        self._observe("request_prompt_tokens", request.num_prompt_tokens)
        self._observe(
            "request_prefill_kv_computed_tokens", len(request.prompt) - life.cached_tokens
        )
        self._observe("request_max_num_generation_tokens", max(life.tokens))
        if request.pooling is None:
            self._observe("request_params_max_tokens", request.stop.max_tokens)
        self._observe("request_params_n", request.params.n)
        if self._on_request_end is not None:
            self._on_request_end(life)


def request_counter_names(max_model_len: int) -> list[str]:
    """The numbers that RequestMetrics writes."""
    found: list[str] = []
    for one in names.REQUEST_METRICS:
        if one.kind == "histogram":
            found += histogram_counter_names(one.name, one.bounds_for(max_model_len))
        else:
            found += [f"{one.name} {value}" for value in one.values] or [one.name]
    return found


def collect_request_metrics(
    board: SharedCounters, totals: Sequence[float], max_model_len: int, labels: Labels, prefix: str
) -> Iterator[Family]:
    """Families of the counters of the API processes."""
    for one in names.REQUEST_METRICS:
        if one.kind == "histogram":
            bounds = one.bounds_for(max_model_len)
            first = board.index_by_name[histogram_counter_names(one.name, bounds)[0]]
            numbers = totals[first : first + len(bounds) + 2]
            yield build_histogram(f"{prefix}:{one.name}", one.help, bounds, numbers, labels)
        else:
            cells = {
                value: totals[board.index_by_name[f"{one.name} {value}".rstrip()]]
                for value in one.values or ("",)
            }
            yield _build_simple_metric(one, cells, labels, prefix)


def collect_engine_metrics(
    now: Snapshot, sleep_state: str, restarts: int, labels: Labels, prefix: str
) -> Iterator[Family]:
    """Families of the engine's counters and of its state."""
    cells = metric_definitions.gauges(now) | metric_definitions.counters(now)
    cells["engine_sleep_state"] = {one: float(one == sleep_state) for one in names.SLEEP_STATES}
    cells["engine_restarts"] = {"": float(restarts)}
    for one in names.ENGINE_METRICS:
        if one.name == "cache_config_info":
            yield _build_cache_info(one, now, labels, prefix)
        elif one.name == "lora_requests_info":
            yield _build_adapter_info(one, now.adapters, labels, prefix)
        elif one.kind == "histogram":
            numbers = [*now.counters.step_tokens, now.counters.step_tokens_sum]
            bounds = one.bounds_for(0)
            yield build_histogram(f"{prefix}:{one.name}", one.help, bounds, numbers, labels)
        else:
            yield _build_simple_metric(one, cells[one.name], labels, prefix)


def _build_adapter_info(
    spec: MetricSpec, adapters: AdapterStats, labels: Labels, prefix: str
) -> Family:
    """One series: those of earlier states are not kept."""
    family = GaugeMetricFamily(
        f"{prefix}:{spec.name}",
        spec.help,
        labels=[*labels, "max_lora", "waiting_lora_adapters", "running_lora_adapters"],
    )
    if adapters.max_adapters:
        waiting, running = (",".join(sorted(one)) for one in (adapters.waiting, adapters.running))
        values = [*labels.values(), str(adapters.max_adapters), waiting, running]
        family.add_metric(values, time.time())
    return family


def collect_key_metrics(
    now: Snapshot, keys: Mapping[bytes, str], labels: Labels
) -> Iterator[Family]:
    """Families of the engine's counters by key. keys: their names, by tenant."""
    found = metric_definitions.per_key_counters(now, keys)
    for one in names.KEY_METRICS:
        if one.name in found:
            yield _build_simple_metric(one, found[one.name], labels, "quire")


def build_histogram(
    name: str,
    about: str,
    bounds: Iterable[float],
    numbers: Sequence[float],
    labels: Labels,
) -> HistogramMetricFamily:
    """numbers: of each bucket by itself, of what is above, and the sum."""
    family = HistogramMetricFamily(name, about, labels=[*labels])
    add_histogram_series(family, bounds, numbers, [*labels.values()])
    return family


def add_histogram_series(
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


def _build_simple_metric(
    one: MetricSpec, cells: Mapping[str, float], labels: Labels, prefix: str
) -> Family:
    """A counter or a gauge; cells: value of its own label -> number, "" if it has none."""
    prefix = "quire" if one.is_quire_only else prefix
    kind = CounterMetricFamily if one.kind == "counter" else GaugeMetricFamily
    own = [] if one.label is None else [one.label]
    family = kind(f"{prefix}:{one.name}", one.help, labels=[*labels, *own])
    for value, number in cells.items():
        family.add_metric([*labels.values(), *([value] if own else [])], number)
    return family


def _build_cache_info(one: MetricSpec, now: Snapshot, labels: Labels, prefix: str) -> Family:
    info = {
        **labels,
        "block_size": str(now.block_size),
        "num_gpu_blocks": str(now.stats.blocks),
        "num_cpu_blocks": str(now.stats.host_blocks),
    }
    family = GaugeMetricFamily(f"{prefix}:{one.name}", one.help, labels=[*info])
    family.add_metric([*info.values()], 1)
    return family

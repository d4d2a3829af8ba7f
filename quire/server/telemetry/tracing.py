"""OpenTelemetry traces: one span for each request (--otlp-traces-endpoint).

A span runs from arrival to the last token, is a child of the caller's (header traceparent), and has
a child for each phase; attributes have the names of the field (gen_ai.*). It is made after the end
of the request, from what was counted anyway: while a request runs, tracing costs nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quire.core.sequence_timing import BREAKDOWN_WITH_RECOVERY_FIELDS, SequenceTiming
from quire.errors import ConfigError
from quire.server.telemetry.metrics import RequestTimes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

FLUSH_TIMEOUT_S = 2.0
"""So long the end of the server waits for a collector."""
TRACE_HEADERS = ("traceparent", "tracestate")
"""Headers with the parent of a span."""


class RequestTracer:
    """Makes spans of requests that are over."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("quire")
        self._model = model
        self._trace_contexts: dict[str, dict[str, str]] = {}

    def on_submitted(self, headers: Mapping[str, str], request_ids: Sequence[str]) -> None:
        """These requests come of an HTTP request with such headers."""
        carried = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        if carried:
            self._trace_contexts.update(dict.fromkeys(request_ids, carried))

    def forget(self, request_ids: Sequence[str]) -> None:
        """The engine did not take them."""
        for request_id in request_ids:
            self._trace_contexts.pop(request_id, None)

    def on_request_end(self, life: RequestTimes) -> None:
        """The last sequence of a request has ended: make its spans."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        request = life.request
        carried = self._trace_contexts.pop(request.id, {})
        now = time.monotonic()
        epoch = time.time() - now  # from the monotonic clock to the one on the wall
        span = self._tracer.start_span(
            "llm_request",
            context=TraceContextTextMapPropagator().extract(carried),
            kind=SpanKind.SERVER,
            attributes=span_attributes(life, self._model, now),
            start_time=_to_ns(request.arrived_at + epoch),
        )
        if "error" in life.finish_reasons:
            span.set_status(Status(StatusCode.ERROR))
        self._add_phases(span, life, epoch)
        span.end(_to_ns(now + epoch))

    def shut_down(self) -> None:
        """Send what was not sent yet, in LAST_SPANS_S at most. Blocks."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(FLUSH_TIMEOUT_S)

    def _add_phases(self, parent: Any, life: RequestTimes, epoch: float) -> None:
        from opentelemetry.trace import set_span_in_context

        within = set_span_in_context(parent)
        for name, start, end in request_phases(life):
            span = self._tracer.start_span(name, context=within, start_time=_to_ns(start + epoch))
            span.end(_to_ns(end + epoch))


def request_phases(life: RequestTimes) -> list[tuple[str, float, float]]:
    """Phases of the sequence that ended last: waiting, prompt, and generation."""
    timing, last = _last_timing(life)
    if timing is None:
        return []
    arrived, scheduled = life.request.arrived_at, timing.scheduled_at
    first = timing.first_token_at
    found = [("queue", arrived, max(scheduled, arrived))]
    if life.request.pooling is not None:
        found.append(("prefill", scheduled, timing.ended_at))
    if first is not None:
        found.append(("prefill", scheduled, first))
        if last > first:
            found.append(("decode", first, last))
    return found


def span_attributes(life: RequestTimes, model: str, now: float) -> dict[str, Any]:
    """Attributes of the span of a request. Times are seconds."""
    request, params = life.request, life.request.params
    generated = sum(life.tokens)
    attributes: dict[str, Any] = {
        "gen_ai.response.model": model,
        "gen_ai.request.id": request.id,
        "gen_ai.response.finish_reasons": [reason or "" for reason in life.finish_reasons],
        "gen_ai.usage.num_sequences": request.n,
        "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": generated,
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "gen_ai.usage.output_tokens": generated,
        "gen_ai.latency.e2e": now - request.arrived_at,
        "quire.usage.cached_tokens": life.cached_tokens,
    }
    if request.adapter is not None:
        attributes["gen_ai.response.model"] = request.adapter.name
        attributes["quire.request.adapter_digest"] = request.adapter.digest.hex()
    if request.pooling is not None:
        attributes["quire.request.pooling_task"] = request.pooling.task
    else:
        attributes["gen_ai.request.max_tokens"] = request.stop.max_tokens
        attributes["gen_ai.request.temperature"] = params.temperature
        attributes["gen_ai.request.top_p"] = params.top_p
        attributes["gen_ai.request.n"] = params.n
    firsts = [at for at in life.first_token_times if at is not None]
    if firsts:
        attributes["gen_ai.latency.time_to_first_token"] = min(firsts) - request.arrived_at
    timing, last = _last_timing(life)
    if timing is not None:
        attributes["gen_ai.latency.time_in_queue"] = timing.scheduled_at - timing.accepted_at
        if timing.first_token_at is not None:
            scheduled, first = timing.scheduled_at, timing.first_token_at
            attributes["gen_ai.latency.time_in_model_prefill"] = first - scheduled
            attributes["gen_ai.latency.time_in_model_decode"] = max(last - first, 0.0)
            attributes["gen_ai.latency.time_in_model_inference"] = max(last, first) - scheduled
        attributes |= {
            f"quire.time.{name}": cut
            for name, cut in zip(BREAKDOWN_WITH_RECOVERY_FIELDS, timing.breakdown_with_recovery)
        }
        attributes["quire.preemptions"] = timing.preemptions
    return attributes


def build_tracer(endpoint: str, model: str, version: str) -> RequestTracer:
    """Traces sent to a collector over HTTP. Raises ConfigError."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs packages that are not here ({error}); "
            "pip install 'quire-llm[otel]'"
        ) from None
    resource = Resource.create({"service.name": "quire", "service.version": version})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # stop() does it
    exporter = OTLPSpanExporter(endpoint=check_otlp_endpoint(endpoint))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return RequestTracer(provider, model)


def check_otlp_endpoint(endpoint: str) -> str:
    """The whole URL of a collector. Raises ConfigError for what is none over HTTP."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"otlp_traces_endpoint must be an HTTP URL such as http://localhost:4318/v1/traces "
            f"(OTLP over HTTP, usually port 4318), got {endpoint!r}"
        )
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


def _last_timing(life: RequestTimes) -> tuple[SequenceTiming | None, float]:
    """Timing and last token's time of the sequence that ended last."""
    index = max(range(life.request.n), key=lambda i: life.last_token_times[i])
    return life.timings[index], life.last_token_times[index]


def _to_ns(seconds: float) -> int:
    return int(seconds * 1e9)

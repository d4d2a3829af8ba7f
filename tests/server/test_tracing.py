"""Traces: a span for each request, a child of the caller's, with what the field calls things."""

import builtins
import gzip
import http.server
import threading

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from quire.core.types import AdapterRef, Request, StopConditions
from quire.errors import ConfigError
from quire.server.options import ServerOptions
from quire.server.telemetry import instrumentation, tracing
from quire.server.telemetry.metrics import RequestTimes
from tests.server.harness import Server

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"


@pytest.fixture
def spans():
    return InMemorySpanExporter()


@pytest.fixture
def traced(tokenizer, spans, monkeypatch):
    """A server that traces into memory."""

    def made(endpoint, model, version):
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(spans))
        return tracing.RequestTracer(provider, model)

    monkeypatch.setattr(instrumentation, "build_tracer", made)
    options = ServerOptions(otlp_traces_endpoint="http://localhost:4318")
    with Server(tokenizer, options=options, step_s=0.005).running() as server:
        yield server


def ask(server, headers=None, **body):
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json={"prompt": "hello", "max_tokens": 5, "temperature": 0.5} | body,
        headers=headers,
    )
    server.wait_idle()
    return answer


def by_name(spans):
    return {span.name: span for span in spans.get_finished_spans()}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_a_child_for_each_phase(traced, spans, stream):
    ask(traced, stream=stream)
    found = by_name(spans)
    assert set(found) == {"llm_request", "queue", "prefill", "decode"}
    request = found.pop("llm_request")
    assert request.kind is SpanKind.SERVER
    assert request.parent is None
    times = []
    for name in ("queue", "prefill", "decode"):
        phase = found[name]
        assert phase.parent.span_id == request.context.span_id
        times += [phase.start_time, phase.end_time]
    assert times == sorted(times)
    assert request.start_time <= times[0]
    assert times[-1] <= request.end_time


def test_a_span_says_what_the_field_calls_it(traced, spans):
    ask(traced, headers={"X-Request-Id": "mine"})
    said = dict(by_name(spans)["llm_request"].attributes)
    assert said["gen_ai.request.id"].startswith("cmpl-mine-")
    assert said["gen_ai.response.model"] == "tiny"
    assert said["gen_ai.usage.prompt_tokens"] == said["gen_ai.usage.completion_tokens"] == 5
    assert said["gen_ai.request.max_tokens"] == 5
    assert said["gen_ai.request.temperature"] == 0.5
    assert said["gen_ai.request.n"] == 1
    assert said["gen_ai.response.finish_reasons"] == ("length",)
    inference = said["gen_ai.latency.time_in_model_inference"]
    parts = ("prefill", "decode")
    assert sum(said[f"gen_ai.latency.time_in_model_{p}"] for p in parts) == pytest.approx(inference)
    assert 0 < said["gen_ai.latency.time_to_first_token"] < said["gen_ai.latency.e2e"]
    assert said["quire.time.decode"] > 0.015


def test_a_span_is_a_child_of_the_callers(traced, spans):
    ask(traced, headers={"traceparent": f"00-{TRACE}-{CALLER}-01"})
    span = by_name(spans)["llm_request"]
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == CALLER


def test_a_caller_that_samples_no_trace_gets_none(traced, spans):
    ask(traced, headers={"traceparent": f"00-{TRACE}-{CALLER}-00"})
    assert not spans.get_finished_spans()


def test_each_prompt_of_a_body_is_a_request_of_its_own(traced, spans):
    ask(traced, prompt=["a", "b"], n=2, max_tokens=2)
    requests = [s for s in spans.get_finished_spans() if s.name == "llm_request"]
    assert len(requests) == 2
    assert requests[0].attributes["gen_ai.usage.num_sequences"] == 2
    assert requests[0].attributes["gen_ai.usage.completion_tokens"] == 4


def test_a_failed_request_is_a_span_with_an_error(traced, spans):
    traced.executor.fail_with = RuntimeError("no device")
    assert ask(traced).status_code == 500
    traced.executor.fail_with = None
    assert by_name(spans)["llm_request"].status.status_code is StatusCode.ERROR


def test_a_refused_request_leaves_nothing_behind(traced, spans):
    refused = ask(
        traced, headers={"traceparent": f"00-{TRACE}-{CALLER}-01"}, prompt=[1] * 1600, max_tokens=3
    )
    assert refused.status_code == 400
    assert not spans.get_finished_spans()
    assert not traced.app.state.telemetry.tracing._trace_contexts


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "http://"])
def test_an_endpoint_that_is_no_http_url_is_refused(endpoint):
    with pytest.raises(ConfigError, match="http://localhost:4318/v1/traces"):
        tracing.check_otlp_endpoint(endpoint)


def test_an_endpoint_without_a_path_gets_the_usual_one():
    assert tracing.check_otlp_endpoint("http://c:4318") == "http://c:4318/v1/traces"
    assert tracing.check_otlp_endpoint("http://c:4318/x") == "http://c:4318/x"


def test_missing_packages_are_named_with_the_way_to_get_them(monkeypatch):
    whole = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("opentelemetry.exporter"):
            raise ImportError(f"No module named {name!r}")
        return whole(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'quire-llm\[otel\]'"):
        tracing.build_tracer("http://localhost:4318", "m", "1")


def test_spans_are_sent_to_a_collector_over_http(tokenizer, httpserver_log):
    url, got = httpserver_log
    with Server(tokenizer, options=ServerOptions(otlp_traces_endpoint=url)).running() as server:
        ask(server)
    assert got
    path, body = got[0]
    assert path == "/v1/traces"
    assert b"llm_request" in body


def test_a_collector_that_does_not_answer_holds_the_end_up_for_a_moment_only(monkeypatch):
    monkeypatch.setattr(tracing, "FLUSH_TIMEOUT_S", 0.05)
    stuck, over = threading.Event(), threading.Event()

    class Stuck:
        def get_tracer(self, name):
            return None

        def shutdown(self):
            stuck.wait(60)
            over.set()

    tracing.RequestTracer(Stuck(), "m").shut_down()
    assert not over.is_set()
    stuck.set()
    assert over.wait(60)


@pytest.fixture
def httpserver_log():
    """A collector that keeps what it is sent: its URL, and (path, body) of each post."""
    got = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            got.append((self.path, body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_span_names_the_adapter():
    adapter = AdapterRef("sql", b"\1\2", "/adapters/sql")
    life = RequestTimes(Request("a", (1,), StopConditions(max_tokens=1), adapter=adapter))
    found = tracing.span_attributes(life, "tiny", 1.0)
    assert found["gen_ai.response.model"] == "sql"
    assert found["quire.request.adapter_digest"] == "0102"

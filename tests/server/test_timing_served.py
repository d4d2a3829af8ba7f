"""x_timing of a whole server: a delay put in anywhere is found under its own name, and all sum up."""

import asyncio
import json
import re
import time

import httpx
import pytest

from quire.kernels.framework import late_work
from quire.server.options import ServerOptions
from quire.server.telemetry.request_timer import RequestTimer
from quire.text.input_processor import InputProcessor
from quire.text.output.output_processor import RequestOutputProcessor
from tests.server.harness import Server

CAUSES = ("prepare", "transport", "inbox", "grammar", "queue", "prefill", "others")
CAUSES += ("preempted", "decode", "engine_other", "compile", "recovery", "detokenize", "client")
DELAY = 0.3


@pytest.fixture
def serve(tokenizer):
    """Starts servers; they end with the test."""
    running = []

    def start(**more):
        context = Server(tokenizer, **more).running()
        running.append(context)
        return context.__enter__()

    yield start
    for context in running:
        context.__exit__(None, None, None)


def ask(url, path="/v1/completions", **more):
    """The x_timing of an answer, and how long it took as the client sees it."""
    said = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    body = said | {"max_tokens": 4, "ignore_eos": True, "x_timing": True} | more
    began = time.monotonic()
    answer = httpx.post(url + path, json=body, timeout=60)
    seconds = time.monotonic() - began
    assert answer.status_code == 200, answer.text
    return timing_in(answer.text), seconds


def timing_in(text):
    if not text.startswith("data:"):
        return json.loads(text)["x_timing"]
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    (found,) = [one["x_timing"] for one in chunks if one.get("x_timing")]
    return found


def cause_of(timing):
    """The largest cut; all of them sum to the whole within 2 %."""
    total = sum(timing[f"{name}_s"] for name in CAUSES)
    assert total == pytest.approx(timing["total_s"], rel=0.02)
    return max(CAUSES, key=lambda name: timing[f"{name}_s"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_causes_sum_to_what_the_client_waits(serve, path, stream):
    url = serve(step_s=0.05).url
    ask(url, path)  # the first one finds things cold
    timing, seconds = ask(url, path, stream=stream, max_tokens=10)
    assert cause_of(timing) == "decode"
    assert timing["total_s"] <= seconds
    assert timing["decode_s"] == pytest.approx(9 * 0.05, abs=0.1)


def test_nobody_is_told_who_did_not_ask(serve):
    answer = httpx.post(f"{serve().url}/v1/completions", json={"prompt": "hi", "max_tokens": 2})
    assert not answer.json().get("x_timing")
    assert not answer.json().get("metrics")


def test_metrics_are_in_every_answer_if_the_server_says_so(serve):
    url = serve(options=ServerOptions(enable_per_request_metrics=True), step_s=0.02).url
    body = {"prompt": "hi", "max_tokens": 5, "ignore_eos": True}
    found = httpx.post(f"{url}/v1/completions", json=body).json()["metrics"]
    assert found["generation_time_ms"] == pytest.approx(4 * found["mean_itl_ms"])
    assert found["time_to_first_token_ms"] >= 20


def test_an_end_by_a_stop_string_is_timed_too(serve):
    server = serve(step_s=0.02)
    text = server.model.text(server.tokenizer.encode("hi", add_special_tokens=False))
    timing, _ = ask(server.url, stop=text[2:4], max_tokens=50)
    assert cause_of(timing) == "decode"


def test_waiting_for_a_seat_is_queue(serve):
    server = serve(seqs=1, step_s=0.02)
    body = {"prompt": "a", "max_tokens": 20, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        timing, _ = ask(server.url, max_tokens=1)
    assert cause_of(timing) == "queue"


def test_a_long_step_with_the_prompt_is_prefill(serve):
    timing, _ = ask(serve(step_s=DELAY).url, max_tokens=1)
    assert cause_of(timing) == "prefill"


def test_steps_full_of_others_prompts_are_others(serve):
    server = serve(step_s=0.03)

    prompts = [[(i * 7 + k) % 200 for k in range(200)] for i in range(12)]  # a step takes 256

    async def run():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            body = {"prompt": "a", "max_tokens": 12, "ignore_eos": True, "x_timing": True}
            one, _ = await asyncio.gather(
                client.post("/v1/completions", json=body),
                client.post("/v1/completions", json={"prompt": prompts, "max_tokens": 1}),
            )
            return one.json()["x_timing"]

    assert cause_of(asyncio.run(run())) == "others"


def test_lost_blocks_are_preempted(serve):
    server = serve(step_s=0.01, blocks=16)
    body = {"prompt": ["abcdefghij", "klmnopqrst"], "max_tokens": 40, "ignore_eos": True}
    answer = httpx.post(
        f"{server.url}/v1/completions", json=body | {"x_timing": True}, timeout=60
    ).json()
    choices = answer["x_timing"]["choices"]
    assert sum(one["preemptions"] for one in choices) > 0
    assert max(one["preempted_s"] for one in choices) > 0.05


def test_a_hold_up_of_the_engine_between_steps_is_engine_other(serve):
    server = serve()
    step = server.engine.step

    def held_up():
        time.sleep(DELAY / 3)
        return step()

    server.engine.step = held_up
    timing, _ = ask(server.url)
    assert cause_of(timing) == "engine_other"


def test_a_compilation_when_the_engine_is_ready_is_compile_and_is_counted(serve, monkeypatch):
    monkeypatch.setattr(late_work, "_recorder", late_work.LateWorkRecorder())
    late_work.set_ready(True)
    server = serve()
    submit = server.executor.submit

    def compiles(plan):
        time.sleep(DELAY / 3)
        late_work.note_kernel("made up", DELAY / 3)
        return submit(plan)

    server.executor.submit = compiles
    timing, _ = ask(server.url)
    assert cause_of(timing) == "compile"
    shown = httpx.get(f"{server.url}/metrics").text
    assert re.search(r"^quire:kernel_compilations_after_ready_total\{.*\} 4.0$", shown, re.M)
    assert re.search(r"^quire:graph_captures_after_ready_total\{.*\} 0.0$", shown, re.M)
    assert "vllm:kernel_compilations" not in shown


def test_slow_preparing_is_prepare(serve, monkeypatch):
    server, request = serve(), InputProcessor.process

    def slow(self, *args, **kwargs):
        time.sleep(DELAY)
        return request(self, *args, **kwargs)

    monkeypatch.setattr(InputProcessor, "process", slow)
    timing, _ = ask(server.url)
    assert cause_of(timing) == "prepare"


@pytest.mark.parametrize("stream", [False, True])
def test_slow_text_work_is_detokenize(serve, monkeypatch, stream):
    server, read = serve(), RequestOutputProcessor.process

    def slow(self, update):
        time.sleep(DELAY)
        return read(self, update)

    monkeypatch.setattr(RequestOutputProcessor, "process", slow)
    timing, _ = ask(server.url, stream=stream)
    assert cause_of(timing) == "detokenize"


def test_a_busy_event_loop_is_transport(serve, monkeypatch):
    server, handed = serve(step_s=0.02), RequestTimer.record_submitted

    def busy(self, *args):
        handed(self, *args)
        asyncio.get_running_loop().call_later(0.005, time.sleep, DELAY)

    monkeypatch.setattr(RequestTimer, "record_submitted", busy)
    timing, _ = ask(server.url, max_tokens=1)
    assert cause_of(timing) == "transport"


def test_a_client_that_reads_slowly_is_client(serve):
    server = serve()
    body = {"prompt": "hi", "max_tokens": 5, "ignore_eos": True, "stream": True, "x_timing": True}
    sent = []

    async def send(message):
        sent.append(message)
        if len(sent) == 2:
            await asyncio.sleep(DELAY)

    async def talk():
        come = asyncio.Queue()
        come.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("here", 1),
            "server": ("there", 2),
        }
        await server.app(scope, come.get, send)

    server.ask(talk())
    text = b"".join(message.get("body", b"") for message in sent).decode()
    assert cause_of(timing_in(text)) == "client"

"""Deadlines, clients that stop reading, comments that keep a stream open."""

import asyncio
import json
import threading
import time

import httpx
import pytest

from quire.server.formats import body_reader, sse
from quire.server.options import ServerOptions
from tests.server.harness import Server

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
ENDLESS = {"ignore_eos": True, "max_tokens": 480}
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], **ENDLESS},
    COMPLETE: {"prompt": "a", **ENDLESS},
}


@pytest.fixture(scope="module")
def slow(tokenizer):
    with Server(tokenizer, step_s=0.005).running() as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_runs_on(slow):
    yield
    assert slow.wait_idle().held_blocks == 0


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_that_takes_too_long_is_given_up(slow, path):
    before = slow.executor.said
    got = httpx.post(f"{slow.url}{path}", json=BODIES[path], headers={"X-Request-Timeout": "0.1"})
    error = got.json()["error"]
    assert (got.status_code, error["type"]) == (408, "TimeoutError")
    assert "0.1 s" in error["message"]
    slow.wait_idle()
    assert slow.executor.said - before < 200


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_takes_too_long_ends_with_an_error_event(slow, path):
    asked = {**BODIES[path], "stream": True}
    got = httpx.post(f"{slow.url}{path}", json=asked, headers={"X-Request-Timeout": "0.2"})
    events = [e.removeprefix("data: ") for e in got.text.split("\n\n") if e]
    assert len(events) > 3
    assert json.loads(events[-2])["error"]["code"] == 408
    assert events[-1] == "[DONE]"


def test_a_deadline_counts_while_nobody_answers(tokenizer):
    """The engine's thread hangs in a step: the request is not even accepted yet."""
    go_on = threading.Event()
    with Server(tokenizer).running() as hung:
        submit = hung.executor.submit
        hung.executor.submit = lambda plan: (go_on.wait(60), submit(plan))[1]
        first = threading.Thread(target=httpx.post, args=[f"{hung.url}{COMPLETE}"], kwargs={"json": BODIES[COMPLETE], "timeout": 20})  # fmt: skip
        first.start()
        while not hung.client._streams:
            time.sleep(0.001)
        headers = {"X-Request-Timeout": "0.1"}
        got = httpx.post(f"{hung.url}{COMPLETE}", json=BODIES[COMPLETE], headers=headers)
        assert got.status_code == 408
        go_on.set()
        first.join()
        assert hung.wait_idle().held_blocks == 0


def test_a_client_that_leaves_before_it_is_accepted_leaves_nothing(tokenizer):
    go_on = threading.Event()
    with Server(tokenizer).running() as hung:
        submit = hung.executor.submit
        hung.executor.submit = lambda plan: (go_on.wait(60), submit(plan))[1]
        with httpx.Client(base_url=hung.url) as client:
            for _ in range(3):
                with pytest.raises(httpx.ReadTimeout):
                    client.post(COMPLETE, json=BODIES[COMPLETE], timeout=0.1)
        deadline = time.monotonic() + 60
        while hung.client._streams and time.monotonic() < deadline:
            time.sleep(0.005)
        assert hung.client._streams == {}
        go_on.set()
        assert hung.wait_idle().held_blocks == 0


@pytest.mark.parametrize("said", ["0", "-1", "soon", "nan", "inf", "1e9", ""])
def test_a_deadline_that_is_none_is_refused(slow, said):
    got = httpx.post(f"{slow.url}{CHAT}", json=BODIES[CHAT], headers={"X-Request-Timeout": said})
    assert (got.status_code, got.json()["error"]["param"]) == (400, "X-Request-Timeout")


def test_a_deadline_that_is_kept_changes_nothing(slow):
    asked = {**BODIES[COMPLETE], "max_tokens": 3}
    got = httpx.post(f"{slow.url}{COMPLETE}", json=asked, headers={"X-Request-Timeout": "30"})
    assert got.json()["usage"]["completion_tokens"] == 3


def test_a_body_that_does_not_come_is_not_waited_for(slow, monkeypatch):
    monkeypatch.setattr(body_reader, "BODY_TIMEOUT_S", 0.2)

    def trickle():
        yield b"{"
        time.sleep(0.6)
        yield b"}"

    headers = {"content-type": "application/json"}
    got = httpx.post(f"{slow.url}{CHAT}", content=trickle(), headers=headers)
    assert (got.status_code, got.json()["error"]["type"]) == (408, "TimeoutError")


def test_a_client_that_reads_no_more_keeps_no_engine_busy(tokenizer, monkeypatch):
    """Its socket is full: what is sent waits, and after a while it is as good as gone."""
    monkeypatch.setattr(sse, "STALL_TIMEOUT_S", 0.2)
    asked = {**BODIES[COMPLETE], "n": 60, "stream": True, "logprobs": 5, "temperature": 1.0}
    with Server(tokenizer, step_s=0.005).running() as stuffed:
        port = int(stuffed.url.rpartition(":")[2])

        async def main():
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
            raw = json.dumps(asked).encode()
            head = f"POST {COMPLETE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
            writer.write(head.encode() + raw)
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                await asyncio.sleep(0.1)
                stats = await asyncio.to_thread(stuffed.stats)
                if stuffed.executor.said and stats.running == stats.waiting == 0:
                    break
            writer.transport.abort()

        asyncio.run(main())
        said = stuffed.executor.said
        stuffed.wait_idle()
        assert 0 < said < 60 * ENDLESS["max_tokens"]


def test_comments_keep_a_silent_stream_open(tokenizer):
    options = ServerOptions(sse_keep_alive_interval=1)
    with Server(tokenizer, options=options, step_s=1.8).running() as silent:
        asked = {**BODIES[CHAT], "max_tokens": 2, "stream": True}
        got = httpx.post(f"{silent.url}{CHAT}", json=asked, timeout=60)
    assert ": keep-alive\n\n" in got.text
    assert got.text.endswith("data: [DONE]\n\n")
    assert all(e.startswith(("data: ", ": keep-alive")) for e in got.text.split("\n\n") if e)

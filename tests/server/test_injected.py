"""Faults of the host, of libraries and of clocks: they cost the requests they meet a typed error,
and nothing else. (Deaths of processes: test_survive.py; faults of single hooks: test_blame.py.)
"""

import json
import time
from contextlib import contextmanager

import httpx
import pytest

from quire.errors import EngineDead
from quire.server.options import ServerOptions
from quire.text.input_processor import InputProcessor
from quire.text.output.output_processor import RequestOutputProcessor
from tests.server.harness import Server
from tests.server.test_cancel import Scene

HELLO = [{"role": "user", "content": "go on"}]
MORE = {"max_tokens": 12, "ignore_eos": True}
ROUTES = {
    "/v1/chat/completions": {"messages": HELLO, **MORE, "n": 2},
    "/v1/completions": {"prompt": ["go", "on"], **MORE},
    "/v1/responses": {"input": "go on", "max_output_tokens": 12},
    "/v1/messages": {"messages": HELLO, "max_tokens": 12},
    "/generate": {"prompt": "go on", **MORE},
    "/v1/chat/completions/batch": {"messages": [HELLO, HELLO], **MORE},
}
STREAMED = [(path, stream) for path in ROUTES for stream in (False, True) if stream < (path[-5:] != "batch")]  # fmt: skip


@pytest.fixture(scope="module")
def server(tokenizer):
    options = ServerOptions(enable_responses_store=True)
    with Server(tokenizer, options=options).running() as running:
        yield running


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made
        assert made.get("/ready").status_code == 200
        assert made.post("/v1/completions", json={"prompt": "x", **MORE}).status_code == 200
    server.wait_idle()


@contextmanager
def injected(monkeypatch, owner, name, error):
    """A function that raises."""

    def broken(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        yield


def refusal(answer):
    """The error of an answer, or of its stream."""
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]["message"]
    for line in answer.text.splitlines():
        said = line.removeprefix("data: ")
        if '"error"' in said and said.startswith("{"):
            found = json.loads(said)
            error = found.get("error") or (found.get("response") or {}).get("error")
            if error:
                return 200, error["message"]
    raise AssertionError(answer.text)


@pytest.mark.parametrize(("path", "stream"), STREAMED)
@pytest.mark.parametrize("error", [MemoryError("no room at /secret/place"), RuntimeError("a bug")])
def test_text_work_that_breaks_ends_its_request_alone(
    server, http, monkeypatch, path, stream, error
):
    body = ROUTES[path] | ({"stream": True} if stream else {})
    with injected(monkeypatch, RequestOutputProcessor, "process", error):
        status, message = refusal(http.post(path, json=body))
        server.wait_idle()
    assert status == (200 if stream else 500)
    assert "secret" not in message
    assert "log" in message


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_a_tokenizer_that_breaks_ends_its_request_alone(http, monkeypatch, path, long):
    """Of a long prompt it runs in another thread."""
    text = "word " * (2000 if long else 1)
    said = {key: _longer(value, text) for key, value in ROUTES[path].items()}
    with injected(monkeypatch, InputProcessor, "process", RuntimeError("poisoned")):
        status, message = refusal(http.post(path, json=said))
    assert status == 500
    assert "in its log" in message


def test_a_connection_outlives_an_error_that_nobody_meant(http, monkeypatch):
    """A client, or a proxy, has its next request on it."""
    body = {"prompt": "a", **MORE}
    with injected(monkeypatch, InputProcessor, "process", RuntimeError("poisoned")):
        for _ in range(20):
            assert http.post("/v1/completions", json=body).status_code == 500
    assert len(http._transport._pool.connections) == 1


def _longer(value, text):
    if value in ("go on", ["go", "on"]):
        return text if isinstance(value, str) else [text, text]
    if value in (HELLO, [HELLO, HELLO]):
        said = [{"role": "user", "content": text}]
        return said if value == HELLO else [said, said]
    return value


@pytest.mark.parametrize("error", [MemoryError(), OSError(28, "No space left on device")])
def test_a_step_that_gets_no_memory_ends_what_it_holds_and_no_more(server, http, error):
    server.executor.fail_with = error
    prompt = f"of which {type(error).__name__} comes"  # the same would be refused from now on
    try:
        answer = http.post("/v1/completions", json={"prompt": prompt, **MORE})
    finally:
        server.executor.fail_with = None
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "InternalServerError"


@pytest.mark.parametrize("jump_s", [-1e9, 1e9])
def test_a_clock_that_jumps_moves_dates_and_nothing_else(server, http, monkeypatch, jump_s):
    """Deadlines, timings and limits are of the monotonic clock."""
    before = http.get("/metrics").status_code
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + jump_s)
    body = {"prompt": "a", **MORE, "x_timing": True}
    answer = http.post("/v1/completions", json=body, headers={"X-Request-Timeout": "10"})
    assert answer.status_code == 200
    assert 0 < answer.json()["x_timing"]["total_s"] < 10
    assert abs(answer.json()["created"] - (now() + jump_s)) < 10
    assert http.get("/ready").status_code == http.get("/metrics").status_code == before == 200


def test_a_background_response_whose_text_work_breaks_has_failed(server, http, monkeypatch):
    body = {"input": "go on", "background": True, "max_output_tokens": 200}
    with injected(
        monkeypatch, RequestOutputProcessor, "process", RuntimeError("a bug at /secret/place")
    ):
        shown = http.post("/v1/responses", json=body).json()
        server.wait_idle()
        deadline = time.monotonic() + 60
        while shown["status"] in ("queued", "in_progress") and time.monotonic() < deadline:
            shown = http.get(f"/v1/responses/{shown['id']}").json()
    assert shown["status"] == "failed"
    assert "secret" not in json.dumps(shown)


# -- an engine that is not there -------------------------------------------------------------------


async def asleep(scene):
    await scene.server.client.sleep(1)


async def away(scene):
    scene.server.client.restart_wait_s = 0.02
    scene.server.client.transport.die()


async def dead(scene):
    scene.server.client.transport._told[1](EngineDead("the engine is gone for good"))


@pytest.mark.parametrize(("state", "status"), [(asleep, 429), (away, 503), (dead, 500)])
def test_without_an_engine_every_route_says_so_and_nobody_is_ready(tokenizer, state, status):
    scene = Scene(tokenizer)
    with scene.server.running(), httpx.Client(base_url=scene.server.url, timeout=60) as to:
        assert to.get("/ready").status_code == 200
        scene.on_loop(state(scene))
        assert to.get("/ready").status_code == 503
        assert to.get("/live").status_code == 200
        for path, stream in STREAMED:
            got = to.post(path, json=ROUTES[path] | ({"stream": True} if stream else {}))
            assert got.status_code == status, (path, got.text)
            assert got.json()["error"]["message"]
            assert (int(got.headers.get("Retry-After", 0)) > 0) == (status != 500)
        assert not scene.server.client._streams


def test_who_is_asleep_wakes_up_and_is_ready(tokenizer):
    scene = Scene(tokenizer)
    body = {"prompt": "a", **MORE}
    with scene.server.running(), httpx.Client(base_url=scene.server.url, timeout=60) as to:
        scene.on_loop(asleep(scene))
        assert to.post("/v1/completions", json=body).status_code == 429
        scene.on_loop(scene.server.client.wake_up())
        assert to.get("/ready").status_code == 200
        assert to.post("/v1/completions", json=body).status_code == 200

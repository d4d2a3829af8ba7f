import threading
import time

import httpx
import pytest

from quire.errors import EngineDead
from quire.server.options import ServerOptions
from quire.server.routes import unsupported
from tests.server.harness import Server

HELLO = [{"role": "user", "content": "Say something nice."}]
OPERATING = [
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("POST", "/drain_engine?engine=0"),
    ("POST", "/undrain_engine?engine=0"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/abort_requests"),
    ("GET", "/server_info"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
]


@pytest.fixture(scope="module")
def opened(tokenizer):
    """A server that may be operated on."""
    options = ServerOptions(
        enable_dev_routes=True, enable_profiler_routes=True, api_key=("secret",)
    )
    with Server(tokenizer, options=options, step_s=0.001).running() as running:
        yield running


@pytest.fixture
def operate(opened):
    headers = {"Authorization": "Bearer secret"}
    with httpx.Client(base_url=opened.url, headers=headers, timeout=60) as made:
        yield made
        made.post("/wake_up").raise_for_status()
    opened.wait_idle()


def chat(http, **more):
    return http.post("/v1/chat/completions", json={"messages": HELLO, **more})


class Asking:
    """A request that another thread waits for."""

    def __init__(self, http, path="/v1/chat/completions", **more):
        self._thread = threading.Thread(target=self._run, args=(http, path, more))
        self._thread.start()

    def _run(self, http, path, more):
        self.got = http.post(path, json={"messages": HELLO, **more})

    def result(self):
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.got


def wait_until(server, condition):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if condition(server.stats()):
            return
    raise AssertionError(server.stats())


# -- closed -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), OPERATING)
def test_who_operates_needs_the_switch(http, method, path):
    got = http.request(method, path)
    assert got.status_code == 403
    assert "start with --enable-" in got.json()["error"]["message"]
    assert got.json()["error"]["type"] == "PermissionDeniedError"


@pytest.mark.parametrize(("method", "path"), OPERATING)
def test_who_operates_needs_the_key_as_well(opened, method, path):
    assert httpx.request(method, opened.url + path).status_code == 401


# -- probes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/ready", "/live", "/startup", "/ping"])
def test_probes_of_a_server_that_works_are_empty(http, path):
    got = http.get(path)
    assert (got.status_code, got.content) == (200, b"")


@pytest.mark.parametrize(
    ("path", "status"), [("/health", 503), ("/ready", 503), ("/ping", 503), ("/live", 200)]
)
def test_probes_say_that_the_engine_died(tokenizer, monkeypatch, path, status):
    with Server(tokenizer).running() as dying:
        monkeypatch.setattr(dying.client, "_dead_error", EngineDead("the engine died: no reason"))
        got = httpx.get(dying.url + path)
        monkeypatch.undo()
    assert got.status_code == status
    if status == 503:
        assert "no reason" in got.json()["error"]["message"]


def test_health_says_that_the_engine_is_silent(tokenizer, monkeypatch):
    from quire.server.routes import health

    with Server(tokenizer).running() as silent:
        monkeypatch.setattr(health, "NO_PROGRESS_TIMEOUT_S", -1.0)
        got = httpx.get(silent.url + "/health")
    assert got.status_code == 503
    assert "no sign of life" in got.json()["error"]["message"]


def test_a_server_that_sleeps_is_healthy_but_not_ready(operate):
    operate.post("/pause").raise_for_status()
    assert operate.get("/health").status_code == 200
    got = operate.get("/ready")
    assert got.status_code == 503
    assert "/resume" in got.json()["error"]["message"]


# -- operating --------------------------------------------------------------------------------


def test_a_server_sleeps_and_wakes(operate):
    operate.post("/sleep?level=1").raise_for_status()
    assert operate.get("/is_sleeping").json() == {"is_sleeping": True}
    assert chat(operate).status_code == 429
    operate.post("/wake_up").raise_for_status()
    assert operate.get("/is_sleeping").json() == {"is_sleeping": False}
    assert chat(operate).status_code == 200


def test_a_server_wakes_by_parts(operate):
    operate.post("/sleep").raise_for_status()
    operate.post("/wake_up?tags=weights").raise_for_status()
    assert operate.get("/is_sleeping").json() == {"is_sleeping": True}
    operate.post("/wake_up?tags=kv_cache").raise_for_status()
    assert operate.get("/is_sleeping").json() == {"is_sleeping": False}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/sleep?level=7", 501),
        ("/sleep?level=deep", 400),
        ("/sleep?mode=softly", 400),
        ("/wake_up?tags=everyone", 400),
        ("/pause?mode=softly", 400),
    ],
)
def test_unknown_ways_to_sleep_are_refused(operate, path, status):
    got = operate.post(path)
    assert got.status_code == status, got.text
    assert got.json()["error"]["message"]


def test_sleep_ends_what_runs(operate, opened):
    asking = Asking(operate, ignore_eos=True)
    wait_until(opened, lambda stats: stats.running)
    operate.post("/sleep").raise_for_status()
    assert asking.result().json()["choices"][0]["finish_reason"] == "abort"


def test_a_pause_that_keeps_lets_what_runs_go_on_later(operate, opened):
    asking = Asking(operate, ignore_eos=True, max_tokens=200)
    wait_until(opened, lambda stats: stats.running)
    operate.post("/pause?mode=keep").raise_for_status()
    assert operate.get("/is_paused").json() == {"is_paused": True}
    operate.post("/resume").raise_for_status()
    assert operate.get("/is_paused").json() == {"is_paused": False}
    assert asking.result().json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["mine", "chatcmpl-mine"])
def test_requests_are_ended_by_their_name(operate, opened, name):
    with httpx.Client(
        base_url=opened.url,
        headers={"Authorization": "Bearer secret", "X-Request-Id": "mine"},
        timeout=60,
    ) as named:
        asking = Asking(named, ignore_eos=True)
        wait_until(opened, lambda stats: stats.running)
        got = operate.post("/abort_requests", json={"request_ids": [name, "another"]})
        assert got.json() == {"aborted": 1}
        assert asking.result().json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("stream", [True, False])
def test_a_message_that_was_ended_is_an_error_that_is_not_tried_again(operate, opened, stream):
    body = {"max_tokens": 400, "temperature": 0, "stream": stream, "stop_sequences": ["\0"]}
    opened.executor.step_s = 0.05
    asking = Asking(operate, "/v1/messages", **body, request_id="mine")
    wait_until(opened, lambda stats: stats.running)
    operate.post("/abort_requests", json={"request_ids": ["mine"]}).raise_for_status()
    opened.executor.step_s = 0.001
    got = asking.result()
    assert got.status_code == (200 if stream else 499)
    assert '"message":"the request was aborted"' in got.text
    assert "message_stop" not in got.text


def test_nobody_is_ended_by_a_name_that_nobody_has(operate):
    got = operate.post("/abort_requests", json={"request_ids": ["x"], "reason": "why"})
    assert got.json() == {"aborted": 0}
    assert got.headers["x-quire-ignored"] == "reason"


def test_the_prefix_cache_is_forgotten(operate, opened):
    chat(operate)
    assert opened.stats().cached_blocks > 0
    operate.post("/reset_prefix_cache").raise_for_status()
    assert opened.stats().cached_blocks == 0


def test_a_prefix_cache_in_use_is_kept_unless_it_must_go(operate, opened):
    asking = Asking(operate, ignore_eos=True)
    wait_until(opened, lambda stats: stats.running)
    assert operate.post("/reset_prefix_cache").status_code == 409
    operate.post("/reset_prefix_cache?reset_running_requests=true").raise_for_status()
    assert asking.result().json()["choices"][0]["finish_reason"] == "abort"


def test_a_profile_that_was_not_begun_cannot_be_ended(operate):
    got = operate.post("/stop_profile")
    assert got.status_code == 409
    assert got.json()["error"]["type"] == "ConflictError"


def test_the_server_says_what_runs_but_no_secrets(operate):
    got = operate.get("/server_info")
    body = got.json()
    assert body["model"]["names"] == ["tiny", "alias"]
    assert body["engines"][0]["blocks"] > 0
    assert body["server_options"]["enable_dev_routes"] is True
    assert "secret" not in got.text


# -- later ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(unsupported.UNSUPPORTED_ROUTES))
def test_routes_of_later_say_what_is_missing_and_what_is_there(http, path):
    got = http.post(path, json={"model": "tiny", "input": "x"})
    assert got.status_code == 501
    error = got.json()["error"]
    assert error["type"] == "NotImplementedError"
    assert path in error["message"]
    assert "/v1/chat/completions" in error["message"]
    assert got.headers["x-should-retry"] == "false"


# -- one door for all -------------------------------------------------------------------------


def test_invocations_go_where_their_body_belongs(http, server):
    got = http.post("/invocations", json={"messages": HELLO}).json()
    assert got["object"] == "chat.completion"
    assert got["choices"][0]["message"]["content"] == server.answer(HELLO)
    got = http.post("/invocations", json={"prompt": "x"}).json()
    assert got["object"] == "text_completion"


def test_invocations_stream_too(http, server):
    with http.stream("POST", "/invocations", json={"messages": HELLO, "stream": True}) as got:
        assert got.read().endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("body", [{"text": "x"}, {"documents": ["x"]}, {}])
def test_invocations_that_belong_nowhere_are_refused(http, body):
    got = http.post("/invocations", json=body)
    assert got.status_code == 400
    assert "messages" in got.json()["error"]["message"]

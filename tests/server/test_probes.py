"""Probes, from what they read; and who answers before there is a server."""

import contextlib
import socket
import time
from types import SimpleNamespace

import httpx
import pytest

from quire.engine.heartbeat_page import EnginePhase, Heartbeat
from quire.errors import EngineDead
from quire.server.options import ServerOptions
from quire.server.process.startup_server import STARTUP_PHASES, StartupServer
from quire.server.routes import health
from quire.server.routes.health import HealthState
from tests.server.running import SMALL, start


def engine(**more):
    """As a client sees one that works."""
    known = {
        "usable": [0],
        "dead_error": None,
        "restart_reason": None,
        "is_sleeping": False,
        "is_paused": False,
    }
    return SimpleNamespace(**{**known, "last_heartbeat_at": time.monotonic(), **more})


def beat(silent_s=0.0, **more):
    now = time.monotonic_ns()
    known = {"phase": EnginePhase.SERVING, "beat_at": now, "progress_at": now - int(silent_s * 1e9)}
    return Heartbeat(**{**known, **more})


@pytest.fixture(autouse=True)
def nobody_is_looked_up(monkeypatch):
    monkeypatch.setattr(health, "process_state", lambda pid: "S")


@pytest.mark.parametrize(
    ("client", "page", "reason"),
    [
        ({}, {}, None),
        ({"dead_error": EngineDead("it died in /home/me/x.py")}, {}, "dead"),
        ({"restart_reason": "killed"}, {}, "restarting"),
        ({"is_sleeping": True}, {}, "asleep"),
        ({"is_sleeping": True, "is_paused": True}, {}, "paused"),
        ({}, {"phase": EnginePhase.STARTING}, "starting"),
        ({}, {"phase": EnginePhase.ENDED}, "gone"),
        ({}, {"silent_s": 4}, "silent"),
        ({}, {"silent_s": 2}, None),
        ({}, {"silent_s": 4, "working": 1}, "stalled"),
        ({}, {"silent_s": 4, "working": 1, "expected_ns": 10**9}, None),
    ],
)
def test_ready_says_why_not(client, page, reason):
    found = HealthState(engine(**client), [lambda: beat(**page)]).readiness_problem()
    assert (None if found is None else found.code) == reason
    assert found is None or "/home" not in found.message


@pytest.mark.parametrize(
    ("client", "page", "healthy"),
    [
        ({}, {}, True),
        ({"dead_error": EngineDead("why")}, {}, False),
        ({"restart_reason": "killed"}, {"silent_s": 1000}, True),
        ({"is_sleeping": True}, {}, True),
        ({}, {"silent_s": 59, "working": 1}, True),
        ({}, {"silent_s": 61, "working": 1}, False),
        ({}, {"silent_s": 61, "working": 1, "expected_ns": 10**9}, True),
        ({}, {"silent_s": 61}, False),
        ({}, {"silent_s": 61, "unbounded_since": 1}, True),
    ],
)
def test_health_forgives_what_ready_does_not(client, page, healthy):
    assert (
        HealthState(engine(**client), [lambda: beat(**page)]).health_problem() is None
    ) == healthy


def test_who_drains_is_healthy_and_not_ready():
    made = HealthState(engine(), [beat])
    made.draining = True
    assert made.health_problem() is None
    assert made.readiness_problem().code == "draining"


def test_who_has_started_has_started_for_ever():
    now = beat(phase=EnginePhase.STARTING)
    made = HealthState(engine(), [lambda: now])
    assert made.startup_problem().code == "starting"
    now = beat()
    assert made.startup_problem() is None
    now = beat(phase=EnginePhase.STARTING)
    assert made.startup_problem() is None


# -- before there is a server -----------------------------------------------------------------


@contextlib.contextmanager
def lobby(**more):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        made = StartupServer(listener, ServerOptions(), **more)
        made.open()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            with httpx.Client(base_url=url, timeout=60) as http:
                http.listener = listener
                yield made, http
        finally:
            made.close()


@pytest.mark.parametrize("phase", STARTUP_PHASES)
def test_the_lobby_says_how_far_the_start_has_come(phase):
    with lobby() as (made, http):
        made.phase = phase
        found = http.get("/startup")
        assert found.status_code == 503
        told = found.json()
        assert (told["reason"], told["phase"]) == ("starting", phase)
        assert told["seconds"] >= 0
        assert STARTUP_PHASES[phase] in told["error"]["message"]


def test_the_lobby_lives_and_is_not_ready():
    with lobby() as (_, http):
        assert http.get("/live").status_code == 200
        for path in ("/ready", "/health", "/ping", "/ready?verbose", "/v1/models"):
            found = http.get(path)
            assert (found.status_code, found.headers["retry-after"]) == (503, "5")


def test_who_asks_the_lobby_for_the_head_gets_no_body():
    with lobby() as (_, http), socket.create_connection(http.listener.getsockname(), 10) as raw:
        raw.sendall(b"HEAD /health HTTP/1.1\r\n\r\n")
        found = b"".join(iter(lambda: raw.recv(1 << 16), b""))
    assert found.startswith(b"HTTP/1.1 503")
    assert found.endswith(b"\r\n\r\n")


def test_a_server_that_had_started_has_started_in_the_lobby_too():
    with lobby(started=True) as (_, http):
        assert http.get("/startup").status_code == 200
        assert http.get("/ready").status_code == 503


@pytest.mark.parametrize(
    ("started", "phases"), [(False, ["process", "weights"]), (True, ["restart", "restart"])]
)
def test_weights_are_read_for_the_first_process_alone(started, phases):
    with lobby(started=started) as (made, http):
        told = [http.get("/ready").json()]
        made.on_model_located()
        told.append(http.get("/ready").json())
    assert [one["phase"] for one in told] == phases
    assert started != ("weights are being read" in told[1]["error"]["message"])


def test_who_sends_a_body_to_the_lobby_gets_its_answer():
    with lobby() as (_, http):
        assert http.post("/v1/completions", content=b"x" * (1 << 20)).status_code == 503


@pytest.mark.parametrize(
    "head", [b"\r\n\r\n", b"nonsense\r\n\r\n", b"GET\r\n\r\n", b"\xff \xff\r\n\r\n"]
)
def test_nonsense_does_not_hurt_the_lobby(head):
    with lobby() as (_, http):
        with socket.create_connection(http.listener.getsockname(), 10) as raw:
            raw.sendall(head)
            assert raw.recv(1 << 16).startswith(b"HTTP/1.1 503")
        assert http.get("/live").status_code == 200


def test_a_head_without_an_end_is_given_up(monkeypatch):
    monkeypatch.setattr("quire.server.process.startup_server.HEADER_TIMEOUT_S", 0.05)
    with lobby() as (_, http):
        with socket.create_connection(http.listener.getsockname(), 10) as raw:
            raw.sendall(b"GET /live HTTP/1.1\r\nHost:")
            assert raw.recv(1) == b""
        assert http.get("/live").status_code == 200


def test_the_lobby_closes_without_a_word_on_those_who_are_in_it(caplog):
    with lobby() as (made, http), socket.create_connection(http.listener.getsockname(), 10) as raw:
        raw.sendall(b"GET /live HTTP/1.1\r\n\r\n")
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 200")  # it waits for us to hang up
        made.close()
    # Servers of other tests of this process may log their statistics meanwhile.
    assert not [r.message for r in caplog.records if "telemetry" not in r.name]


def test_a_request_under_way_when_the_lobby_closes_is_answered():
    with lobby() as (made, http):
        http.get("/live")
        with socket.create_connection(http.listener.getsockname(), 10) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\n")
            assert http.get("/live").status_code == 200  # the other is accepted too
            made.close()
            raw.sendall(b"Content-Length: 4\r\n\r\nbody")
            assert raw.recv(1 << 16).startswith(b"HTTP/1.1 503")
            assert raw.recv(1) == b""


def test_who_comes_when_the_lobby_has_closed_waits_for_the_server():
    with lobby() as (made, http):
        http.get("/live")
        made.close()
        made.close()
        with socket.create_connection(http.listener.getsockname(), 10) as raw:
            raw.sendall(b"GET /live HTTP/1.1\r\n\r\n")
            served, _ = http.listener.accept()
            with served:
                assert served.recv(4) == b"GET "


def test_a_server_tells_of_its_start_from_the_beginning(tmp_path):
    path = tmp_path / "socket"
    process = start("embedded", *SMALL, "--uds", path)
    seen = []
    try:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://local", timeout=60) as http:
            while not seen or seen[-1][0] != 200:
                assert process.poll() is None
                with contextlib.suppress(httpx.TransportError):
                    found = http.get("/startup")
                    seen.append((found.status_code, found.text))
                    assert http.get("/live").status_code == 200
                time.sleep(0.05)
            assert http.get("/ready").status_code == 200
    finally:
        process.kill()
        process.communicate()
    assert seen[0][0] == 503
    assert '"phase":' in seen[0][1]

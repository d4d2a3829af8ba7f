"""The rules of HTTP/1 that uvicorn leaves out, by bytes on a socket."""

import contextlib
import json
import socket
import struct
import threading

import httpx
import pytest

from quire.server.options import ServerOptions
from quire.server.process import http_protocol
from quire.server.process.http_protocol import ConnectionLimit
from tests.server.harness import Server
from tests.server.running import SMALL, serving, wait_until
from tests.server.test_tls import serving as serving_as_quire

COMPLETE = "/v1/completions"
BODY = b'{"prompt":"a","max_tokens":1}'


def head(path=COMPLETE, *lines, method="POST", version="1.1", host="Host: x", length=29):
    made = [f"{method} {path} HTTP/{version}", *([host] if host else [])]
    if method == "POST":
        made.append("Content-Type: application/json")
    if length is not None and method == "POST":
        made.append(f"Content-Length: {length}")
    return "\r\n".join([*made, *lines, "", ""]).encode()


def connect(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def read_all(made):
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while part := made.recv(65536):
            got += part
    return got


def talk(url, raw):
    """All that comes back; the request must end the connection."""
    with connect(url) as made:
        made.sendall(raw)
        return read_all(made)


def status(got):
    return int(got.split(b" ", 2)[1]) if got else 0


CLOSE = "Connection: close"


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (head(host=None), 400),
        (head(host="Host: a\r\nHost: b"), 400),
        (head(host="Host: a\r\nHost: a"), 400),
        (head(host="Host: a b"), 400),
        (head(host="Host: a/b"), 400),
        (head(COMPLETE, CLOSE, host="Host:") + BODY, 200),
        (head(COMPLETE, CLOSE, host="Host: [::1]:80") + BODY, 200),
        (head(version="1.0", host=None) + BODY, 200),
        (head(version="1.0", host="Host: a\r\nHost: b") + BODY, 400),
        (head(COMPLETE, "Expect: x"), 417),
        (head(COMPLETE, "Expect: 100-continue", "Expect: x"), 417),
        (head(version="2.0"), 505),
        (head(version="0.9"), 505),
    ],
)
def test_a_head_against_the_rules_is_refused_and_the_connection_closed(server, raw, wanted):
    got = talk(server.url, raw)
    assert status(got) == wanted, got
    top, _, body = got.partition(b"\r\n\r\n")
    if wanted != 200:
        assert json.loads(body)["error"]["code"] == wanted
        assert b"connection: close" in top.lower()


def test_a_client_that_waits_for_100_gets_it_and_the_answer(server):
    with connect(server.url) as made:
        made.sendall(head(COMPLETE, "Expect: 100-continue", CLOSE))
        assert made.recv(1000).startswith(b"HTTP/1.1 100 ")
        made.sendall(BODY)
        assert status(read_all(made)) == 200


def test_http_1_0_clients_get_neither_chunks_nor_100(server):
    ask = {"prompt": "a", "max_tokens": 5, "stream": True, "ignore_eos": True}
    raw = json.dumps(ask).encode()
    got = talk(
        server.url, head(COMPLETE, "Expect: 100-continue", version="1.0", length=len(raw)) + raw
    )
    top, _, body = got.partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 200 "), got
    assert b"transfer-encoding" not in top.lower()
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")
    assert status(talk(server.url, head("/v1/models", method="GET", version="1.0"))) == 200
    got = talk(server.url, head("/v1/models", method="HEAD", version="1.0"))
    assert b"transfer-encoding" not in got.lower()


def chunked(*trailers, body=BODY, lines=()):
    made = head(COMPLETE, "Transfer-Encoding: chunked", CLOSE, *lines, length=None)
    parts = [b"%x\r\n%s\r\n" % (len(body), body), b"0\r\n"]
    return made + b"".join(parts) + "\r\n".join([*trailers, "", ""]).encode()


def test_trailers_are_dropped(tokenizer):
    """No credential, id, deadline or priority of a request comes from behind its body."""
    options = ServerOptions(api_key=("k",), enable_request_id_headers=True)
    with Server(tokenizer, options=options).running() as server:
        assert status(talk(server.url, chunked("Authorization: Bearer k"))) == 401
        assert status(talk(server.url, chunked("x-api-key: k"))) == 401
        key = ("Authorization: Bearer k",)
        odd = ("X-Request-Id: stolen", "X-Request-Timeout: no", "X-Vllm-Priority: no")
        got = talk(server.url, chunked(*odd, "Authorization: Bearer x", lines=key))
        assert status(got) == 200, got
        assert b"stolen" not in got
        assert status(talk(server.url, chunked("Content-Length: 3", lines=key))) in (200, 400)


def test_a_trailer_is_bounded_as_a_head_is(tokenizer):
    options = ServerOptions(port=0, h11_max_incomplete_event_size=4096)
    with serving_as_quire(tokenizer, options) as url:
        assert status(talk(url, chunked("X-A: " + "a" * 100))) == 200
        many = "\r\n".join(f"X-{i}: a" for i in range(60_000))  # more than one read
        for trailer in ("X-A: " + "a" * 600_000, many):
            with connect(url) as made, contextlib.suppress(ConnectionError):
                made.sendall(chunked(trailer)[:-4])  # and no end
                assert status(read_all(made)) == 400
        large = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * 9000}).encode()
        assert status(talk(url, chunked(body=large))) == 200


@pytest.fixture(scope="module")
def slow(tokenizer):
    with Server(tokenizer, step_s=0.004).running() as running:
        yield running


LONG = {"prompt": "a", "max_tokens": 60, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_half_closes_after_its_request_gets_the_answer(slow, stream):
    raw = json.dumps({**LONG, "stream": stream}).encode()
    with connect(slow.url) as made:
        made.sendall(head(length=len(raw)) + raw)
        made.shutdown(socket.SHUT_WR)
        got = read_all(made)
    while got.startswith(b"HTTP/1.1 100 "):
        got = got.partition(b"\r\n\r\n")[2]
    assert status(got) == 200
    assert got.endswith(b"0\r\n\r\n") if stream else b'"finish_reason":"length"' in got
    slow.wait_idle()


def test_pipelined_requests_of_a_half_closed_client_are_all_answered(slow):
    with connect(slow.url) as made:
        made.sendall((head() + BODY) * 3)
        made.shutdown(socket.SHUT_WR)
        assert read_all(made).count(b"HTTP/1.1 200") == 3


@pytest.mark.parametrize("way", ["closed", "reset", "closed 1.0", "half a body"])
def test_a_client_that_is_gone_ends_its_request(slow, way):
    raw = json.dumps({**LONG, "max_tokens": 500}).encode()
    version = "1.0" if way == "closed 1.0" else "1.1"
    made = connect(slow.url)
    cut = len(raw) - 3 if way == "half a body" else len(raw)
    made.sendall(head(length=len(raw), version=version) + raw[:cut])
    if way != "half a body":
        assert wait_until(lambda: slow.stats().running)
    if way == "reset":
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    made.close()
    said = slow.executor.said
    slow.wait_idle()
    assert slow.executor.said - said < 400


# -- descriptors ----------------------------------------------------------------------------------


class Connection:
    dropped = False

    def drop(self):
        self.dropped = True


def test_the_longest_idle_connection_goes_first_and_then_new_ones_are_refused():
    limit = ConnectionLimit(lambda: 3)
    busy, early, late, new, newest = (Connection() for _ in range(5))
    assert limit.admit(busy, 1)
    limit.mark_busy(busy)
    assert limit.admit(early, 2)
    assert limit.admit(late, 3)
    limit.mark_busy(early)
    limit.mark_idle(early)
    assert limit.admit(new, 4)
    assert (busy.dropped, early.dropped, late.dropped) == (False, False, True)
    limit.mark_busy(early)
    limit.mark_busy(new)
    assert not limit.admit(newest, 4)
    assert not newest.dropped


def test_beyond_the_limit_a_request_is_answered_503(tokenizer, monkeypatch):
    monkeypatch.setattr(http_protocol, "max_connections", lambda: 4)
    with (
        Server(tokenizer, step_s=0.004).running() as server,
        contextlib.ExitStack() as stack,
    ):
        raw = json.dumps({**LONG, "max_tokens": 400, "stream": True}).encode()
        busy = [stack.enter_context(connect(server.url)) for _ in range(4)]
        for one in busy:
            one.sendall(head(length=len(raw)) + raw)
            assert one.recv(100).startswith(b"HTTP/1.1 200 ")
        got = talk(server.url, head() + BODY)
        assert status(got) == 503
        assert b"retry-after: 1" in got.lower()
        for one in busy:
            one.close()
        server.wait_idle()
        with httpx.Client(base_url=server.url) as client:
            assert client.get("/health").status_code == 200


@pytest.mark.slow("a server of its own: the limit is that of its process")
def test_idle_connections_lock_nobody_out():
    """150 of them, and few descriptors: each process has 128."""
    with serving(
        "embedded", *SMALL, starter=("tests.server.few_files", "128"), forked=False
    ) as running:
        threading.Thread(target=running.process.stdout.read, daemon=True).start()
        with contextlib.ExitStack() as stack:
            for i in range(150):
                one = stack.enter_context(connect(running.url))
                with contextlib.suppress(OSError):  # closed by now
                    one.sendall([b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\n"][i % 3])
            for _ in range(3):
                with httpx.Client(base_url=running.url, timeout=60) as client:
                    assert client.get("/health").status_code == 200
                    ask = {"prompt": "a", "max_tokens": 1}
                    assert client.post(COMPLETE, json=ask).status_code == 200


# -- paths below a proxy's ------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["/llm", "llm/", "/llm/"])
def test_paths_with_and_without_the_root_path_are_answered(tokenizer, given):
    options = ServerOptions(port=0, root_path=given, api_key=("k",))
    with (
        serving_as_quire(tokenizer, options) as url,
        httpx.Client(base_url=url) as client,
    ):
        key = {"Authorization": "Bearer k"}
        for prefix in ("", "/llm"):
            assert client.get(f"{prefix}/health").status_code == 200
            assert client.get(f"{prefix}/v1/models").status_code == 401
            assert client.get(f"{prefix}/v1/models", headers=key).status_code == 200
            got = client.post(f"{prefix}/v1/messages", json={}, headers=key)
            assert got.json()["type"] == "error"
        for path in ("/llm/llm/v1/models", "/llmv1/models", "/llmhealth", "/llm"):
            assert client.get(path, headers=key).status_code == 404, path
        document = client.get("/openapi.json", headers=key).json()
        assert document["servers"] == [{"url": "/llm"}]

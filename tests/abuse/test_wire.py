"""Bytes that no ordinary client sends: heads and bodies that are wrong, endless, or never come."""

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.abuse import dialects
from tests.abuse.harness import AUTH, KEY, OTHER_KEY, Case
from tests.abuse.wire import SMALL, address, head, post, status, talk

DEEP = 100_000


def json_cases():
    """37: bodies that are no JSON, or more of it than one could mean."""
    inner = b'"prompt":"a","input":"a","messages":[{"role":"user","content":"a"}],"max_tokens":1'
    whole = b"{" + inner + b"}"
    raws = {
        "nothing": b"",
        "white space": b" \n",
        "half": whole[:-1],
        "a list": b"[" + whole + b"]",
        "a string": b'"a"',
        "a number": b"1",
        "null": b"null",
        "trailing bytes": whole + b"{}",
        "trailing text": whole + b" x",
        "trailing NUL": whole + b"\0",
        "a comment": b"/* */" + whole,
        "trailing comma": b"{" + inner + b",}",
        "single quotes": whole.replace(b'"', b"'"),
        "deep lists": b"{" + inner + b',"x":' + b"[" * DEEP + b"]" * DEEP + b"}",
        "deep objects": b"{" + inner + b',"x":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
        "open lists": b"[" * DEEP,
        "a long number": b"{" + inner + b',"seed":' + b"9" * 1_000_000 + b"}",
        "a long fraction": b"{" + inner + b',"seed":0.5' + b"9" * 1_000_000 + b"}",
        "a long exponent": b"{" + inner + b',"seed":1e' + b"9" * 1_000_000 + b"}",
        "NaN": b"{" + inner + b',"seed":NaN}',
        "Infinity": b"{" + inner + b',"seed":-Infinity}',
        "UTF-16": whole.decode().encode("utf-16"),
        "UTF-32": whole.decode().encode("utf-32-le"),
        "a byte order mark": b"\xef\xbb\xbf" + whole,
        "no UTF-8": whole.replace(b'"a"', b'"\xff\xfe"'),
        "overlong UTF-8": whole.replace(b'"a"', b'"\xc0\xaf"'),
        "half a character": whole.replace(b'"a"', b'"\\ud800"'),
        "a raw control": whole.replace(b'"a"', b'"\x01"'),
        "a bad escape": whole.replace(b'"a"', b'"\\x41"'),
        "a million lists": b"{" + inner + b',"x":[' + b"[]," * 2_600_000 + b"[]]}",
        "a million names": b"{" + inner + b"".join(b',"%d":1' % i for i in range(600_000)) + b"}",
        "thousands of names": b"{" + inner + b"".join(b',"f%d":1' % i for i in range(5000)) + b"}",
        "too many bytes": whole[:-1] + b" " * (8 << 20) + b"}",
    }
    unknown = dict.fromkeys((dialects.MESSAGES, dialects.COUNT), "answered")
    for name, raw in raws.items():
        # `seed` means nothing in this dialect, and a number of many digits is JSON
        differs = unknown if name in ("a long fraction", "a long exponent") else {}
        yield Case(id=name, origin="37", raw=raw, routes=dialects.ALL, differs=differs)
    # The last of two says it; every reader of this server must be of one mind about that
    twice = b"{" + inner + b',"max_tokens":0,"max_tokens":1}'
    routes = (dialects.CHAT, dialects.COMPLETE, dialects.GENERATE, dialects.MESSAGES)
    yield Case(id="a name twice", origin="37", raw=twice, expect="answered", routes=routes)


def test_bodies_that_are_no_json_are_refused_on_every_route(victim):
    with victim.unharmed():
        victim.check(list(json_cases()))


def test_a_packed_body_is_not_unpacked(victim):
    headers = {"Content-Encoding": "gzip"}
    routes = dialects.ALL
    case = Case(id="gzip", origin="28 CVE-2026-100650", raw=SMALL, headers=headers, routes=routes)
    with victim.unharmed():
        victim.check([case])


LINES = {
    "100,000 headers": [f"X-{i}: a" for i in range(100_000)],
    "a header of 8 MiB": ["X-A: " + "a" * (8 << 20)],
    "headers of 8 MiB": [f"X-{i}: {'a' * (1 << 16)}" for i in range(128)],
}
PATHS = {
    "a path of 8 MiB": "/" + "a" * (8 << 20),
    "a million parameters": "/v1/models?" + "a=1&" * 1_500_000,
}
MALFORMED = {
    "another protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10,
    "HTTP/2 without asking": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/9": b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
    "two lengths": head(length=4, lines=["Content-Length: 47"]) + SMALL,
    "a length and chunks": head(length=4, lines=["Transfer-Encoding: chunked"]) + SMALL,
    "a negative length": head(length=-4) + SMALL,
    "a length beyond numbers": head(length="9" * 30) + SMALL,
    "a length with a sign": head(length="+47") + SMALL,
    "a hundred gigabytes to come": head(length=100 << 30) + SMALL,
    "a NUL in a header": post(lines=["X-Request-Id: a\0b"]),
    "a folded header": post(lines=["X-A: a", " b"]),
    "a space before the colon": post(lines=["X-A : a"]),
    "a path of raw bytes": b"GET /v1/models/\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    "a chunk beyond numbers": head(lines=["Transfer-Encoding: chunked"]) + b"F" * 17 + b"\r\n",
    "a chunk without a number": head(lines=["Transfer-Encoding: chunked"]) + b"zz\r\n",
    "chunks of chunks": head(lines=["Transfer-Encoding: chunked, chunked"]) + b"0\r\n\r\n",
}


@pytest.mark.parametrize("key", [KEY, None], ids=["with a key", "without"])
def test_heads_without_end_are_cut_off(victim, key):
    with victim.unharmed():
        for lines in LINES.values():
            got = talk(victim, head(length=len(SMALL), lines=lines, key=key) + SMALL)
            assert status(got) in (0, 400, 431), got[:200]
        for path in PATHS.values():
            got = talk(victim, head("GET", path, key=key))
            assert status(got) in (0, 400, 401, 404, 414), got[:200]
            assert len(got) < 4000


def test_what_is_not_http_is_refused(victim):
    with victim.unharmed(), ThreadPoolExecutor(4) as pool:
        for name, got in zip(
            MALFORMED, pool.map(lambda raw: talk(victim, raw), MALFORMED.values())
        ):
            assert status(got) in (0, 400, 401, 413, 501), (name, got[:200])


def test_a_chunked_body_without_end_is_cut_off_at_the_limit(victim):
    piece = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
    with victim.unharmed():
        got = talk(victim, head(lines=["Transfer-Encoding: chunked"]), *[piece] * 400)
        assert status(got) in (0, 413), got[:200]


def test_pipelined_requests_get_their_own_answers_and_nothing_is_smuggled(victim):
    """What a length leaves over is the next request, of whoever has the connection: no one else."""
    bodies = [json.dumps({"prompt": f"{i}", "max_tokens": 1, "echo": True}) for i in range(5)]
    raw = b"".join(post(one.encode()) for one in bodies)
    hidden = head("GET", "/v1/models", key=None)
    with victim.unharmed():
        got = b""
        with socket.create_connection(address(victim), timeout=60) as made:
            made.sendall(raw + post(SMALL + hidden) + hidden + post(lines=["Connection: close"]))
            while part := made.recv(65536):
                got += part
        assert got.count(b"HTTP/1.1 200") == 6
        assert got.count(b"HTTP/1.1 400") == 1  # the body has bytes behind its end
        assert got.count(b"HTTP/1.1 401") == 1
        places = [got.index(f'"text":"{i}'.encode()) for i in range(5)]
        assert places == sorted(places)


def test_connections_that_send_nothing_hold_nobody_up(victim):
    """Idle ones, half of a head, half of a body: others are served meanwhile."""
    openings = (b"", b"POST /v1/comp", head(length=1000) + b'{"prompt"', head(key=None, length=99))
    with victim.unharmed():
        made = [socket.create_connection(address(victim), timeout=60) for _ in range(600)]
        for i, one in enumerate(made):
            one.sendall(openings[i % len(openings)])
        began = time.monotonic()
        with httpx.Client(base_url=victim.url, headers=AUTH, timeout=60) as client:
            for _ in range(5):
                got = client.post("/v1/completions", json=json.loads(SMALL))
                assert got.status_code == 200
        assert time.monotonic() - began < 10
        for one in made:
            one.close()


def test_large_bodies_that_never_come_to_an_end_have_a_room_of_their_own(victim):
    """They may fill it; small bodies are read all the same, and in the end it is empty again."""
    almost = head(length=8 << 20) + b'{"prompt":"' + b"a" * ((8 << 20) - 100)
    large = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * (1 << 20)}).encode()
    with victim.unharmed():
        made = [socket.create_connection(address(victim), timeout=60) for _ in range(12)]
        for one in made:
            one.settimeout(5)
            with contextlib.suppress(TimeoutError, ConnectionError):
                one.sendall(almost)  # or it is refused and hung up on
        assert status(talk(victim, post())) == 200
        got = talk(victim, post(large))
        assert status(got) == 429, got[:300]
        assert b"retry-after" in got.lower()
        for one in made:
            one.close()
        deadline = time.monotonic() + 60
        while status(got) != 200 and time.monotonic() < deadline:
            got = talk(victim, post(large))
        assert status(got) == 200, got[:300]


def test_a_thousand_disconnects_leave_nothing_behind(victim):
    """In the middle of a head, of a body, of an answer, of a stream."""
    stream = json.dumps({"prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True})
    whole = json.dumps({"prompt": "b", "max_tokens": 500, "ignore_eos": True, "n": 4})
    pieces = (
        *(b"", b"GE", head(length=50), head(length=50) + b'{"pr'),
        *(post(stream.encode()), post(whole.encode())),
    )

    def leave(i):
        with socket.create_connection(address(victim), timeout=60) as made:
            made.sendall(pieces[i % len(pieces)])
            if i % 4 == 0:  # a reset in place of an end
                made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    with victim.unharmed(), ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(1000)))


def test_streams_that_nobody_reads_are_bounded(victim):
    """The server holds what its buffers hold, and others go on."""
    body = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 4}
    body |= {"logprobs": 20, "temperature": 1.0}
    raw = post(json.dumps(body).encode())
    with victim.unharmed(growth=120 << 20):
        made = []
        for _ in range(4):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(address(victim))
            one.sendall(raw)
            made.append(one)
        before = victim.figures().rss["quire-api"]
        time.sleep(3)  # so long they would have made tens of megabytes
        assert victim.figures().rss["quire-api"] - before < 100 << 20
        for one in made:
            one.close()


def test_one_id_from_two_users_at_a_time_crosses_nothing(victim):
    """40: a hundred requests with one X-Request-Id, of two keys, each with its own answer."""

    def ask(i):
        key = KEY if i % 2 else OTHER_KEY
        headers = {"Authorization": f"Bearer {key}", "X-Request-Id": "same"}
        body = {"prompt": f"number {i}:", "max_tokens": 2, "echo": True, "stream": i % 3 == 0}
        with httpx.Client(base_url=victim.url, headers=headers, timeout=60) as client:
            got = client.post("/v1/completions", json=body)
        return i, got

    with victim.unharmed(), ThreadPoolExecutor(16) as pool:
        for i, got in pool.map(ask, range(100)):
            assert got.status_code == 200, got.text
            assert f"number {i}:" in got.text
            assert got.text.count("number") == 1
            assert "cmpl-same" in got.text


def test_ids_do_not_forge_lines_of_the_log(victim):
    forged = ("a%0d%0aFORGED", "\x85FORGED", "\u2028FORGED", "\x1b[2JFORGED", "x" * 1000)
    with victim.unharmed():
        for one in forged:
            raw = json.dumps({"prompt": "a", "max_tokens": 1, "request_id": f"{one}\nFORGED"})
            assert status(talk(victim, post(raw.encode()))) == 400
            got = talk(victim, post(lines=[f"X-Request-Id: {one}".encode().decode("latin-1")]))
            assert status(got) in (200, 400)
            strange = {"model": f"{one}\nFORGED", "prompt": "a", f"{one}\nFORGED": 1}
            talk(victim, post(json.dumps(strange).encode()))
            talk(victim, post(path=f"/v1/{one}%0aFORGED".encode().decode("latin-1")))
        assert not [line for line in victim.lines if line.startswith("FORGED")]
        assert not [line for line in victim.lines if "\x1b[2J" in line]
    for key in (KEY, OTHER_KEY):
        assert not [line for line in victim.lines if key in line]

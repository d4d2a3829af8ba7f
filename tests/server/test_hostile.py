"""What strangers send to break servers. Each is answered or refused, and others notice nothing."""

import json
import socket
import threading

import httpx
import pytest

from tests.server.harness import Server

pytestmark = pytest.mark.slow("hundreds of requests at once, and the most sequences there may be")

COMPLETE = "/v1/completions"
SMALL = b'{"prompt":"a","max_tokens":1}'


@pytest.fixture(scope="module")
def server(tokenizer):
    with Server(tokenizer).running() as running:
        yield running


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


def post(body, *headers, path=COMPLETE):
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    if not any(line.startswith(("Content-Length", "Transfer")) for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def talk(server, *pieces):
    """All that comes back until the server closes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as made:
        for piece in pieces:
            made.sendall(piece)
        got = b""
        try:
            while part := made.recv(65536):
                got += part
        except ConnectionResetError:
            pass  # it closed while we were sending
    return got


def chunked(size):
    return post(size + b"\r\n" + SMALL, "Transfer-Encoding: chunked")


MALFORMED = {
    "another protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10,
    "two lengths": post(SMALL, "Content-Length: 4", "Content-Length: 29"),
    "a length and chunks": post(SMALL, "Content-Length: 4", "Transfer-Encoding: chunked"),
    "a negative length": post(SMALL, "Content-Length: -4"),
    "a length beyond numbers": post(SMALL, "Content-Length: 99999999999999999999"),
    "a chunk beyond numbers": chunked(b"F" * 17),
    "a chunk without a number": chunked(b"zz"),
    "a NUL in a header": post(SMALL, "X-Request-Id: a\0b"),
    "a path of raw bytes": b"GET /v1/models/\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP/2 without asking": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
def test_what_is_not_http_is_refused_and_the_connection_closed(server, raw):
    assert talk(server, raw).startswith(b"HTTP/1.1 400 ")


def test_pipelined_requests_are_answered_in_their_order(server):
    bodies = [json.dumps({"prompt": f"{i}", "max_tokens": 1, "echo": True}) for i in range(5)]
    raw = b"".join(post(body.encode()) for body in bodies[:-1])
    got = talk(server, raw + post(b"{"), post(bodies[-1].encode(), "Connection: close"))
    assert got.count(b"HTTP/1.1 200") == 5
    assert got.count(b"HTTP/1.1 400") == 1
    places = [got.index(f'"text":"{i}'.encode()) for i in range(5)]
    assert places == sorted(places)


def test_a_hundred_requests_with_one_id_get_their_own_answers(server):
    results = []

    def ask(i):
        headers = {"X-Request-Id": "same"}
        body = {"prompt": f"number {i}", "max_tokens": 200}
        got = httpx.post(server.url + COMPLETE, json=body, headers=headers, timeout=60)
        results.append((i, got.json()["choices"][0]["text"]))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    encode = server.tokenizer.encode
    assert len(results) == 100
    for i, text in results:
        assert text == server.model.text(encode(f"number {i}", add_special_tokens=False))


@pytest.mark.long("the test below has as many")
def test_the_most_sequences_there_may_be_do_not_take_for_ever(http):
    got = http.post(COMPLETE, json={"prompt": "a", "n": 16384, "max_tokens": 1})
    assert len(got.json()["choices"]) == 16384


def test_leaving_the_most_sequences_ends_them_at_once(server):
    """Neither ending one nor aborting all may look at all of them: that was minutes."""
    body = json.dumps({"prompt": "a", "n": 16384, "max_tokens": 400, "ignore_eos": True})
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as made:
        made.sendall(post(body.encode()))
        while not server.stats().running:
            pass
    server.wait_idle()


HUGE = {
    "half a million prompts": b'{"prompt":[' + b"[1]," * 500_000 + b"[1]]}",
    "ten million tokens": b'{"prompt":[' + b"1," * 10**7 + b"1]}",
    "ten megabytes of text": json.dumps({"prompt": "word " * 2_000_000}).encode(),
    "a deep value": b'{"prompt":"a","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of a million digits": b'{"prompt":"a","seed":' + b"9" * 10**6 + b"}",
    "more than the limit": b'{"prompt":"' + b"a" * (33 << 20) + b'"}',
}


@pytest.mark.parametrize("raw", HUGE.values(), ids=HUGE)
def test_huge_bodies_are_refused(http, raw):
    got = http.post(COMPLETE, content=raw, headers={"content-type": "application/json"})
    assert got.status_code in (400, 413), got.text
    assert len(got.text) < 2000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a" * 5_000_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 5_000_000}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a" * 5_000_000}]}),
        ("/detokenize", {"tokens": [1] * 5_000_000}),
    ],
)
def test_texts_that_no_model_reads_are_not_tokenized(http, path, body):
    assert http.post(path, json=body).status_code in (400, 413)


def test_forbidding_every_token_is_the_clients_fault(http, server):
    eos = server.tokenizer.eos_token_id
    body = {"prompt": "a", "allowed_token_ids": [eos], "min_tokens": 2}
    got = http.post(COMPLETE, json=body)
    assert (got.status_code, got.json()["error"]["param"]) == (400, "allowed_token_ids")


@pytest.mark.parametrize(("count", "status"), [(100, 200), (100_000, 400)])
def test_many_unknown_names_are_told_in_short_or_refused(http, count, status):
    body = {"prompt": "a", "max_tokens": 1, **{f"field{i}": 1 for i in range(count)}}
    got = http.post(COMPLETE, json=body)
    assert got.status_code == status
    assert len(got.headers.get("x-quire-ignored", "")) < 2000

"""A strict reader of event streams against every stream there is; and the reader itself."""

import http.client
import json

import httpx
import pytest

from tests.clients.cases import QUESTIONS, ask
from tests.clients.conftest import KEY, MODEL
from tests.clients.sse import Event, Reader, named_events, openai_chunks, read

AUTH = {"Authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize(
    ("raw", "events"),
    [
        (b"data: a\n\n", [Event("message", "a")]),
        (b"\xef\xbb\xbfdata:a\r\n\r\n", [Event("message", "a")]),
        (b"data: a\rdata:  b\r\r", [Event("message", "a\n b")]),
        (b": hi\n\nevent: x\nid: 7\ndata\n\n", [Event("x", "", "7")]),
        (b"data: \xe6\xb1\x89\n\ndata: b\n\n", [Event("message", "汉"), Event("message", "b")]),
    ],
)
def test_the_reader_reads_as_the_standard_says_in_any_cut(raw, events):
    assert read([raw]) == events
    assert read(raw[i : i + 1] for i in range(len(raw))) == events
    for cut in range(len(raw)):
        assert read([raw[:cut], raw[cut:]]) == events


@pytest.mark.parametrize("raw", [b"data: a\n", b"data: a", b"data: \xff\n\n", b"datum: a\n\n"])
def test_the_reader_refuses_what_is_broken(raw):
    with pytest.raises((AssertionError, UnicodeDecodeError)):
        read([raw])


def stream(served, path, body, size=None):
    """(headers, events) of a stream."""
    with httpx.stream(
        "POST",
        served.url + path,
        json={"model": MODEL, **body, "stream": True},
        headers=AUTH,
        timeout=60,
    ) as got:
        assert got.status_code == 200, got.read()
        return got.headers, read(got.iter_bytes(size))


@pytest.mark.parametrize("text", QUESTIONS.values(), ids=QUESTIONS)
@pytest.mark.parametrize("size", [None, 1, 7])
def test_chat_chunks(served, text, size):
    body = {"messages": ask(text), "temperature": 0, "stream_options": {"include_usage": True}}
    headers, events = stream(served, "/v1/chat/completions", body, size)
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "no-cache" in headers["cache-control"]
    assert "content-encoding" not in headers
    chunks = openai_chunks(events)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    first, last, usage = chunks[0], chunks[-2], chunks[-1]
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert last["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    ends = [c["choices"][0]["finish_reason"] for c in chunks[:-2]]
    assert set(ends) == {None}


def test_completions_chunks(served):
    body = {"prompt": ["a", "b"], "n": 2, "seed": 1, "max_tokens": 5, "ignore_eos": True}
    _, events = stream(served, "/v1/completions", body)
    chunks = openai_chunks(events)
    ends = [c["index"] for one in chunks for c in one["choices"] if c["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]


def test_responses_events(served):
    body = {"input": "What is the capital of France?", "temperature": 0}
    _, events = stream(served, "/v1/responses", body)
    named = named_events(events)
    assert [data["sequence_number"] for _, data in named] == list(range(len(named)))
    names = [name for name, _ in named]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == "response.completed"
    said = "".join(d["delta"] for n, d in named if n == "response.output_text.delta")
    (item,) = named[-1][1]["response"]["output"]
    assert item["content"][0]["text"] == said


def test_messages_events(served):
    body = {"messages": ask("What is the capital of France?"), "max_tokens": 60, "temperature": 0}
    _, events = stream(served, "/v1/messages", body)
    names = [name for name, _ in named_events(events) if name != "ping"]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}


def test_http_1_0_clients_get_a_whole_stream(served):
    """No chunked encoding for those: the end of the connection is the end of the stream."""
    host, port = served.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection._http_vsn, connection._http_vsn_str = 10, "HTTP/1.0"
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 4, "stream": True})
    connection.request(
        "POST", "/v1/completions", body, {**AUTH, "Content-Type": "application/json"}
    )
    got = connection.getresponse()
    assert got.status == 200
    assert openai_chunks(read([got.read()]))
    connection.close()


def test_a_reader_of_single_bytes_sees_no_broken_character(served):
    body = {"messages": ask("法国的首都是哪里？"), "temperature": 0}
    reader = Reader()
    with (
        httpx.Client(base_url=served.url, headers=AUTH, timeout=60) as client,
        client.stream(
            "POST", "/v1/chat/completions", json={"model": MODEL, "stream": True, **body}
        ) as got,
    ):
        for byte in got.iter_raw(1):
            for event in reader.push(byte):
                assert "\ufffd" not in event.data
    reader.close()

"""A client that goes away frees what it used, on every route, streamed or not, whenever it goes."""

import asyncio
import json
import random

import httpx
import pytest

from tests.server.harness import Server

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "go on"}]},
    "/v1/completions": {"prompt": ["go", "on"]},
}
ENDLESS = {"ignore_eos": True, "max_tokens": 400}


@pytest.fixture(scope="module")
def slow(tokenizer):
    with Server(tokenizer, step_s=0.001).running() as running:
        yield running


async def connect_and_leave(port, path, body, after_bytes):
    """Send a request, read so many bytes of the answer, and hang up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    cut = len(raw) if after_bytes is not None else random.randrange(len(raw))
    writer.write(head.encode() + raw[:cut])
    await writer.drain()
    if after_bytes:
        await asyncio.wait_for(reader.read(after_bytes), 10)
    elif after_bytes == 0:
        await asyncio.sleep(random.random() * 0.02)
    writer.transport.abort()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_the_request_long_before_its_end(slow, path, stream):
    body = {**ROUTES[path], **ENDLESS, "stream": stream, "n": 2}
    port = int(slow.url.rpartition(":")[2])
    tokens_before = slow.executor.said

    async def main():
        await connect_and_leave(port, path, body, 200 if stream else 0)

    asyncio.run(main())
    slow.wait_idle()
    assert slow.executor.said - tokens_before < 400


def test_many_random_disconnects_leave_nothing(slow):
    port = int(slow.url.rpartition(":")[2])
    draw = random.Random(3)

    async def one():
        path = draw.choice(list(ROUTES))
        stream = draw.random() < 0.6
        body = {**ROUTES[path], **ENDLESS, "stream": stream, "n": draw.choice([1, 1, 3])}
        if draw.random() < 0.3:
            body["stop"] = ["s", "cat"]
        after = draw.choice([None, 0, draw.randrange(1, 3000)] if stream else [None, 0])
        await connect_and_leave(port, path, body, after)

    async def main():
        for _ in range(34):
            await asyncio.gather(*(one() for _ in range(30)))

    asyncio.run(main())
    stats = slow.wait_idle()
    assert stats.free_blocks + stats.cached_blocks == stats.blocks
    assert slow.client._streams == {}
    answer = slow.answer(ROUTES["/v1/chat/completions"]["messages"])
    got = httpx.post(f"{slow.url}/v1/chat/completions", json=ROUTES["/v1/chat/completions"])
    assert got.json()["choices"][0]["message"]["content"] == answer


def test_a_reader_that_is_slow_gets_everything_in_the_end(slow):
    body = {**ROUTES["/v1/completions"], **ENDLESS, "prompt": "slow", "stream": True}
    port = int(slow.url.rpartition(":")[2])

    async def main():
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**12)
        raw = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        got = b""
        while chunk := await reader.read(1500):
            got += chunk
            await asyncio.sleep(0)
        writer.close()
        return got.decode()

    text = asyncio.run(main())
    assert text.count('"finish_reason":"length"') == 1
    assert "data: [DONE]" in text

"""Measures the API process's cost of a streamed token: updates in, bytes out. One JSON line a case.

usage: python bench/sse.py [--streams 256] [--turns 200] [--cases chat,completions,...] [--http]

A stub engine yields one token of each stream a turn; the real app (routes, middlewares,
detokenizer, encoding) turns each into a chunk. Without --http the ASGI calls are made in this
process and their output is dropped; with it uvicorn writes to sockets and another process reads
them. us: CPU microseconds of this process per chunk, system time included; best of three runs.
"""

import argparse
import asyncio
import gc
import itertools
import json
import random
import socket
import subprocess
import sys
import time

import uvicorn
import uvloop

from quire import embedded
from quire.core.types import TokenLogprobs, Update
from quire.server.app import create_app
from quire.server.app_state import AppState
from quire.text.input_processor import InputProcessor
from quire.text.tokenizing.tokenizer import load_tokenizer

HELLO = {"messages": [{"role": "user", "content": "Say something long."}], "stream": True}
PROMPT = {"prompt": "Say something long.", "max_tokens": None, "stream": True}
CASES = {
    "chat": ("/v1/chat/completions", HELLO),
    "completions": ("/v1/completions", PROMPT),
    "usage": (
        "/v1/chat/completions",
        {**HELLO, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "stop": ("/v1/chat/completions", {**HELLO, "stop": ["###", "\n\nUser:"]}),
    "ids": ("/v1/chat/completions", {**HELLO, "return_token_ids": True}),
    "logprobs": ("/v1/chat/completions", {**HELLO, "logprobs": True, "top_logprobs": 5}),
    "n4": ("/v1/chat/completions", {**HELLO, "n": 4, "temperature": 1}),
}


class Stream:
    """Has the interface of quire.engine.client.engine_client.Stream, without an engine."""

    def __init__(self, requests):
        self.live = [(r.id, index) for r in requests for index in range(r.n)]
        self.request_ids = tuple(r.id for r in requests)
        self.logprobs = requests[0].params.logprobs
        self.closed = False
        self._pending = []
        self._waiter = None

    def __aiter__(self):
        return self

    async def __anext__(self):
        while not self._pending:
            if self.closed or not self.live:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        batch, self._pending = self._pending, []
        return batch

    def end_sequence(self, request_id, index):
        self.live.remove((request_id, index))

    def close(self):
        self.closed = True
        self._wake()

    def push(self, updates):
        self._pending.extend(updates)
        self._wake()

    def _wake(self):
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Engine:
    """Yields one token a turn for each stream."""

    def __init__(self, vocab):
        self.dead = None
        self.streams = []
        draw = random.Random(0)
        self._ids = itertools.cycle([draw.randrange(300, vocab) for _ in range(100_000)])
        self._steps = {}

    def start(self):
        pass

    async def stop(self):
        pass

    async def generate(self, requests):
        stream = Stream(list(requests))
        self.streams.append(stream)
        return stream

    def turn(self, finish=None):
        for stream in self.streams:
            stream.push([self._update(stream, *position, finish) for position in stream.live])
            if finish is not None:
                stream.live = []

    def _update(self, stream, request_id, index, finish):
        token = next(self._ids)
        logprobs = None
        if stream.logprobs is not None:
            ids = [token, *range(400, 400 + stream.logprobs)]
            logprobs = [TokenLogprobs(ids, [-0.5] * len(ids), list(range(1, len(ids) + 1)))]
        return Update(request_id, index, (token,), finish, logprobs=logprobs)


def make_services():
    tokenizer = load_tokenizer(embedded.path())
    vocab = len(tokenizer)
    inputs = InputProcessor(tokenizer, max_model_len=1 << 20, vocab_size=vocab)
    return AppState(Engine(vocab), inputs, tokenizer, None, ("bench-model",), 1 << 20)


class Call:
    """One ASGI call whose answer is counted and dropped."""

    chunks = 0

    def __init__(self, app, path, body):
        self._app = app
        self._body = json.dumps(body).encode()
        self._disconnected = asyncio.Event()
        self._body_sent = False
        self.scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "path": path, "raw_path": path.encode(), "root_path": "", "scheme": "http",
            "query_string": b"", "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
        }  # fmt: skip

    async def run(self):
        await self._app(self.scope, self._receive, self._send)

    async def _receive(self):
        if self._body_sent:
            await self._disconnected.wait()
            return {"type": "http.disconnect"}
        self._body_sent = True
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message):
        if message["type"] == "http.response.start":
            assert message["status"] == 200, message
        elif message["body"]:
            Call.chunks += message["body"].count(b"data: ")


async def in_process(case, streams, turns):
    services = make_services()
    engine, app = services.engine, create_app(services)
    calls = [asyncio.create_task(Call(app, *case).run()) for _ in range(streams)]
    while len(engine.streams) < streams:
        await asyncio.sleep(0)
    Call.chunks = 0
    for _ in range(3):  # first chunks differ
        await turn(engine, lambda: Call.chunks)
    begun, before = time.process_time(), Call.chunks
    for _ in range(turns):
        await turn(engine, lambda: Call.chunks)
    spent, chunks = time.process_time() - begun, Call.chunks - before
    engine.turn("length")
    await asyncio.gather(*calls)
    return spent, chunks


async def turn(engine, count):
    due = count() + sum(len(stream.live) for stream in engine.streams)
    engine.turn()
    while count() < due:
        await asyncio.sleep(0)


READER = """
import asyncio, sys
port, streams, head = int(sys.argv[1]), int(sys.argv[2]), sys.stdin.buffer.read()
async def one():
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    writer.write(head)
    while await reader.read(2**18):
        pass
async def main():
    await asyncio.gather(*(one() for _ in range(streams)))
asyncio.run(main())
"""


async def over_http(case, streams, turns):
    services = make_services()
    engine, (path, body) = services.engine, case
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    config = uvicorn.Config(create_app(services), log_level="critical", http="httptools")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve([listener]))
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    port = listener.getsockname()[1]
    command = [sys.executable, "-c", READER, str(port), str(streams)]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE)
    reader.stdin.write(head.encode() + raw)
    reader.stdin.close()
    while len(engine.streams) < streams:
        await asyncio.sleep(0.01)
    for _ in range(3):
        await wait_until_idle(engine)
    begun, chunks = time.process_time(), 0
    for _ in range(turns):
        chunks += sum(len(stream.live) for stream in engine.streams)
        await wait_until_idle(engine)
    spent = time.process_time() - begun
    engine.turn("length")
    await asyncio.to_thread(reader.wait)
    server.should_exit = True
    await task
    return spent, chunks


async def wait_until_idle(engine):
    """Wait until every stream waits for the next turn."""
    engine.turn()
    while any(stream._pending for stream in engine.streams):
        await asyncio.sleep(0)
    await asyncio.sleep(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--http", action="store_true")
    args = parser.parse_args()
    run = over_http if args.http else in_process
    for name in args.cases.split(","):
        rounds = []
        for _ in range(3):
            gc.collect()
            spent, chunks = uvloop.run(run(CASES[name], args.streams, args.turns))
            rounds.append(spent / chunks * 1e6)
        mode = "http" if args.http else "asgi"
        print(json.dumps({"case": name, "mode": mode, "streams": args.streams, "chunks": chunks,
                          "us": round(min(rounds), 2)}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

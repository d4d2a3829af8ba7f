"""What a front with several engines adds to a token over a front with one. One JSON line a case.

    python bench/front.py [--engines 1,4] [--streams 25] [--step-ms 20] [--tokens 64] [--prompt 512]

Each engine is a fake behind the real codec; pool, placement, routes, detokenizer and encoding are real, and
chunks are written to a TCP socket. `--streams` clients for each engine stream completions, and each asks again when its answer has
ended. An engine makes a token of each of its streams every --step-ms, at its own times (--together: all at the same).

Time is the processor time of this thread, plus the time in which it has nothing to do, which is skipped: other load
of the machine does not count. The front has one core, and the engines others. Printed in ms, median and 99th percentile:
`request`, from a body to the message that an engine gets; `token`, from an engine's message to a chunk that is written, and
`first` the same for the first one; of all placements the greatest share of an engine over the mean; processor share.
"""

import argparse
import asyncio
import contextvars
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import uvloop
from sse import Call, make_services

from quire.core.scheduler_stats import EngineLoad
from quire.core.types import Update
from quire.engine import message_codec
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_pool import EnginePool
from quire.engine.messages import AddRequests, CallReply, OutputBatch, request_from_wire
from quire.server.app import create_app

DRAIN = "import socket, sys\ns = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\nwhile s.recv(1 << 20): pass"

BEGAN = contextvars.ContextVar("BEGAN")
"""When the request of this context was read."""

WARM = 150
"""Steps before those that are measured."""


class Clock:
    """Seconds of this thread's processor time, without those of fakes, with those skipped."""

    def __init__(self):
        self.more = 0.0

    def now(self):
        return time.thread_time() + self.more


class FakeEngine:
    """A transport, and the engine behind it."""

    def __init__(self, bench):
        self._bench = bench
        self.live, self._new, self.placed = {}, [], 0

    def start(self, deliver, die, away, back):
        self._deliver = deliver

    def send(self, message):
        data = message_codec.encode_to_engine(message)
        now = self._bench.clock.now()
        message = message_codec.decode_to_engine(data)
        if isinstance(message, AddRequests):
            (request,) = [request_from_wire(one) for one in message.requests]
            self._new.append((message.call_id, request.id))
            self._bench.reached(now)
            self.placed += 1
        self._bench.clock.more += now - self._bench.clock.now()

    def step(self, due):
        """Make a token of each sequence. due: when the message leaves the engine."""
        began = self._bench.clock.now()
        replies = [CallReply(number) for number, _ in self._new]
        updates = []
        for name in list(self.live):
            self.live[name] -= 1
            done = "length" if not self.live[name] else None
            updates.append(Update(name, 0, (next(self._bench.ids),), done))
            self._bench.owed.setdefault(name.rpartition("-")[0], due)
            if done:
                self._bench.asking += 1
                del self.live[name]
        self.live |= {name: self._bench.length() for _, name in self._new}
        self._new = []
        data = message_codec.encode(OutputBatch(updates, replies, EngineLoad(0, len(self.live))))
        self._bench.clock.more += began - self._bench.clock.now()
        self._deliver(message_codec.decode_from_engine(data))

    async def stop(self):
        pass

    def close(self):
        pass


class Client(Call):
    """A call whose chunks are timed."""

    def __init__(self, bench, body):
        super().__init__(bench.app, "/v1/completions", body)
        self._bench, self._id = bench, None

    async def _send(self, message):
        if message["type"] == "http.response.start":
            assert message["status"] == 200, message
            return
        bench, body = self._bench, message["body"]
        if not body:
            return
        bench.socket.sendall(body)
        now = bench.clock.now()
        if self._id is None:
            self._id = json.loads(body[6:].split(b"\n")[0])["id"]
            bench.first.append(now - bench.owed.pop(self._id))
        elif self._id in bench.owed:
            bench.token.append(now - bench.owed.pop(self._id))
        bench.clock.more += now - bench.clock.now()


class Bench:
    def __init__(self, args, engines, sink):
        self.clock, self.socket = Clock(), sink
        self.owed = {}  # by request, when the message with its oldest unwritten token was sent
        self.asking = args.streams * engines  # clients whose request has not reached an engine
        self.request, self.first, self.token = [], [], []
        self._args, self._random = args, random.Random(0)
        services = make_services()
        self.ids = services.engine._ids
        self.engines = [FakeEngine(self) for _ in range(engines)]
        pool = EnginePool([EngineClient(one) for one in self.engines], cache_tokens=200_000)
        services = replace(services, engine=pool)
        self.app = create_app(services)
        pool.start()

    def length(self):
        return self._random.randrange(self._args.tokens // 2, self._args.tokens * 3 // 2)

    def reached(self, now):
        self.request.append(now - BEGAN.get())
        self.asking -= 1

    async def client(self):
        while True:
            before = self.clock.now()
            prompt = [self._random.randrange(300, 4000) for _ in range(self._args.prompt)]
            body = {"prompt": prompt, "max_tokens": 2 * self._args.tokens, "stream": True}
            call = Client(self, body)
            self.clock.more += before - self.clock.now()
            BEGAN.set(self.clock.now())
            await call.run()

    async def run(self):
        a, step = self._args, self._args.step_ms / 1e3
        clients = [asyncio.create_task(self.client()) for _ in range(self.asking)]
        while self.asking:
            await asyncio.sleep(0)
        start = self.clock.now()
        engines = len(self.engines)
        due = [start + (0 if a.together else i * step / engines) for i in range(engines)]
        skipped = 0.0
        for number in range((WARM + a.steps) * engines):
            if number == WARM * engines:  # until then clients are in step with each other
                for times in (self.request, self.first, self.token):
                    times.clear()
                start, skipped = self.clock.now(), 0.0
            i = min(range(engines), key=due.__getitem__)
            while (left := due[i] - self.clock.now()) > 0:
                if self.owed or self.asking:
                    await asyncio.sleep(0)
                else:
                    skipped += left
                    self.clock.more += left
            self.engines[i].step(due[i])
            due[i] += step * (1 if a.together else self._random.uniform(0.9, 1.1))
            await asyncio.sleep(0)
        busy = 1 - skipped / (self.clock.now() - start)
        for one in clients:
            one.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        return busy


def ms(seconds):
    """Median and 99th percentile."""
    return [
        round(1e3 * q, 3)
        for q in (statistics.median(seconds), statistics.quantiles(seconds, n=100)[98])
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", default="1,4")
    parser.add_argument("--streams", type=int, default=25, help="of each engine")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=400, help="of each engine")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--prompt", type=int, default=512, help="its tokens")
    parser.add_argument("--together", action="store_true", help="all engines step at the same time")
    args = parser.parse_args()
    for engines in map(int, args.engines.split(",")):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            drain = subprocess.Popen([sys.executable, "-c", DRAIN, str(listener.getsockname()[1])])
            sink, _ = listener.accept()
        with sink:
            bench = Bench(args, engines, sink)
            busy = uvloop.run(bench.run())
        drain.wait()
        placed = [one.placed for one in bench.engines]
        print(json.dumps({"bench": "front", "engines": engines, "streams": args.streams, "step_ms": args.step_ms,
                          "together": args.together, "request": ms(bench.request), "first": ms(bench.first),
                          "token": ms(bench.token), "most placed over mean": round(max(placed) * engines / sum(placed), 3),
                          "busy": round(busy, 3)}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

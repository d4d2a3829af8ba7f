"""Measures the engine process's cost of client messages, per turn and per request. JSON lines.

    python bench/serving.py [--rows 256] [--senders 1,4]

A turn: poll the socket, route the updates of `rows` decoding sequences, make messages, send them
over ZeroMQ to processes that read and decode them. The step itself is excluded. The median and the
99th percentile of 2,000 turns, in microseconds. Needs no model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from multiprocessing import get_context

import zmq

from quire.core.params import SamplingParams
from quire.core.types import Request, StopConditions, Update
from quire.engine import message_codec
from quire.engine.client.zmq_transport import engine_address
from quire.engine.core.engine_rpc import EngineRpc
from quire.engine.core.process import EngineCoreProcess
from quire.engine.messages import PROTOCOL_VERSION, AddRequests, Hello, request_to_wire

TURNS = 2000


class StubEngine:
    """An engine that generates one token of each sequence in every step."""

    idle = empty = False

    def __init__(self):
        self.ids = []

    def set_ready_callback(self, callback):
        """Ignore it: requests are ready at once."""

    def set_observers(self, *observers):
        """Ignore them."""

    def check_batch(self, requests):
        """Admit all."""

    def add(self, request):
        self.ids.append(request.id)

    def step(self):
        return [Update(one, 0, (12345,), cached_tokens=16) for one in self.ids]

    def check(self):
        """Do nothing: there is no state to check."""

    snapshot = check


class StubStarter:
    stopping, gone_clients = False, ()


def client_process(folder, number, rows):
    """Add requests, then read updates until the engine has ended."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, b"api-%d" % number)
    socket.set_hwm(0)
    socket.setsockopt(zmq.RCVTIMEO, 2000)
    socket.connect(engine_address(folder))
    socket.send(message_codec.encode(Hello(PROTOCOL_VERSION, "bench")))
    for i in range(rows):
        socket.send(
            message_codec.encode(AddRequests(i, [request_to_wire(request(f"{number}-{i}"))]))
        )
    try:
        while True:
            message_codec.decode_from_engine(socket.recv())
    except zmq.Again:
        os._exit(0)


def request(name):
    params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    name = f"chatcmpl-0123456789abcdef0123456789abcdef-{name}"
    return Request(name, tuple(range(10_000, 10_512)), StopConditions(128), params, arrived_at=1e5)


def measure(rows, senders):
    engine = StubEngine()
    spawn = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        rpc = EngineCoreProcess(EngineRpc(engine), folder, StubStarter())
        each = rows // senders
        for number in range(senders):
            spawn.Process(target=client_process, args=(folder, number, each), daemon=True).start()
        adding = 0.0
        while len(engine.ids) < each * senders:
            began = time.perf_counter()
            before = len(engine.ids)
            rpc._read_inbox()
            adding += (time.perf_counter() - began) if len(engine.ids) > before else 0.0
        stubs = timed(engine.step)
        turns = timed(rpc.run_once)
        rpc._socket.close(0)
        rpc._context.term()
    print(
        json.dumps(
            {
                "bench": "serving",
                "rows": rows,
                "senders": senders,
                "turn_us": round(statistics.median(turns) - statistics.median(stubs), 1),
                "turn_p99_us": round(sorted(turns)[int(len(turns) * 0.99)], 1),
                "add_us": round(adding / (each * senders) * 1e6, 1),
            }
        ),
        flush=True,
    )


def timed(function):
    found = []
    for _ in range(TURNS):
        began = time.perf_counter()
        function()
        found.append((time.perf_counter() - began) * 1e6)
        time.sleep(0.0005)  # in place of the step: ZeroMQ's threads need time
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--senders", default="1,4")
    args = parser.parse_args()
    for senders in map(int, args.senders.split(",")):
        measure(args.rows, senders)


if __name__ == "__main__":
    main()

"""One way of a step to another process: shared memory against a socket, in turns.

    python bench/shm_broadcast.py [--bytes 4096] [--messages 2000] [--gap-us 500]

Prints microseconds from before the message is encoded for the channel until the reader has it, at
the 50th and the 99th percentile. The reader sleeps, or spins for 2 ms first; messages come with a
gap in which it waits. Both processes share one monotonic clock. On a machine with fewer free cores
than processes spinning takes the writer's core: look at the ratio of the sleeping reader.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import struct
import subprocess
import sys
import time

import msgspec

from quire.executors.shm_broadcast import RingHandle, RingReader, RingWriter, create_ring
from quire.sandbox.pipe import WorkerPipe

ROUNDS = 3
STAMP = struct.Struct("=q")
DECODER = msgspec.msgpack.Decoder(bytes)


def percentile(values: list[int], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] / 1000


def read(channel: str, messages: int, fds: list[int]) -> None:
    """In the child: print the time of each message in ns."""
    took = []
    if channel == "socket":
        pipe = WorkerPipe(socket.socket(fileno=fds[0]), DECODER)
        receive = pipe.receive
    else:
        spin = 0.002 if channel == "spinning" else 0.0
        reader = RingReader(RingHandle(fds[0], (fds[1],), 64), 0, spin)
        receive = lambda: reader.receive()[1]  # noqa: E731
    print("ready", flush=True)
    for _ in range(messages):
        data = receive()
        assert data is not None
        took.append(time.monotonic_ns() - STAMP.unpack_from(data)[0])
    print(*took)


def measure(channel: str, size: int, messages: int, gap_s: float) -> list[int]:
    filler = os.urandom(size - STAMP.size)
    if channel == "socket":
        ours, theirs = socket.socketpair()
        pipe, fds = WorkerPipe(ours, DECODER), [theirs.fileno()]
        send = pipe.send
    else:
        handle = create_ring(1, 64)
        writer, fds = RingWriter(handle), list(handle.fds)
        send = lambda data: writer.send(0, data)  # noqa: E731
    command = [sys.executable, __file__, "--read", channel, "--messages", str(messages)]
    child = subprocess.Popen(
        [*command, "--fds", *map(str, fds)], pass_fds=fds, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    for _ in range(messages):
        time.sleep(gap_s)
        send(STAMP.pack(time.monotonic_ns()) + filler)
    out, _ = child.communicate()
    return [int(one) for one in out.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--gap-us", type=float, default=500)
    parser.add_argument("--read")
    parser.add_argument("--fds", type=int, nargs="*")
    args = parser.parse_args()
    if args.read:
        read(args.read, args.messages, args.fds)
        return
    print(f"{len(os.sched_getaffinity(0))} cores; {args.bytes} bytes; us one way, p50 / p99")
    found: dict[str, list[list[int]]] = {"socket": [], "sleeping": [], "spinning": []}
    for _ in range(ROUNDS):  # in turns: what the machine does else meets all
        for channel, rounds in found.items():
            rounds.append(measure(channel, args.bytes, args.messages, args.gap_us / 1e6))
    base = statistics.median(percentile(one, 0.5) for one in found["socket"])
    for channel, rounds in found.items():
        p50 = statistics.median(percentile(one, 0.5) for one in rounds)
        p99 = statistics.median(percentile(one, 0.99) for one in rounds)
        print(f"{channel:9} {p50:8.1f} / {p99:8.1f}   x{base / p50:.2f} of the socket at p50")


if __name__ == "__main__":
    main()

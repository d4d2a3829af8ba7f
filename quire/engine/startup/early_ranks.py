"""Early ranks: processes that import what a rank needs while the engine's process does the same.

A rank inherits its socket and shared memory. These processes start before there are any, so they
get the descriptors through a socket of their own, with the numbers that they have in the engine's
process, and a rank's environment.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence

import msgspec

from quire import env
from quire.config.options import ParallelOptions
from quire.engine.supervise.process_pipe import ignore_signals, spawn_process

MOST_FDS = 250
"""Descriptors that one message of a socket can carry."""


class BecomeRank(msgspec.Struct, frozen=True):
    """To the process: be a rank. numbers: of the descriptors that come with it, in their sender."""

    numbers: list[int]  # the first is the rank's socket
    environment: dict[str, str]


class EarlyRank:
    """One process that imports, and waits for its orders."""

    def __init__(self) -> None:
        self._end, theirs = socket.socketpair()
        with theirs:
            environment = env.rank_environment(1)
            self.process = spawn_process(__name__, theirs, env=environment)

    def start(self, environment: Mapping[str, str], fds: Sequence[int]) -> bool:
        """Make it a rank that inherits these descriptors. False: it is gone."""
        orders = msgspec.msgpack.encode(BecomeRank([*fds], {**environment}))
        try:
            socket.send_fds(self._end, [len(orders).to_bytes(4, "big")], [*fds])
            self._end.sendall(orders)
        except OSError:
            self.stop()
            return False
        self._end.close()
        return True

    def stop(self) -> None:
        """End the process."""
        self._end.close()
        self.process.kill()
        self.process.wait()


_early: list[EarlyRank] = []


def count_early_ranks(options: ParallelOptions) -> int:
    """Return the processes beside this one that ranks on this host will need, as far as it is
    plain: none with a launcher, several nodes or several engines."""
    plain = options.distributed_executor_backend in (None, "mp") and options.num_engines == 1
    if not plain or options.nnodes > 1:
        return 0
    each = options.tensor_parallel_size * options.pipeline_parallel_size
    return each * options.data_parallel_size - 1


def start_early_ranks(count: int) -> None:
    """Start processes for ranks, up to this number with those that have started."""
    while len(_early) > count:
        _early.pop().stop()
    while len(_early) < count:
        _early.append(EarlyRank())


def take_early_rank(
    end: socket.socket, fds: Sequence[int], environment: Mapping[str, str]
) -> subprocess.Popen[bytes] | None:
    """Make an early process a rank with this end of its socket; None: there is none."""
    while _early:
        one = _early.pop(0)
        if one.start(environment, [end.fileno(), *fds]):
            return one.process
    return None


def stop_early_ranks() -> None:
    """End the processes that no rank has needed."""
    while _early:
        _early.pop().stop()


def main(fd: int) -> int:
    """Import, and be a rank by the orders that come; the exit status."""
    ignore_signals()
    with socket.socket(fileno=fd) as end:
        waiting = threading.Thread(target=_await_orders, args=(end,), daemon=True)
        waiting.start()
        rank_process = importlib.import_module("quire.engine.startup.rank_process")
        waiting.join()  # if orders were read before it sees them, it would wait for others
        found = _receive(end)
    if found is None:
        return 1
    orders, fds = found
    env.replace_environment(orders.environment)
    return int(rank_process.main(fds[0], dict(zip(orders.numbers, fds, strict=True))))


def _await_orders(end: socket.socket) -> None:
    """Return when there are orders; exit if the other process ends, also during imports."""
    if not end.recv(1, socket.MSG_PEEK):
        os._exit(1)


def _receive(end: socket.socket) -> tuple[BecomeRank, list[int]] | None:
    """Return the orders and the descriptors; None: the other process is gone."""
    size, fds, _, _ = socket.recv_fds(end, 4, MOST_FDS)
    if len(size) < 4:
        return None
    data = bytearray()
    while len(data) < int.from_bytes(size, "big"):
        piece = end.recv(1 << 20)
        if not piece:
            return None
        data += piece
    return msgspec.msgpack.decode(data, type=BecomeRank), fds

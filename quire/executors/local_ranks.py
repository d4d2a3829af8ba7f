"""Local ranks: the processes of a model's ranks on one host, and the rings to and from them.

Messages go through one ring to all of them, and each answers through a ring of its own. On the head
they are ranks 1 and up (quire.executors.rank_group); on another node its agent has them.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from quire.config.engine_config import EngineConfig
from quire.executors.rank_monitor import RankMonitor
from quire.executors.rank_status import RankStatusPage, create_status_page
from quire.executors.shm_broadcast import (
    ANSWER_BLOCKS,
    SPIN_S,
    STEP_BLOCKS,
    RingHandle,
    RingReader,
    RingWriter,
    create_ring,
)
from quire.executors.step_arrays import StepArrayWriter, create_area
from quire.platform import cpu
from quire.sandbox.pipe import WorkerPipe

JOIN, CONNECT, LOAD = 1, 2, 3
"""Numbers of the answers that a rank sends unasked: it will join the others; it is connected to
them; it has its weights."""


class RankMemory(msgspec.Struct, frozen=True):
    """What the processes of one host share: file descriptors, the same in each."""

    first_rank: int  # of the rings
    ranks: int  # of the model: rows of the status page
    steps: RingHandle
    answers: tuple[RingHandle, ...]  # of each rank from the first
    status_fd: int
    rendezvous_fd: int  # a file in which the ranks of one host find each other's addresses
    arrays_fd: int  # of quire.executors.step_arrays

    @property
    def fds(self) -> list[int]:
        rings = [fd for ring in (self.steps, *self.answers) for fd in ring.fds]
        return [*rings, self.status_fd, self.rendezvous_fd, self.arrays_fd]

    def renumbered(self, numbers: Mapping[int, int]) -> RankMemory:
        """Return the same of a process that has these descriptors under other numbers."""
        return RankMemory(
            self.first_rank,
            self.ranks,
            self.steps.renumbered(numbers),
            tuple(one.renumbered(numbers) for one in self.answers),
            numbers.get(self.status_fd, self.status_fd),
            numbers.get(self.rendezvous_fd, self.rendezvous_fd),
            numbers.get(self.arrays_fd, self.arrays_fd),
        )


class Meeting(msgspec.Struct, frozen=True):
    """Where the ranks of several hosts find each other's addresses: a store on the head."""

    address: str
    port: int
    own_address: str  # of this host, for the others


class StartRank(msgspec.Struct, tag=True, frozen=True):
    """To a rank, through its socket: what to load. The socket carries nothing else: its end means
    that its parent is gone."""

    options: dict[str, Any]  # of quire.config.options, flat
    config: EngineConfig
    rank: int
    local_rank: int  # on its host, of `local_ranks`: its device
    local_ranks: int
    parent_pid: int
    memory: RankMemory
    meeting: Meeting | None = None  # None: the ranks are on one host


START_RANK: msgspec.msgpack.Decoder[StartRank] = msgspec.msgpack.Decoder(StartRank)

SpawnRank = Callable[[socket.socket, Sequence[int]], "subprocess.Popen[bytes]"]
"""Starts a process that inherits its end of the socket, and these descriptors."""


class LocalRanks:
    """Consecutive ranks of a model, each a process of this host. The caller must close() it."""

    def __init__(self, ranks: range, total: int) -> None:
        """total: ranks of the model. Raises ConfigError (no shared memory)."""
        self.ranks = ranks
        self.memory = RankMemory(
            ranks.start,
            total,
            create_ring(len(ranks), STEP_BLOCKS),
            tuple(create_ring(1, ANSWER_BLOCKS) for _ in ranks),
            create_status_page(total),
            os.memfd_create("quire-rendezvous"),
            create_area(),
        )
        self.page = RankStatusPage(self.memory.status_fd, total)
        self.writer = RingWriter(self.memory.steps)
        self.arrays = StepArrayWriter(self.memory.arrays_fd)
        spin_s = spin_seconds(len(ranks) + 1)
        self.readers = [RingReader(ring, 0, spin_s) for ring in self.memory.answers]
        """Of the answers of each rank."""
        self._sockets: list[socket.socket] = []
        self._closed = False

    def start(
        self,
        monitor: RankMonitor,
        spawn: SpawnRank,
        options: dict[str, Any],
        config: EngineConfig,
        *,
        first_device: int,
        meeting: Meeting | None,
    ) -> None:
        """Start the processes, which the monitor watches; they begin to load.

        first_device: of the host, for the first rank.
        """
        for reader in self.readers:
            monitor.on_failure(reader.wake)
        monitor.start(lambda: [self._spawn(spawn) for _ in self.ranks])
        for i, (rank, end) in enumerate(zip(self.ranks, self._sockets, strict=True)):
            orders = StartRank(
                options,
                config,
                rank,
                first_device + i,
                first_device + len(self.ranks),
                os.getpid(),
                self.memory,
                meeting,
            )
            with suppress(OSError):  # it has died: the monitor reports it
                WorkerPipe(end, START_RANK).send(orders)

    def _spawn(self, spawn: SpawnRank) -> subprocess.Popen[bytes]:
        ours, theirs = socket.socketpair()
        self._sockets.append(ours)
        with theirs:
            return spawn(theirs, self.memory.fds)

    def end(self) -> None:
        """Have the ranks end: each ends when its socket is closed."""
        for end in self._sockets:
            end.close()

    def close(self) -> None:
        """Give the memory back. Harmless when called again."""
        if self._closed:
            return
        self._closed = True
        self.arrays.close()
        for ring in (self.writer, *self.readers):
            ring.close()
        for fd in self.memory.fds:
            os.close(fd)


def spin_seconds(ranks: int) -> float:
    """Return for how long readers spin: not at all where they share cores with the engine."""
    return SPIN_S if cpu.available_cores() > ranks else 0.0

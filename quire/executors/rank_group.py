"""Rank group: the processes of a model's ranks, and the numbered messages to and from them.

Rank 0 is in this process; each other rank is a process. Messages go through one ring to all ranks,
and each rank answers through a ring of its own, in the order of the messages. Rank 0 sends and
receives on the engine's thread. A rank that fails raises EngineDead here: see rank_monitor.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from quire import errors
from quire.config.engine_config import EngineConfig
from quire.core.snapshot import LateWorkCounts
from quire.errors import EngineDead, EngineError, QuireError
from quire.executors.rank_monitor import RankMonitor, WatchedMessage
from quire.executors.rank_status import RankStatusPage, RankStatusWriter, create_status_page
from quire.executors.shm_broadcast import (
    ANSWER_BLOCKS,
    SPIN_S,
    STEP_BLOCKS,
    RingHandle,
    RingReader,
    RingWriter,
    create_ring,
)
from quire.platform import cpu
from quire.sandbox.pipe import WorkerPipe

CALL_LIMIT_S = 600.0
"""Seconds for a start or a call: ranks load their weights in it."""
JOIN, LOAD = 1, 2
"""Numbers of the answers that a rank sends unasked: it will join the others; it has its weights."""


class RankMemory(msgspec.Struct, frozen=True):
    """What the processes of a group share: file descriptors, the same in each."""

    steps: RingHandle
    answers: tuple[RingHandle, ...]  # of ranks 1 and up
    status_fd: int
    rendezvous_fd: int  # a file in which the ranks find each other's addresses

    @property
    def fds(self) -> list[int]:
        rings = [fd for ring in (self.steps, *self.answers) for fd in ring.fds]
        return [*rings, self.status_fd, self.rendezvous_fd]


class StartRank(msgspec.Struct, tag=True, frozen=True):
    """To a rank, through its socket: what to load. The socket carries nothing else: its end means
    that the engine is gone."""

    options: dict[str, Any]  # of quire.config.options, flat
    config: EngineConfig
    rank: int
    engine_pid: int
    memory: RankMemory


class BuildRunner(msgspec.Struct, tag=True, frozen=True):
    """To a rank: build the runner, in place of the one before."""

    config: EngineConfig


class MeasureMemory(msgspec.Struct, tag=True, frozen=True):
    """To a rank: return the bytes that are free for its KV cache."""


class RunStep(msgspec.Struct, tag=True, frozen=True):
    """To a rank: run this encoded ModelInput."""

    step: bytes


class CallWorker(msgspec.Struct, tag=True, frozen=True):
    """To a rank: run a method of WorkerCalls."""

    name: str
    args: list[Any]


class RankAnswer(msgspec.Struct, tag=True, frozen=True):
    """From a rank: a message is done."""

    checksum: int = 0  # of a step's tokens
    value: Any = None  # of a call
    late_work: LateWorkCounts | None = None  # of the rank, if it has changed


class RankError(msgspec.Struct, tag=True, frozen=True):
    """From a rank: a message raised."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> RankError:
        return cls(type(error).__name__, str(error))

    def exception(self) -> Exception:
        """Return the error of quire of that name, or an EngineError."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, QuireError):
            return kind(self.message)
        return EngineError(f"{self.kind}: {self.message}")


ToRank = BuildRunner | MeasureMemory | RunStep | CallWorker
FromRank = RankAnswer | RankError

_encode = msgspec.msgpack.Encoder().encode
START_RANK: msgspec.msgpack.Decoder[StartRank] = msgspec.msgpack.Decoder(StartRank)
TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)

SpawnRank = Callable[[socket.socket, Sequence[int]], "subprocess.Popen[bytes]"]
"""Starts a process that inherits its end of the socket, and these descriptors."""


class _Sent(NamedTuple):
    message: WatchedMessage
    answers: list[FromRank]  # of ranks 1 and up, so far


class RankGroup:
    """The ranks of one model. The caller must close() it."""

    def __init__(
        self,
        spawn: SpawnRank,
        options: dict[str, Any],
        config: EngineConfig,
        devices: Sequence[str],
    ) -> None:
        """Start the ranks' processes; they begin to load. devices: of all ranks, for messages."""
        self.size = config.parallel.ranks
        others = range(1, self.size)
        self.memory = RankMemory(
            create_ring(len(others), STEP_BLOCKS),
            tuple(create_ring(1, ANSWER_BLOCKS) for _ in others),
            create_status_page(self.size),
            os.memfd_create("quire-rendezvous"),
        )
        page = RankStatusPage(self.memory.status_fd, self.size)
        self.status: RankStatusWriter = page.writer(0)
        """Of rank 0."""
        self._writer = RingWriter(self.memory.steps)
        self._readers = [
            RingReader(ring, 0, spin_seconds(self.size)) for ring in self.memory.answers
        ]
        self._sent: deque[_Sent] = deque()
        self._number = 0
        self._owner_pid = os.getpid()
        self._closed = False
        self._sockets: list[socket.socket] = []
        self.monitor = RankMonitor(page, devices, self._oldest)
        for reader in self._readers:
            self.monitor.on_failure(reader.wake)
        try:
            self.monitor.start(lambda: [self._spawn(spawn) for _ in others])
            for rank, end in enumerate(self._sockets, 1):
                orders = StartRank(options, config, rank, os.getpid(), self.memory)
                with suppress(OSError):  # it has died: the monitor reports it
                    WorkerPipe(end, START_RANK).send(orders)
        except BaseException:
            self.close()
            raise
        for number, what in ((JOIN, "its imports"), (LOAD, "loading its weights")):
            self._expect(number, what, CALL_LIMIT_S)

    def _spawn(self, spawn: SpawnRank) -> subprocess.Popen[bytes]:
        ours, theirs = socket.socketpair()
        self._sockets.append(ours)
        with theirs:
            return spawn(theirs, self.memory.fds)

    def check(self) -> None:
        """Raise EngineDead if a rank has failed."""
        if self.monitor.failure is not None:
            raise EngineDead(self.monitor.failure)

    def send(self, message: ToRank, what: str, limit_s: float | None = None) -> int:
        """Send a message to all ranks. Returns its number. Raises EngineDead.

        what: its name in errors. limit_s: of a step, after which a rank hangs. None: it is a call.
        """
        self.check()
        number = self._number + 1
        is_step = limit_s is not None
        self._expect(number, f"{what} (message {number})", limit_s or CALL_LIMIT_S, is_step)
        try:
            self._writer.send(number, _encode(message), self.check)
        except EngineDead:
            raise
        except BaseException as error:
            self.monitor.fail(f"{type(error).__name__} while message {number} was sent to ranks")
            raise
        return number

    def wait(self, number: int) -> list[FromRank]:
        """Return the answers of ranks 1 and up to a message. Raises EngineDead.

        May be repeated after an interruption.
        """
        for sent in list(self._sent):
            self._receive(sent)
            if sent.message.number == number:
                self._sent.remove(sent)
                return sent.answers
        raise AssertionError(f"message {number} was waited for already")

    def _receive(self, sent: _Sent) -> None:
        """Receive the answers to the oldest message that lacks some."""
        self.check()
        while len(sent.answers) < len(self._readers):
            answered, data = self._readers[len(sent.answers)].receive(self.check)
            assert answered == sent.message.number, (answered, sent.message)
            sent.answers.append(FROM_RANK.decode(data))

    def wait_all(self, number: int) -> list[RankAnswer]:
        """As wait(); raises the error of a rank."""
        answers = self.wait(number)
        for one in answers:
            if isinstance(one, RankError):
                raise one.exception()
        return [one for one in answers if isinstance(one, RankAnswer)]

    def fail(self, reason: str) -> EngineDead:
        """End all ranks. Returns the error to raise."""
        self.monitor.fail(reason)
        return EngineDead(self.monitor.failure or reason)

    def close(self) -> None:
        """End the ranks: each ends when its socket is closed. Harmless when called again."""
        if os.getpid() != self._owner_pid:
            return  # a fork of the engine's process: the ranks are not its own
        for end in self._sockets:
            end.close()
        self.monitor.close()
        if not self._closed:
            self._closed = True
            for ring in (self._writer, *self._readers):
                ring.close()
            for fd in self.memory.fds:
                os.close(fd)

    def _expect(self, number: int, what: str, limit_s: float, is_step: bool = False) -> None:
        self._number = number
        self._sent.append(_Sent(WatchedMessage(number, what, limit_s, is_step), []))

    def _oldest(self) -> WatchedMessage | None:
        try:
            return self._sent[0].message
        except IndexError:
            return None


def spin_seconds(ranks: int) -> float:
    """Return for how long readers spin: not at all where they share cores with the engine."""
    return SPIN_S if cpu.available_cores() > ranks else 0.0

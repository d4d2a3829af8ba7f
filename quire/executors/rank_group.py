"""Rank group: the processes of a model's ranks, and the numbered messages to and from them.

Rank 0 is in this process; each other rank is a process, of this host or of another node. Messages
go to all ranks, and each answers in the order of the messages: on this host through shared memory
(local_ranks), elsewhere through sockets (node_head). Rank 0 sends and receives on the
engine's thread. A rank that fails raises EngineDead here: see rank_monitor.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from quire import errors
from quire.config.engine_config import EngineConfig
from quire.core.snapshot import LateWorkCounts
from quire.errors import EngineDead, EngineError, QuireError
from quire.executors.local_ranks import CONNECT, JOIN, LOAD, LocalRanks, Meeting, SpawnRank
from quire.executors.rank_monitor import OtherNodes, RankMonitor, WatchedMessage
from quire.executors.rank_status import RankStatusPage, RankStatusWriter
from quire.executors.shm_broadcast import RingReader
from quire.executors.step_arrays import ArrayPlace

log = logging.getLogger(__name__)

CALL_LIMIT_S = 600.0
"""Seconds for a start or a call: ranks load their weights in it."""
CONNECT_LIMIT_S = 120.0
"""Seconds for the ranks to connect to each other, and to add up some numbers."""
END_S = 3.0
"""Seconds for all ranks to finish their steps when the engine ends."""
ABORT_S = 3.0
"""Seconds to give the collectives' connections back."""


class BuildRunner(msgspec.Struct, tag=True, frozen=True):
    """To a rank: build the runner, in place of the one before."""

    config: EngineConfig


class MeasureMemory(msgspec.Struct, tag=True, frozen=True):
    """To a rank: return the bytes that are free for its KV cache."""


class RunStep(msgspec.Struct, tag=True, frozen=True):
    """To a rank: run the encoded ModelInput of its data-parallel rank."""

    steps: tuple[bytes, ...]
    arrays: tuple[tuple[ArrayPlace, ...], ...] = ()
    """Of each step, what model_input.detach_arrays() took of it; (): the steps are whole."""


class CallWorker(msgspec.Struct, tag=True, frozen=True):
    """To a rank: run a method of WorkerCalls."""

    name: str
    args: list[Any]


class RankAnswer(msgspec.Struct, tag=True, frozen=True):
    """From a rank: a message is done."""

    checksum: int = 0  # of a step's tokens
    result: bytes = b""  # of a step: the encoded StepResult, of the rank whose result is used
    value: Any = None  # of a call
    late_work: LateWorkCounts | None = None  # of the rank, if it has changed


class RankError(msgspec.Struct, tag=True, frozen=True):
    """From a rank: a message raised."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> RankError:
        return cls(type(error).__name__, str(error))

    def exception(self, where: str | None = None) -> Exception:
        """Return the error of quire of that name, or an EngineError. where: to be named."""
        kind = getattr(errors, self.kind, None)
        message = self.message
        if not (isinstance(kind, type) and issubclass(kind, QuireError)):
            kind, message = EngineError, f"{self.kind}: {message}"
        return kind(message if where is None else f"{where}: {message}")


ToRank = BuildRunner | MeasureMemory | RunStep | CallWorker
FromRank = RankAnswer | RankError

_encode = msgspec.msgpack.Encoder().encode
TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


class _Sent(NamedTuple):
    message: WatchedMessage
    answers: list[FromRank]  # of ranks 1 and up, so far


class _SentMessages(deque[_Sent]):
    """Messages that not all ranks have answered. The monitor refers to it, and not to the group:
    a cycle would keep the group's memory after the engine is gone."""

    def oldest(self) -> WatchedMessage | None:
        try:
            return self[0].message
        except IndexError:
            return None


class RankCollectives(Protocol):
    """The collectives of a rank. Both methods return the threads in which they run, the same when
    called again: NCCL may not return. Either is the last call."""

    def abort_in_threads(self) -> Sequence[threading.Thread]:
        """End those that wait for a rank that is gone."""
        ...

    def close_in_thread(self) -> Sequence[threading.Thread]:
        """Give the connections back: no rank waits in a collective."""
        ...


class AnswerReader(Protocol):
    """The answers of one rank."""

    def receive(self, check: Callable[[], None] | None = None) -> tuple[int, bytes]:
        """Wait for the next. Returns its number and content. check: may raise to end the wait."""
        ...


class _KeptAnswers:
    """The answers of a rank of this host. Some are kept here until they are asked for."""

    def __init__(self, ring: RingReader) -> None:
        self._ring = ring
        self._kept: deque[tuple[int, bytes]] = deque()

    def receive(self, check: Callable[[], None] | None = None) -> tuple[int, bytes]:
        return self._kept.popleft() if self._kept else self._ring.receive(check)

    def keep_arrived(self, check: Callable[[], None]) -> None:
        """Make room in the ring: read the answers that are there."""
        while (answer := self._ring.take(check)) is not None:
            self._kept.append(answer)


class NodeRanks(OtherNodes, Protocol):
    """The ranks on other nodes."""

    @property
    def ranks(self) -> range: ...

    @property
    def meeting(self) -> Meeting:
        """Where the ranks of this host meet the others."""
        ...

    @property
    def readers(self) -> Sequence[AnswerReader]:
        """One for each rank."""
        ...

    def start(self, page: RankStatusPage, options: dict[str, Any], config: EngineConfig) -> None:
        """Have the nodes start their ranks. page: gets their status."""
        ...

    def device_names(self) -> list[str]:
        """Return the device of each rank, for messages."""
        ...

    def send(self, number: int, data: bytes, check: Callable[[], None]) -> None:
        """Send a message to each of them. Raises OSError if one cannot be reached."""
        ...

    def wake(self) -> None:
        """End the wait of a reader: it calls its check."""
        ...

    def close(self) -> None: ...


class RankGroup:
    """The ranks of one model. The caller must close() it."""

    def __init__(
        self,
        spawn: SpawnRank,
        options: dict[str, Any],
        config: EngineConfig,
        devices: Sequence[str],
        nodes: NodeRanks | None = None,
    ) -> None:
        """Start the ranks' processes; they begin to load. devices: of all ranks, for messages.

        nodes: those that have the last ranks; they are closed with this. None: there is one.
        """
        self.size = config.parallel.ranks
        here = range(1, self.size if nodes is None else nodes.ranks.start)
        self._nodes = nodes
        self._sent = _SentMessages()
        self._collectives: RankCollectives | None = None
        self._finish_own: Callable[[], object] | None = None
        self._number = 0
        self._owner_pid = os.getpid()
        self._local = LocalRanks(here, self.size)
        self.memory = self._local.memory
        page = self._local.page
        self.status: RankStatusWriter = page.writer(0)
        """Of rank 0."""
        self._kept_answers = [_KeptAnswers(one) for one in self._local.readers]
        self._readers: list[AnswerReader] = [*self._kept_answers]
        self.monitor = RankMonitor(page, devices, self._sent.oldest, nodes=nodes)
        try:
            meeting = None
            if nodes is not None:
                self._readers += nodes.readers
                nodes.start(page, options, config)
                self.monitor.on_failure(nodes.wake)
                meeting = nodes.meeting
            self._local.start(self.monitor, spawn, options, config, first_device=1, meeting=meeting)
        except BaseException:
            self._local.end()
            self.monitor.close()
            if nodes is not None:
                nodes.end_ranks("the start failed")
            self.close()
            raise
        for number, what, limit_s in (
            (JOIN, "its imports", CALL_LIMIT_S),
            (CONNECT, "connecting to the other ranks", CONNECT_LIMIT_S),
            (LOAD, "loading its weights", CALL_LIMIT_S),
        ):
            self._expect(number, what, limit_s)

    def set_collectives(self, collectives: RankCollectives) -> None:
        """Have rank 0's collectives ended when the ranks have failed or ended."""
        self._collectives = collectives
        self.monitor.on_failure(collectives.abort_in_threads)

    def set_finish(self, finish: Callable[[], object]) -> None:
        """The ranks serve. finish(): waits for rank 0's steps at the end, and drops its graphs. It
        must not refer to the owner of this group."""
        self._finish_own = finish

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
            data = _encode(message)
            if self._local.ranks:
                self._local.writer.send(number, data, self._make_room)
            if self._nodes is not None:
                self._nodes.send(number, data, self.check)
        except EngineDead:
            raise
        except OSError as error:
            raise self.fail(str(error)) from None
        except BaseException as error:
            self.monitor.fail(f"{type(error).__name__} while message {number} was sent to ranks")
            raise
        return number

    def place_arrays(
        self, arrays: Sequence[Sequence[bytes]]
    ) -> tuple[tuple[ArrayPlace, ...], ...] | None:
        """Share the arrays of the next message with the ranks, step by step.

        None: there is no space now, or other nodes have some of the ranks.
        """
        if self._nodes is not None:
            return None
        flat = [one for some in arrays for one in some]
        places = self._local.arrays.place(self._number + 1, flat)
        if places is None:
            return None
        found = iter(places)
        return tuple([tuple(itertools.islice(found, len(some))) for some in arrays])

    def _make_room(self) -> None:
        """Called while a message waits for room: a rank may wait for room for its answers."""
        for one in self._kept_answers:
            one.keep_arrived(self.check)
        self.check()

    def receive_before(self, number: int) -> None:
        """Receive the answers to all messages before this one. Raises EngineDead."""
        for sent in list(self._sent):
            if sent.message.number < number:
                self._receive(sent)

    def wait(self, number: int) -> list[FromRank]:
        """Return the answers of ranks 1 and up to a message. Raises EngineDead.

        May be repeated after an interruption.
        """
        for sent in list(self._sent):
            self._receive(sent)
            if sent.message.number == number:
                self._sent.remove(sent)
                self._local.arrays.release(number)
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
        for rank, one in enumerate(answers, 1):
            if isinstance(one, RankError):
                elsewhere = self._nodes is not None and rank in self._nodes.ranks
                raise one.exception(self.monitor.name_rank(rank) if elsewhere else None)
        return [one for one in answers if isinstance(one, RankAnswer)]

    def fail(self, reason: str) -> EngineDead:
        """End all ranks. Returns the error to raise."""
        self.monitor.fail(reason)
        return EngineDead(self.monitor.failure or reason)

    def close(self) -> None:
        """End the ranks, and then rank 0's collectives. Harmless when called again.

        Ranks that serve first finish all steps: no collective waits when one of them ends. Nothing
        is left to destructors, which may wait for ever: the others' processes exit without any.
        """
        if os.getpid() != self._owner_pid:
            return  # a fork of the engine's process: the ranks are not its own
        finish, self._finish_own = self._finish_own, None
        try:
            if finish is not None and not self.monitor.is_current_thread:
                self._finish(finish)
        finally:
            failed = self.monitor.failure is not None
            self._local.end()
            self.monitor.close()
            collectives, self._collectives = self._collectives, None
            if collectives is not None:
                end_collectives(collectives, failed=failed)
            if self._nodes is not None:
                self._nodes.close()
            self._local.close()

    def _finish(self, finish_own: Callable[[], object]) -> None:
        """Have all ranks finish their steps, and drop their graphs. A rank that is late is named in
        the log, and killed."""
        try:
            number = self.send(CallWorker("release_kv_memory", []), "its last steps", END_S)
            self.monitor.expect_end(self._sent[-1].message)
            self.status.begin(number)
            finish_own()
            self.status.finish(number)
            self.wait(number)
        except Exception as error:  # noqa: BLE001 - the processes end in any case
            if self.monitor.failure is not None:
                log.warning("the ranks were killed: %s", self.monitor.failure)
            else:
                log.debug("rank 0 ends without its last steps: %s", error)

    def _expect(self, number: int, what: str, limit_s: float, is_step: bool = False) -> None:
        self._number = number
        self._sent.append(_Sent(WatchedMessage(number, what, limit_s, is_step), []))


def end_collectives(collectives: RankCollectives, *, failed: bool) -> None:
    """End a rank's collectives, and wait for that: a program that ends before is aborted by CUDA.

    failed: some may wait for a rank that is gone.
    """
    threads = collectives.abort_in_threads() if failed else collectives.close_in_thread()
    deadline = time.monotonic() + ABORT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        log.warning("the collectives of a rank did not end in %.0f s", ABORT_S)

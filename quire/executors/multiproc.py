"""Multi-process executor: runs each step on several ranks, one process per rank.

Each rank holds its share of the model and gets the same ModelInput as msgpack through a socket.
Every rank samples; rank 0 answers with the StepResult, the others with a checksum of their tokens,
so ranks that diverge are found at once. A rank that ends, or fails alone, is EngineDead: the others
would wait for it in a collective.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire import errors
from quire.config.engine_config import EngineConfig
from quire.core.snapshot import LateWorkCounts
from quire.core.types import StepPlan, StepResult
from quire.errors import EngineDead, EngineError, QuireError, Unsupported
from quire.runner import model_input
from quire.runner.model_input import ModelInputBuilder
from quire.sandbox.pipe import WorkerPipe

START_TIMEOUT_S = 600.0
"""Seconds for the ranks to load their weights."""
FAILURE_GRACE_S = 5.0
"""Seconds for the other ranks to fail as well, after one has failed a step."""
STOP_GRACE_S = 5.0
"""Seconds for a rank to end by itself before it is killed."""


class StartRank(msgspec.Struct, tag=True, frozen=True):
    """To a rank, the first message: what to build."""

    options: dict[str, Any]  # of quire.config.options, flat
    config: EngineConfig
    rank: int
    rendezvous: str  # file through which the ranks find each other


class RunStep(msgspec.Struct, tag=True, frozen=True):
    """To a rank: run this encoded ModelInput."""

    number: int
    step: bytes


class CallWorker(msgspec.Struct, tag=True, frozen=True):
    """To a rank: run a method of WorkerCalls."""

    number: int
    name: str
    args: list[Any]


class RankAnswer(msgspec.Struct, tag=True, frozen=True):
    """From a rank: a step or a call is done."""

    number: int
    checksum: int = 0  # of a step's tokens
    result: StepResult | None = None  # of a step, from rank 0
    value: Any = None  # of a call
    late_work: LateWorkCounts | None = None  # of the rank, if it has changed


class RankError(msgspec.Struct, tag=True, frozen=True):
    """From a rank: a step or a call raised. number 0: the rank could not start."""

    number: int
    kind: str
    message: str


ToRank = StartRank | RunStep | CallWorker
FromRank = RankAnswer | RankError

TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)

RankProcess = tuple["subprocess.Popen[bytes]", socket.socket]
"""A rank's process, and our end of its socket."""


class Executor:
    """Runs plans on ranks in other processes."""

    def __init__(
        self,
        inputs: ModelInputBuilder,
        ranks: Sequence[RankProcess],
        orders: Sequence[StartRank],
    ) -> None:
        """Start the ranks and wait until all are ready. Raises what a rank's start raised."""
        self._inputs = inputs
        self._processes = [process for process, _ in ranks]
        self._pipes = [WorkerPipe(end, FROM_RANK) for _, end in ranks]
        self._selector = selectors.DefaultSelector()
        for rank, (_, end) in enumerate(ranks):
            self._selector.register(end, selectors.EVENT_READ, rank)
        self._answers: dict[int, dict[int, FromRank]] = {0: {}}  # number -> rank -> answer
        self._number = 0
        self._late_work = LateWorkCounts()
        self._rank_late_work = [LateWorkCounts()] * len(ranks)
        self._death: str | None = None  # why no step can run any more
        for pipe, one in zip(self._pipes, orders, strict=True):
            pipe.send(one)  # type: ignore[arg-type]
        try:
            self._wait(0, time.monotonic() + START_TIMEOUT_S)
        except BaseException:
            self.shutdown()
            raise

    def submit(self, plan: StepPlan) -> _PendingRanks:
        step = model_input.encode(self._inputs.build(plan))
        return _PendingRanks(self, self._send(lambda number: RunStep(number, step)))

    def call(self, name: str, *args: Any) -> list[Any]:
        number = self._send(lambda number: CallWorker(number, name, list(args)))
        return [one.value for one in self._wait(number)]

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        raise Unsupported("functions cannot be sent to ranks in other processes: use one rank")

    def late_work(self) -> LateWorkCounts:
        return self._late_work

    def release_kv_memory(self) -> None:
        self.call("release_kv_memory")

    def recover(self) -> None:
        if self._death is not None:
            raise EngineDead(self._death)
        self.call("recover")

    def shutdown(self) -> None:
        """End the ranks: each ends when its socket is closed."""
        self._selector.close()
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(STOP_GRACE_S if self._death is None else 0.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def step_result(self, number: int) -> StepResult:
        """Block until every rank has run the step."""
        answers = self._wait(number)
        if len({one.checksum for one in answers}) > 1:
            self._die(f"the ranks computed different tokens in step {number}")
        assert answers[0].result is not None
        return answers[0].result

    def _send(self, message: Callable[[int], ToRank]) -> int:
        if self._death is not None:
            raise EngineDead(self._death)
        self._number += 1
        self._answers[self._number] = {}
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # wait() reports a rank that is gone
                pipe.send(message(self._number))  # type: ignore[arg-type]
        return self._number

    def _wait(self, number: int, deadline: float | None = None) -> list[RankAnswer]:
        """The answers of all ranks, in rank order. May be repeated after an interruption."""
        answers = self._answers[number]
        while len(answers) < len(self._pipes):
            if self._death is not None:
                raise EngineDead(self._death)
            failed = next((one for one in answers.values() if isinstance(one, RankError)), None)
            if failed is not None and deadline is None:
                deadline = time.monotonic() + FAILURE_GRACE_S
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            events = self._selector.select(left)
            if not events and left == 0.0:
                lost = sorted(set(range(len(self._pipes))) - answers.keys())
                if failed is not None and not number:
                    raise _exception(failed)  # the others wait for the rank that cannot start
                why = "" if failed is None else f" ({failed.kind}: {failed.message})"
                self._die(f"ranks {lost} do not answer while the others have{why}")
            for key, _ in events:
                self._receive(key.data)
        del self._answers[number]
        done = [answers[rank] for rank in range(len(self._pipes))]
        for one in done:
            if isinstance(one, RankError):
                raise _exception(one)
        answered = [one for one in done if isinstance(one, RankAnswer)]
        self._sum_late_work([one.late_work for one in answered])
        return answered

    def _sum_late_work(self, reported: Sequence[LateWorkCounts | None]) -> None:
        """Add what the ranks report with their answers to one message; None: nothing new."""
        if not any(reported):
            return
        ranks, longest = self._rank_late_work, 0.0
        for rank, now in enumerate(reported):
            if now is not None:
                longest = max(longest, now.seconds - ranks[rank].seconds)
                ranks[rank] = now
        self._late_work = LateWorkCounts(
            sum([one.kernel_compilations for one in ranks]),
            sum([one.graph_captures for one in ranks]),
            self._late_work.seconds + longest,
        )

    def _receive(self, rank: int) -> None:
        message = self._pipes[rank].receive()
        if message is not None:
            self._answers.setdefault(message.number, {})[rank] = message
            return
        try:
            status = self._processes[rank].wait(1.0)
        except subprocess.TimeoutExpired:
            status = None
        end = f"was killed by signal {-status}" if status and status < 0 else f"ended ({status})"
        self._die(f"rank {rank} (process {self._processes[rank].pid}) {end}")

    def _die(self, why: str) -> None:
        """No step can run any more: end the other ranks, which may hang in a collective."""
        self._death = why
        for process in self._processes:
            process.kill()
        raise EngineDead(why)


class _PendingRanks:
    """A step that was sent to all ranks."""

    def __init__(self, executor: Executor, number: int) -> None:
        self._executor = executor
        self._number = number

    def wait(self) -> StepResult:
        return self._executor.step_result(self._number)


def _exception(error: RankError) -> Exception:
    kind = getattr(errors, error.kind, None)
    if isinstance(kind, type) and issubclass(kind, QuireError):
        return kind(error.message)
    return EngineError(f"{error.kind}: {error.message}")

"""Rank loop: the worker's side of the multi-process executor, one step or call after the other.

A thread reads the socket, so that the engine never waits for a rank that computes. When the socket
is closed the engine has ended, and this process exits at once, even in the middle of a collective.
"""

from __future__ import annotations

import os
import queue
import threading
import zlib
from typing import NoReturn

import msgspec

from quire.core.snapshot import LateWorkCounts
from quire.core.types import StepResult
from quire.errors import EngineError
from quire.executors.multiproc import CallWorker, FromRank, RankAnswer, RankError, RunStep, ToRank
from quire.kernels.framework import late_work
from quire.runner import model_input
from quire.runner.model_runner import ModelRunner
from quire.runner.parts.base import load_part_types
from quire.runner.worker_calls import WorkerCalls
from quire.sandbox.pipe import WorkerPipe


class RankLoop:
    """Serves one rank. `serve` never returns."""

    def __init__(self, pipe: WorkerPipe[ToRank], runner: ModelRunner, rank: int) -> None:
        self._pipe = pipe
        self._runner = runner
        self._calls = WorkerCalls(runner)
        self._rank = rank
        self._part_types = load_part_types()
        self._inbox: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
        self._late_work = late_work.counts()  # as reported
        self._step_failed = False  # later steps would run on inconsistent state

    def serve(self) -> NoReturn:
        """Send that this rank is ready; then run each message."""
        threading.Thread(target=self._read, name="quire-rank", daemon=True).start()
        self._answer(RankAnswer(0))
        while True:
            message = self._inbox.get()
            assert isinstance(message, (RunStep, CallWorker))
            done: FromRank
            try:
                done = self._run(message)
            except Exception as error:  # noqa: BLE001 - the border: it is sent to the engine
                done = RankError(message.number, type(error).__name__, str(error))
                self._step_failed = self._step_failed or isinstance(message, RunStep)
            self._answer(done)

    def _read(self) -> None:
        while (message := self._pipe.receive()) is not None:
            self._inbox.put(message)
        os._exit(0)

    def _run(self, message: RunStep | CallWorker) -> RankAnswer:
        if isinstance(message, CallWorker):
            value = getattr(self._calls, message.name)(*message.args)
            self._step_failed = self._step_failed and message.name != "recover"
            return RankAnswer(message.number, value=value, late_work=self._new_late_work())
        if self._step_failed:
            raise EngineError("the previous step failed")
        step = model_input.decode(message.step, self._part_types)
        result = self._runner.launch(step).wait()
        own = None if self._rank else result
        late = self._new_late_work()
        return RankAnswer(message.number, _checksum(result), own, late_work=late)

    def _new_late_work(self) -> LateWorkCounts | None:
        """Return the counts of this rank if they have changed since the last call."""
        now, before = late_work.counts(), self._late_work
        self._late_work = now
        return None if now is before else now

    def _answer(self, message: FromRank) -> None:
        try:
            self._pipe.send(message)  # type: ignore[arg-type]
        except OSError:
            os._exit(0)


def _checksum(result: StepResult) -> int:
    return zlib.crc32(msgspec.msgpack.encode(result.token_ids))

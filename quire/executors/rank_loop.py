"""Rank loop: the worker's side of the multi-process executor, one message after the other.

A thread reads the socket to the engine, which carries nothing after the start: when it is closed
the engine has ended, and this process exits at once, even in the middle of a collective.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import msgspec

from quire.config.engine_config import EngineConfig
from quire.core.snapshot import LateWorkCounts
from quire.core.types import StepResult
from quire.errors import EngineError
from quire.executors.local_ranks import JOIN, RankMemory, spin_seconds
from quire.executors.multiproc import checksum
from quire.executors.rank_group import (
    TO_RANK,
    BuildRunner,
    CallWorker,
    FromRank,
    MeasureMemory,
    RankAnswer,
    RankError,
    RunStep,
    ToRank,
)
from quire.executors.rank_status import RankStatusPage
from quire.executors.shm_broadcast import RingReader, RingWriter
from quire.executors.step_arrays import StepArrayReader
from quire.kernels.framework import late_work
from quire.runner import model_input, plain_data
from quire.runner.model_runner import ModelRunner
from quire.runner.parts.base import load_part_types
from quire.runner.worker_calls import WorkerCalls


class RankLink:
    """A rank's ends of what it shares with the engine."""

    def __init__(self, end: socket.socket, memory: RankMemory, rank: int) -> None:
        """From now on the process ends with the engine."""
        own = rank - memory.first_rank
        self.steps = RingReader(memory.steps, own, spin_seconds(1 + len(memory.answers)))
        self.arrays = StepArrayReader(memory.arrays_fd)
        self.status = RankStatusPage(memory.status_fd, memory.ranks).writer(rank)
        self._answers = RingWriter(memory.answers[own])
        self._end = end
        self._phase = JOIN
        self._thread = threading.Thread(target=self._watch, name="quire-rank", daemon=True)
        self._thread.start()

    def answer(self, number: int, message: FromRank) -> None:
        self._answers.send(number, msgspec.msgpack.encode(message))

    def finish_phase(self, number: int, value: Any = None) -> None:
        """A phase of the start is done: JOIN, CONNECT or LOAD. value: of its answer."""
        self.status.finish(number)
        self.answer(number, RankAnswer(value=value))
        self._phase = number + 1
        self.status.begin(self._phase)

    def fail_start(self, error: Exception) -> NoReturn:
        """A phase of the start raised. Waits until the engine ends this process: it reads the
        answer first."""
        self.status.fail(self._phase, error)
        self.answer(self._phase, RankError.of(error))
        self._thread.join()
        raise AssertionError("the process ends with its thread")

    def _watch(self) -> None:
        while True:
            try:
                if not self._end.recv(1):
                    break
            except OSError:
                break
        os._exit(0)


class RankLoop:
    """Serves one rank. `serve` never returns."""

    def __init__(
        self,
        link: RankLink,
        build: Callable[[EngineConfig], ModelRunner],
        measure: Callable[[], Any],
        *,
        dp_rank: int = 0,
        gives_result: bool = False,
        set_up_thread: Callable[[], None] | None = None,
    ) -> None:
        """build: makes the runner. measure: returns the memory that a KV cache could have.
        gives_result: whether the result of a step, or of its data-parallel rank, is this rank's.

        set_up_thread: launched steps run beside this process, as on a GPU: the next are launched
        while a thread waits for those before them; it calls this first.
        """
        self._dp_rank, self._gives_result = dp_rank, gives_result
        self._link = link
        self._build = build
        self._measure = measure
        self._runner: ModelRunner | None = None
        self._calls: WorkerCalls | None = None
        self._part_types = load_part_types()
        self._late_work = late_work.counts()  # as reported
        self._step_failed = False  # later steps would run on inconsistent state
        self._launched: queue.Queue[tuple[int, Callable[[], StepResult]]] | None = None
        if set_up_thread is not None:
            self._launched = queue.Queue()
            threading.Thread(
                target=self._finish_steps, args=(self._launched, set_up_thread),
                name="quire-steps", daemon=True,
            ).start()  # fmt: skip

    def serve(self) -> NoReturn:
        """Run each message."""
        link = self._link
        while True:
            number, data = link.steps.receive()
            link.status.begin(number)
            message = TO_RANK.decode(data)
            if self._launched is None:
                self._answer(number, partial(self._run, message))
            elif isinstance(message, RunStep):
                self._launched.put((number, self._launch(message)))
            else:
                self._launched.join()
                self._answer(number, partial(self._run, message))

    def _answer(self, number: int, run: Callable[[], RankAnswer]) -> None:
        """Run a message and answer it."""
        done: FromRank
        try:
            done = run()
            self._link.status.finish(number)
        except Exception as error:  # noqa: BLE001 - the border: it is sent to the engine
            done = RankError.of(error)
            self._link.status.fail(number, error)
        self._link.answer(number, done)

    def _finish_steps(
        self,
        launched: queue.Queue[tuple[int, Callable[[], StepResult]]],
        set_up_thread: Callable[[], None],
    ) -> None:
        """On a thread: wait for the steps in order, and answer them."""
        set_up_thread()
        while True:
            number, wait = launched.get()
            self._answer(number, partial(self._finish, wait))
            launched.task_done()

    def _run(self, message: ToRank) -> RankAnswer:
        if isinstance(message, RunStep):
            return self._run_step(message)
        if isinstance(message, BuildRunner):
            self._runner = self._calls = None  # their memory is free before the next take any
            self._runner = self._build(message.config)
            self._calls = WorkerCalls(self._runner)
            return RankAnswer()
        if isinstance(message, MeasureMemory):
            self._runner = self._calls = None  # the weights alone stay
            return RankAnswer(value=self._measure())
        assert isinstance(message, CallWorker)
        assert self._calls is not None, "a call before the runner is built"
        value = getattr(self._calls, message.name)(*message.args)
        self._step_failed = self._step_failed and message.name != "recover"
        return RankAnswer(value=value, late_work=self._new_late_work())

    def _run_step(self, message: RunStep) -> RankAnswer:
        return self._finish(self._launch(message))

    def _launch(self, message: RunStep) -> Callable[[], StepResult]:
        """Start a step. Returns what waits for it, and raises what its launch raised."""
        try:
            assert self._runner is not None, "a step before the runner is built"
            step = model_input.decode(message.steps[self._dp_rank], self._part_types)
            if message.arrays:
                views = self._link.arrays.views(message.arrays[self._dp_rank])
                step = model_input.attach_arrays(step, views)
            if not self._step_failed:
                return self._runner.launch(step).wait
            self._runner.skip(step)
            return partial(_raise, EngineError("the previous step failed"))
        except Exception as error:  # noqa: BLE001 - raised where the step is waited for
            self._step_failed = True
            return partial(_raise, error)

    def _finish(self, wait: Callable[[], StepResult]) -> RankAnswer:
        try:
            result = wait()
        except BaseException:
            self._step_failed = True
            raise
        return RankAnswer(
            checksum(result),
            plain_data.encode(result) if self._gives_result else b"",
            late_work=self._new_late_work(),
        )

    def _new_late_work(self) -> LateWorkCounts | None:
        """Return the counts of this rank if they have changed since the last call."""
        now, before = late_work.counts(), self._late_work
        self._late_work = now
        return None if now is before else now


def _raise(error: Exception) -> NoReturn:
    raise error

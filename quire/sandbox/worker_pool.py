"""Pool of sandboxed workers: runs jobs in turns of tenants, and replaces workers that end.

A job over its limits costs its worker's life and nothing else: the next job gets a new worker. So
does one whose caller has left. Jobs that wait for a worker occupy no thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import msgspec

from quire.errors import EngineError, Overloaded, RequestError
from quire.sandbox.tenant_turns import NO_TENANT, TenantShare, TenantTurns
from quire.sandbox.worker_handle import (
    CpuTimeExceeded,
    StartWorker,
    WallTimeExceeded,
    WorkerExited,
    WorkerHandle,
)
from quire.sandbox.worker_loop import JobFailed, JobOutOfMemory, JobRefused

log = logging.getLogger(__name__)

STARTUP_TIMEOUT_S = 20.0
"""By the clock, until a worker takes jobs."""
RETRY_S = 2.0

W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class PoolNames:
    """Words of log lines and errors."""

    threads: str  # "quire-templates"
    process: str  # "process for chat templates"
    task: str  # "the chat template": what a job reads
    action: str  # "rendering the chat template"


class _CallerLeft(Exception):
    """The answer of the job is not awaited any more."""


class _QueuedJob(Generic[W]):
    """A job with its answer. has_caller: whether that is awaited."""

    __slots__ = ("answer", "has_caller", "work")

    def __init__(self, work: Callable[[_QueuedJob[W]], W]) -> None:
        self.work = work
        self.answer: Future[W] = Future()
        self.has_caller = True

    def check_caller(self) -> None:
        """Raise _CallerLeft if the answer is not awaited any more."""
        if not self.has_caller:
            raise _CallerLeft


class SandboxPool(Generic[W]):
    """Runs jobs in at most `size` workers, one more if tenants wait for each other (tenant_turns).
    They start when they are needed."""

    def __init__(
        self,
        launch: StartWorker,
        messages: msgspec.msgpack.Decoder[W],
        names: PoolNames,
        *,
        size: int,
        max_waiting: int,
        wall_limit_s: float,
        first: Callable[[], W | None] = lambda: None,
    ) -> None:
        """max_waiting: jobs of one tenant.

        first: makes the message that a worker gets before its first job; None: it needs none.
        """
        self._launch = launch
        self._messages = messages
        self._names = names
        self._size = size
        self._max_waiting = max_waiting
        self._wall_limit_s = wall_limit_s
        self._first = first
        self._idle: list[WorkerHandle[W]] = []
        self._threads: ThreadPoolExecutor | None = None
        self._turns: TenantTurns[_QueuedJob[W]] = TenantTurns(size)
        self._closed = False
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Start a worker in the background: otherwise the first job waits for it."""

        def start(_: _QueuedJob[W]) -> Any:
            try:
                self._keep(self._take_worker())
            except (EngineError, Overloaded) as error:
                log.warning("%s", error)  # the first job tries again

        self._queue(_QueuedJob(start), NO_TENANT)

    async def run(
        self,
        make_job: Callable[[], Any],
        *,
        param: str | None = None,
        share: TenantShare = NO_TENANT,
    ) -> W:
        """Run a job; return the worker's answer. param: of errors that the job causes.

        make_job: called in a thread; returns a quire.sandbox.worker_loop.SandboxJob. If this is
        cancelled, a waiting job leaves the queue; a running one ends at the next check of its time.

        Raises RequestError, Overloaded, EngineError.
        """
        queued: _QueuedJob[W] = _QueuedJob(lambda own: self._run_job(make_job(), param, own))
        self._queue(queued, share)
        try:
            return await asyncio.wrap_future(queued.answer)
        finally:
            queued.has_caller = False
            with self._lock:
                self._turns.remove(queued)

    def close(self) -> None:
        """End the jobs that wait, and the workers: those with a job when that ends."""
        with self._lock:
            self._closed = True
            idle_workers, self._idle = self._idle, []
            waiting = self._turns.remove_all()
        for job in waiting:
            job.answer.cancel()
        for worker in idle_workers:
            worker.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    @property
    def idle_workers(self) -> list[int]:
        """Process ids of workers without a job."""
        with self._lock:
            return [worker.pid for worker in self._idle]

    def _queue(self, job: _QueuedJob[W], share: TenantShare) -> None:
        """Let a job wait for its turn. Raises Overloaded, EngineError."""
        with self._lock:
            if self._closed:
                raise EngineError(f"{self._names.action}: its processes have been ended")
            count = self._turns.num_waiting(share.tenant)
            if count >= self._max_waiting:
                problem = f"{count} jobs wait for a {self._names.process}: try again later"
                raise Overloaded(problem, retry_after_s=RETRY_S)
            self._turns.push(job, share, time.monotonic())
            self._start_jobs()

    def _start_jobs(self) -> None:
        """Start the jobs whose turn it is. Called with the lock."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._size + 1, self._names.threads)
        while (job := self._turns.start(time.monotonic())) is not None:
            self._threads.submit(self._work_on, job)

    def _work_on(self, job: _QueuedJob[W]) -> None:
        answer, problem = None, None
        try:
            job.check_caller()
            answer = job.work(job)
        except BaseException as error:  # noqa: BLE001 - raised where the answer is awaited
            problem = error
        with self._lock:
            self._turns.finish(job, time.monotonic())
            if not self._closed:
                self._start_jobs()
        if job.answer.set_running_or_notify_cancel():
            if problem is None:
                job.answer.set_result(cast(W, answer))
            else:
                job.answer.set_exception(problem)

    def _run_job(self, job: Any, param: str | None, queued: _QueuedJob[W]) -> W:
        names = self._names
        try:
            answer = self._send_job(job, param, queued)
        except WorkerExited as gone:  # one crash may be accidental
            log.warning("a %s ended (%s)", names.process, gone)
            answer = self._retry_job(job, param, queued)
        if isinstance(answer, JobRefused):
            raise RequestError(answer.message, param=answer.param or param)
        if isinstance(answer, JobOutOfMemory):
            raise self._task_error(f"takes more than {job.memory >> 20} MiB of memory", param)
        if isinstance(answer, JobFailed):
            log.error("%s failed: %s\n%s", names.action, answer.message, answer.trace)
            raise EngineError(f"{names.action} failed: {answer.message}")
        return answer

    def _retry_job(self, job: Any, param: str | None, queued: _QueuedJob[W]) -> W:
        try:
            return self._send_job(job, param, queued)
        except WorkerExited as gone:
            if gone.was_killed:
                problem = f"the {self._names.process} was killed, twice"
                log.warning("%s: does memory run out?", problem)
                raise EngineError(problem) from None
            more = f"it may need more than {job.memory >> 20} MiB"
            raise self._task_error(f"crashed, twice: {more}", param) from None

    def _send_job(self, job: Any, param: str | None, queued: _QueuedJob[W]) -> W:
        """The answer of a worker. Raises RequestError, Overloaded, EngineError, WorkerExited."""
        worker = self._take_worker()
        try:
            answer = worker.run_job(
                job, job.seconds, queued.check_caller, by_clock=self._wall_limit_s
            )
        except _CallerLeft:
            worker.close()
            self._keep(self._take_worker())  # the next job, of another tenant, does not wait for it
            raise
        except CpuTimeExceeded:
            raise self._task_error(
                f"takes more than {job.seconds:g} s of processor time", param
            ) from None
        except WallTimeExceeded:
            raise self._overloaded(f"{self._names.action} did not end in time") from None
        if isinstance(answer, JobOutOfMemory):
            worker.close()
        else:
            self._keep(worker)
        return answer

    def _keep(self, worker: WorkerHandle[W]) -> None:
        """Keep a worker for the next job, or end it if the pool is closed."""
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
                return
        worker.close()

    def _take_worker(self) -> WorkerHandle[W]:
        """Return a worker without a job, after removing those that have ended."""
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                break
            if worker.is_alive:
                return worker
            worker.close()
        try:
            return self._start_worker()
        except WorkerExited as gone:
            log.warning("a %s ended while it started (%s)", self._names.process, gone)
        try:
            return self._start_worker()
        except WorkerExited as gone:
            why = f"it ended while it started ({gone}), twice; its output has the reason"
            raise self._start_failed(why) from None

    def _start_worker(self) -> WorkerHandle[W]:
        try:
            worker = WorkerHandle(self._launch, self._messages)
        except OSError as error:
            why = f"{error}; are memory, processes or open files spent?"
            raise self._start_failed(why) from None
        try:
            answer = worker.wait_ready(STARTUP_TIMEOUT_S, self._first())
        except WallTimeExceeded:
            raise self._overloaded(
                f"no {self._names.process} starts in {STARTUP_TIMEOUT_S:g} s"
            ) from None
        if isinstance(answer, JobFailed):
            worker.close()
            raise self._start_failed(answer.message)
        return worker

    def _start_failed(self, why: str) -> EngineError:
        problem = f"no {self._names.process} can be started: {why}"
        log.error("%s", problem)
        return EngineError(problem)

    def _overloaded(self, problem: str) -> Overloaded:
        return Overloaded(f"{problem}, while the server is busy", retry_after_s=RETRY_S)

    def _task_error(self, what: str, param: str | None) -> RequestError:
        return RequestError(f"{self._names.task} {what}", param=param)

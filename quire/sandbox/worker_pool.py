"""Pool of sandboxed workers: runs jobs, bounds what waits, and replaces workers that end.

A job over its limits costs its worker's life and nothing else: the next job gets a new worker.
Jobs that wait for a worker occupy no thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from quire.errors import EngineError, Overloaded, RequestError
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


class SandboxPool(Generic[W]):
    """Runs jobs in at most `size` workers. They start when they are needed."""

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
        """first: makes the message that a worker gets before its first job; None: it needs none."""
        self._launch = launch
        self._messages = messages
        self._names = names
        self._size = size
        self._max_waiting = max_waiting
        self._wall_limit_s = wall_limit_s
        self._first = first
        self._idle: list[WorkerHandle[W]] = []
        self._threads: ThreadPoolExecutor | None = None
        self._waiting = 0
        self._closed = False
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Start a worker in the background: otherwise the first job waits for it."""

        def start() -> None:
            try:
                self._keep(self._take_worker())
            except (EngineError, Overloaded) as error:
                log.warning("%s", error)  # the first job tries again

        self._thread_pool().submit(start)

    async def run(self, make_job: Callable[[], Any], *, param: str | None = None) -> W:
        """Run a job; return the worker's answer. param: of errors that the job causes.

        make_job: called in a thread; returns a quire.sandbox.worker_loop.SandboxJob.

        Raises RequestError, Overloaded, EngineError.
        """
        if self._waiting >= self._max_waiting:
            problem = f"{self._waiting} jobs wait for a {self._names.process}: try again later"
            raise Overloaded(problem, retry_after_s=RETRY_S)
        self._waiting += 1
        try:
            future = self._thread_pool().submit(lambda: self._run_job(make_job(), param))
            return await asyncio.wrap_future(future)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the workers, and the jobs that they run."""
        with self._lock:
            self._closed = True
            idle_workers, self._idle = self._idle, []
        for worker in idle_workers:
            worker.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def idle_workers(self) -> list[int]:
        """Process ids of workers without a job."""
        with self._lock:
            return [worker.pid for worker in self._idle]

    def _thread_pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._size, self._names.threads)
        return self._threads

    def _run_job(self, job: Any, param: str | None) -> W:
        names = self._names
        try:
            answer = self._send_job(job, param)
        except WorkerExited as gone:  # one crash may be accidental
            log.warning("a %s ended (%s)", names.process, gone)
            answer = self._retry_job(job, param)
        if isinstance(answer, JobRefused):
            raise RequestError(answer.message, param=answer.param or param)
        if isinstance(answer, JobOutOfMemory):
            raise self._task_error(f"takes more than {job.memory >> 20} MiB of memory", param)
        if isinstance(answer, JobFailed):
            log.error("%s failed: %s\n%s", names.action, answer.message, answer.trace)
            raise EngineError(f"{names.action} failed: {answer.message}")
        return answer

    def _retry_job(self, job: Any, param: str | None) -> W:
        try:
            return self._send_job(job, param)
        except WorkerExited as gone:
            if gone.was_killed:
                problem = f"the {self._names.process} was killed, twice"
                log.warning("%s: does memory run out?", problem)
                raise EngineError(problem) from None
            more = f"it may need more than {job.memory >> 20} MiB"
            raise self._task_error(f"crashed, twice: {more}", param) from None

    def _send_job(self, job: Any, param: str | None) -> W:
        """The answer of a worker. Raises RequestError, Overloaded, EngineError, WorkerExited."""
        worker = self._take_worker()
        try:
            answer = worker.run_job(job, job.seconds, by_clock=self._wall_limit_s)
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

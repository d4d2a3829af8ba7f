"""Pool of worker processes that render chat templates from requests.

A template over its limits costs its worker's life and nothing else: the next job gets a new worker.
One request's template blocks at most one worker, for a bounded time. Requests that wait for a
worker occupy no thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quire.errors import EngineError, Overloaded, RequestError
from quire.sandbox.worker_handle import (
    CpuTimeExceeded,
    StartWorker,
    WallTimeExceeded,
    WorkerExited,
    WorkerHandle,
)
from quire.sandbox.worker_loop import JobFailed, JobOutOfMemory, JobRefused
from quire.text.templates.render_worker import (
    RENDER_DECODER,
    RenderJob,
    RenderMessage,
    RenderResult,
    encode_arguments,
)

log = logging.getLogger(__name__)

MAX_WORKERS = 2
MAX_WAITING = 64
RETRY_S = 2.0
CPU_LIMIT_S = 1.0
"""Of processor time, for one conversation."""
WALL_LIMIT_S = 8.0
"""By the clock: a worker gives way to others."""
STARTUP_TIMEOUT_S = 20.0
"""By the clock, until a worker takes jobs."""
MEMORY_LIMIT = 1 << 28
"""Bytes of memory, for one conversation."""


class TemplateRenderPool:
    """For one event loop. Without prepare() nothing is started before the first template."""

    def __init__(
        self, hire: StartWorker, *, seconds: float = CPU_LIMIT_S, memory: int = MEMORY_LIMIT
    ) -> None:
        self._launch = hire
        self._seconds, self._memory = seconds, memory
        self._idle: list[WorkerHandle[RenderMessage]] = []
        self._threads: ThreadPoolExecutor | None = None
        self._waiting = 0
        self._closed = False
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Start a worker in the background: otherwise the first template waits for it."""

        def start() -> None:
            try:
                self._keep(self._take_worker())
            except (EngineError, Overloaded) as error:
                log.warning("%s", error)  # the first template tries again

        self._thread_pool().submit(start)

    async def render(
        self, source: str, special: Mapping[str, object], call: dict[str, Any], most: int
    ) -> str:
        """The prompt. call: what ChatTemplate.render takes. most: characters.

        Raises RequestError, Overloaded, EngineError.
        """
        if self._waiting >= MAX_WAITING:
            told = f"{self._waiting} chat templates wait to be rendered: try again later"
            raise Overloaded(told, retry_after_s=RETRY_S)

        def work() -> str:
            job = RenderJob(
                source, dict(special), encode_arguments(call), most, self._seconds, self._memory
            )
            return self._run_job(job)

        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread_pool(), work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the workers, and what they are at."""
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
            self._threads = ThreadPoolExecutor(MAX_WORKERS, "quire-templates")
        return self._threads

    def _run_job(self, job: RenderJob) -> str:
        try:
            word = self._send_job(job)
        except WorkerExited as gone:  # one crash may be accidental
            log.warning("a process that renders chat templates ended (%s)", gone)
            word = self._retry_job(job)
        if isinstance(word, RenderResult):
            return str(json.loads(word.text))
        if isinstance(word, JobRefused):
            raise RequestError(word.message, param=word.param)
        if isinstance(word, JobOutOfMemory):
            raise _template_error(f"takes more than {job.memory >> 20} MiB of memory")
        if isinstance(word, JobFailed):
            log.error("rendering a chat template failed: %s\n%s", word.message, word.trace)
            raise EngineError(f"rendering the chat template failed: {word.message}")
        raise EngineError(f"the process that renders chat templates sent {type(word).__name__}")

    def _retry_job(self, job: RenderJob) -> RenderMessage:
        try:
            return self._send_job(job)
        except WorkerExited as gone:
            if gone.was_killed:
                told = "the process that renders the chat template was killed, twice"
                log.warning("%s: does memory run out?", told)
                raise EngineError(told) from None
            more = f"it may need more than {job.memory >> 20} MiB"
            raise _template_error(f"crashed, twice: {more}") from None

    def _send_job(self, job: RenderJob) -> RenderMessage:
        """The answer of a worker. Raises RequestError, Overloaded, EngineError, Gone."""
        worker = self._take_worker()
        try:
            word = worker.run_job(job, job.seconds, by_clock=WALL_LIMIT_S)
        except CpuTimeExceeded:
            raise _template_error(f"takes more than {job.seconds:g} s of processor time") from None
        except WallTimeExceeded:
            raise _overloaded("the chat template was not rendered in time: it takes long") from None
        if isinstance(word, RenderResult | JobRefused | JobFailed):
            self._keep(worker)
        else:
            worker.close()
        return word

    def _keep(self, worker: WorkerHandle[RenderMessage]) -> None:
        """Keep a worker for the next job, or end it if the pool is closed."""
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
                return
        worker.close()

    def _take_worker(self) -> WorkerHandle[RenderMessage]:
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
            log.warning("a process for chat templates ended while it started (%s)", gone)
        try:
            return self._start_worker()
        except WorkerExited as gone:
            why = f"it ended while it started ({gone}), twice; its output has the reason"
            raise _start_failed(why) from None

    def _start_worker(self) -> WorkerHandle[RenderMessage]:
        """A new one, which takes jobs. Raises Gone, EngineError, Overloaded."""
        try:
            worker = WorkerHandle(self._launch, RENDER_DECODER)
        except OSError as error:
            raise _start_failed(f"{error}; are memory, processes or open files spent?") from None
        try:
            worker.wait_ready(STARTUP_TIMEOUT_S)
        except WallTimeExceeded:
            raise _overloaded(
                f"no process for chat templates starts in {STARTUP_TIMEOUT_S:g} s"
            ) from None
        return worker


def _start_failed(why: str) -> EngineError:
    told = f"no process for chat templates can be started: {why}"
    log.error("%s", told)
    return EngineError(told)


def _overloaded(told: str) -> Overloaded:
    return Overloaded(f"{told}, while the server is busy", retry_after_s=RETRY_S)


def _template_error(what: str) -> RequestError:
    return RequestError(f"the chat template {what}", param="chat_template")

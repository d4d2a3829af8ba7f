"""Those who render chat templates that requests bring: worker processes, a few, hired when needed.

A template that takes too much costs its worker's life and nothing else; who comes next gets another
worker. One request's template holds up at most one worker, and for a bounded time; who waits, waits
outside of the threads that other requests need.
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
from quire.text.rendering import WORDS, Refused, Render, Rendered, TooBig, Word, dumped
from quire.workers.watched import Gone, Hire, TooBusy, TookTooMuch, Watched

log = logging.getLogger(__name__)

MOST_WORKERS = 2
MOST_WAITING = 64
RETRY_S = 2.0
SECONDS = 1.0
"""Of processor time, for one conversation."""
WALL_S = 8.0
"""By the clock: a worker gives way to others."""
MEMORY = 1 << 28
"""Bytes of memory, for one conversation."""


class Renderers:
    """For one event loop. Nothing is started before the first template."""

    def __init__(self, hire: Hire, *, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self._hire = hire
        self._seconds, self._memory = seconds, memory
        self._idle: list[Watched[Word]] = []
        self._threads: ThreadPoolExecutor | None = None
        self._waiting = 0
        self._closed = False
        self._lock = threading.Lock()

    async def render(
        self, source: str, special: Mapping[str, object], call: dict[str, Any], most: int
    ) -> str:
        """The prompt. call: what ChatTemplate.render takes. most: characters.

        Raises RequestError, Overloaded, EngineError.
        """
        if self._waiting >= MOST_WAITING:
            told = f"{self._waiting} chat templates wait to be rendered: try again later"
            raise Overloaded(told, retry_after_s=RETRY_S)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MOST_WORKERS, "quire-templates")

        def work() -> str:
            job = Render(source, dict(special), dumped(call), most, self._seconds, self._memory)
            return self._carried_out(job)

        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the workers, and what they are at."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def idle(self) -> list[int]:
        """Process ids of workers without a job."""
        with self._lock:
            return [worker.pid for worker in self._idle]

    def _carried_out(self, job: Render) -> str:
        word = self._asked(job) or self._asked(job)  # one stray death is nobody's fault
        if word is None:
            raise _refused(f"crashed, twice: it may need more than {job.memory >> 20} MiB")
        if isinstance(word, TooBig):
            raise _refused(f"takes more than {job.memory >> 20} MiB of memory")
        if isinstance(word, Refused):
            raise RequestError(word.message, param=word.param)
        return str(json.loads(word.text))

    def _asked(self, job: Render) -> Rendered | Refused | TooBig | None:
        """What a worker says; None: it ended. Raises RequestError, Overloaded, EngineError."""
        worker = self._worker()
        try:
            word = worker.ask(job, job.seconds, by_clock=WALL_S)
        except TookTooMuch:
            raise _refused(f"takes more than {job.seconds:g} s of processor time") from None
        except TooBusy:
            told = (
                "the chat template was not rendered in time: it takes long, and much else goes on"
            )
            raise Overloaded(told, retry_after_s=RETRY_S) from None
        except Gone as gone:
            log.warning("a process that renders chat templates ended (%s)", gone)
            return None
        if isinstance(word, Rendered | Refused) and not self._closed:
            with self._lock:
                self._idle.append(worker)
        else:
            worker.close()
        return None if isinstance(word, Render) else word

    def _worker(self) -> Watched[Word]:
        """One without a job. Those that ended meanwhile are buried."""
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                break
            if worker.alive:
                return worker
            worker.close()
        try:
            return Watched(self._hire, WORDS)
        except OSError as error:
            raise EngineError(f"no process can be started for chat templates: {error}") from None


def _refused(what: str) -> RequestError:
    return RequestError(f"the chat template {what}", param="chat_template")

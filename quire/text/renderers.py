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
from quire.text.rendering import WORDS, Render, Rendered, Word, dumped
from quire.workers.desk import Failed, Refused, TooBig
from quire.workers.watched import Gone, Hire, TooBusy, TookTooMuch, Watched

log = logging.getLogger(__name__)

MOST_WORKERS = 2
MOST_WAITING = 64
RETRY_S = 2.0
SECONDS = 1.0
"""Of processor time, for one conversation."""
WALL_S = 8.0
"""By the clock: a worker gives way to others."""
BEGIN_S = 20.0
"""By the clock, until a worker takes jobs."""
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
        try:
            word = self._asked(job)
        except Gone as gone:  # one stray death is nobody's fault
            log.warning("a process that renders chat templates ended (%s)", gone)
            word = self._asked_again(job)
        if isinstance(word, Rendered):
            return str(json.loads(word.text))
        if isinstance(word, Refused):
            raise RequestError(word.message, param=word.param)
        if isinstance(word, TooBig):
            raise _refused(f"takes more than {job.memory >> 20} MiB of memory")
        if isinstance(word, Failed):
            log.error("rendering a chat template failed: %s\n%s", word.message, word.trace)
            raise EngineError(f"rendering the chat template failed: {word.message}")
        raise EngineError(f"the process that renders chat templates said {type(word).__name__}")

    def _asked_again(self, job: Render) -> Word:
        try:
            return self._asked(job)
        except Gone as gone:
            if gone.killed:
                told = "the process that renders the chat template was killed, twice"
                log.warning("%s: does memory run out?", told)
                raise EngineError(told) from None
            more = f"it may need more than {job.memory >> 20} MiB"
            raise _refused(f"crashed, twice: {more}") from None

    def _asked(self, job: Render) -> Word:
        """What a worker says. Raises RequestError, Overloaded, EngineError, Gone."""
        worker = self._worker()
        try:
            word = worker.ask(job, job.seconds, by_clock=WALL_S)
        except TookTooMuch:
            raise _refused(f"takes more than {job.seconds:g} s of processor time") from None
        except TooBusy:
            raise _too_busy("the chat template was not rendered in time: it takes long") from None
        if isinstance(word, Rendered | Refused | Failed) and not self._closed:
            with self._lock:
                self._idle.append(worker)
        else:
            worker.close()
        return word

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
            return self._started()
        except Gone as gone:
            log.warning("a process for chat templates ended while it started (%s)", gone)
        try:
            return self._started()
        except Gone as gone:
            why = f"it ended while it started ({gone}), twice; what it printed says why"
            raise _no_worker(why) from None

    def _started(self) -> Watched[Word]:
        """A new one, which takes jobs. Raises Gone, EngineError, Overloaded."""
        try:
            worker = Watched(self._hire, WORDS)
        except OSError as error:
            raise _no_worker(f"{error}; are memory, processes or open files spent?") from None
        try:
            worker.begin(BEGIN_S)
        except TooBusy:
            raise _too_busy(f"no process for chat templates starts in {BEGIN_S:g} s") from None
        return worker


def _no_worker(why: str) -> EngineError:
    told = f"no process for chat templates can be started: {why}"
    log.error("%s", told)
    return EngineError(told)


def _too_busy(told: str) -> Overloaded:
    return Overloaded(f"{told}, and much else goes on", retry_after_s=RETRY_S)


def _refused(what: str) -> RequestError:
    return RequestError(f"the chat template {what}", param="chat_template")

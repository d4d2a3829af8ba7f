"""Threads that pass compile jobs to worker processes and load the results.

A thread takes tasks from one queue and puts the results into another, and shares nothing else with
the engine's thread. The first task starts the first thread. Another one starts when a job is
slow and others wait behind it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quire.core.constraint import Constraint
from quire.errors import EngineError, RequestError
from quire.grammar.compilation import cpu_throttle
from quire.grammar.compilation.compile_worker import CompileJob, CompileResult
from quire.grammar.compilation.cpu_throttle import CpuBudget
from quire.grammar.compilation.worker_client import CompileWorkerClient, CompileWorkerCrashed
from quire.grammar.vocabulary import Vocabulary
from quire.sandbox.worker_handle import StartWorker

if TYPE_CHECKING:
    from quire.grammar.length_closing.budgeted_matcher import BudgetedMatcher, FillBitmasks

log = logging.getLogger(__name__)

MAX_THREADS = 2
SLOW_COMPILE_S = 1.0
"""A job that takes longer starts another thread for the jobs behind it."""
FIRST_IDLE_TIMEOUT_S = 900.0
IDLE_TIMEOUT_S = 60.0
"""Idle time after which a worker ends: of the first thread, of others."""
SHUTDOWN_TIMEOUT_S = 5.0
"""How long a thread may take to end."""

CompileError = RequestError | EngineError


class CacheableGrammar(Protocol):
    """A grammar that is built, with what closes its texts."""

    @property
    def size(self) -> int:
        """Bytes of memory it holds, about."""
        ...

    @property
    def min_tokens(self) -> int:
        """Tokens that a whole text takes at least."""
        ...

    @property
    def fill_all(self) -> FillBitmasks:
        """Fills the masks of many matchers in parallel."""
        ...

    def guide(self) -> BudgetedMatcher:
        """A fresh one, for one sequence."""
        ...


class GrammarLoader(Protocol):
    """Builds in this process what was compiled in another."""

    def prepare(self, vocabulary: Vocabulary) -> None:
        """Make what is made once, if it is not yet."""
        ...

    def __call__(self, done: CompileResult) -> CacheableGrammar:
        """Raises RequestError."""
        ...


@dataclass(slots=True, eq=False)
class CompileTask:
    """One grammar to compile. The compile thread writes the fields after `wanted`."""

    constraint: Constraint
    wanted: bool = True  # a request waits for it
    outcome: CacheableGrammar | CompileError | None = None  # None at the end: no request waited
    cacheable: bool = True
    seconds: float = 0.0


class _PrepareRequest:
    """In the place of a task: nothing is to be compiled yet."""


class CompilePool:
    """put() is for one thread; `done` is where tasks come out."""

    def __init__(
        self, hire: StartWorker, load: GrammarLoader, *, seconds: float, memory: int
    ) -> None:
        """seconds of processor time and bytes of memory: what one grammar may take."""
        self.done: deque[CompileTask] = deque()
        self.notify: Callable[[], None] = lambda: None
        """Called when a task is done."""
        self._launch, self._load = hire, load
        self._seconds, self._memory = seconds, memory
        self._queue: queue.SimpleQueue[CompileTask | _PrepareRequest | None] = queue.SimpleQueue()
        self._prepare_requested = False
        self._threads: list[_CompileThread] = []
        self._lock = threading.Lock()
        self._closed = False
        self._vocabulary: Vocabulary | None = None  # the first worker finds it

    def submit(self, task: CompileTask) -> None:
        """Have it compiled."""
        self._queue.put(task)
        if not self._threads:
            self._add()

    def prepare(self) -> None:
        """Have made now what is made once: a part of it holds up the whole process."""
        if not self._prepare_requested and not self._threads:
            self._prepare_requested = True
            self._queue.put(_PrepareRequest())
            self._add()

    def close(self) -> None:
        """End workers and threads. Unfinished tasks stay unfinished."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            thread.end()

    @property
    def workers(self) -> list[int]:
        """Process ids of those that live."""
        return [pid for thread in list(self._threads) if (pid := thread.pid) is not None]

    def _add(self) -> None:
        with self._lock:
            if not self._closed and len(self._threads) < MAX_THREADS:
                self._threads.append(_CompileThread(self, is_first=not self._threads))

    def _remove(self, thread: _CompileThread) -> None:
        with self._lock:
            self._threads.remove(thread)


class _CompileThread:
    """One thread and its worker."""

    def __init__(self, pool: CompilePool, *, is_first: bool) -> None:
        self._pool = pool
        self._is_first = is_first
        self._worker: CompileWorkerClient | None = None
        self._cpu_budget = CpuBudget()
        self._started_at = 0.0
        self._thread = threading.Thread(target=self._run, name="quire-grammars", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        worker = self._worker
        return None if worker is None else worker.pid

    def end(self) -> None:
        """From another thread, when `closed` is set."""
        worker = self._worker
        if worker is not None:
            worker.kill()
        self._thread.join(SHUTDOWN_TIMEOUT_S)

    # Below: its own thread.

    def _run(self) -> None:
        while (task := self._next()) is not None:
            if isinstance(task, _PrepareRequest):
                self._prepare()
                continue
            if task.wanted and not self._pool._closed:
                began = self._started_at = time.monotonic()
                task.outcome, task.cacheable = self._run_task(task)
                task.seconds = time.monotonic() - began
            self._pool.done.append(task)
            self._pool.notify()
        self._close_worker()
        if not self._pool._closed:
            self._pool._remove(self)

    def _prepare(self) -> None:
        try:
            self._ready_worker()
            assert self._pool._vocabulary is not None
            self._pool._load.prepare(self._pool._vocabulary)
        except EngineError as error:
            log.warning("%s", error)  # requests that need a grammar get the error

    def _next(self) -> CompileTask | _PrepareRequest | None:
        """Wait for the next task. None: the thread ends."""
        todo = self._pool._queue
        try:
            return todo.get(timeout=FIRST_IDLE_TIMEOUT_S if self._is_first else IDLE_TIMEOUT_S)
        except queue.Empty:
            self._close_worker()
        return todo.get() if self._is_first else None

    def _run_task(self, task: CompileTask) -> tuple[CacheableGrammar | CompileError, bool]:
        """Run a task. Returns its outcome, and whether another run would have the same."""
        pool = self._pool
        job = CompileJob(task.constraint.form, task.constraint.backend, pool._seconds, pool._memory)
        try:
            done = self._compile(job)
            return self._build(done), True
        except RequestError as error:
            log.info("a grammar was refused: %s", error)
            return error, True
        except EngineError as error:
            log.warning("%s", error)
            return error, False
        except BaseException as error:  # the border; a panic is no Exception
            log.exception("a grammar that was compiled could not be built")
            return EngineError(f"{type(error).__name__}: {error}"), False

    def _build(self, done: CompileResult) -> CacheableGrammar:
        pool = self._pool
        assert pool._vocabulary is not None
        pool._load.prepare(pool._vocabulary)
        return cpu_throttle.run_throttled(lambda: pool._load(done), self._cpu_budget)

    def _compile(self, job: CompileJob) -> CompileResult:
        """By a worker, and once more if that one ends. Raises RequestError, EngineError."""
        try:
            return self._ready_worker().compile(job, self._on_wait)
        except CompileWorkerCrashed as error:
            if self._pool._closed:
                raise
            log.warning("%s; the job is tried once more", error)
        try:
            return self._ready_worker().compile(job, self._on_wait)
        except CompileWorkerCrashed as error:
            if error.killed:
                raise EngineError(
                    "the process that compiles grammars was killed, twice: does memory run out?"
                ) from None
            raise RequestError(
                "compiling the grammar of the structured output crashed, twice: it may need more "
                f"than {job.memory >> 20} MiB of memory"
            ) from None

    def _ready_worker(self) -> CompileWorkerClient:
        """A worker that can take a job."""
        if self._worker is not None and not self._worker.alive:
            self._close_worker()
        if self._worker is None:
            pool = self._pool
            worker = self._worker = CompileWorkerClient(pool._launch)
            if pool._closed:  # close() could not see it
                worker.kill()
            try:
                pool._vocabulary = worker.begin(pool._vocabulary)
            except EngineError:
                self._worker = None
                raise
        return self._worker

    def _on_wait(self) -> None:
        """Called now and then while a job runs."""
        if time.monotonic() - self._started_at > SLOW_COMPILE_S and not self._pool._queue.empty():
            self._pool._add()

    def _close_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

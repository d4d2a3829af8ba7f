"""Threads that have grammars compiled: each has a worker, and builds here what passed there.

A clerk takes tasks from one queue and puts them, with what came of them, into another; that is all
that it shares with the engine's thread. The first one starts with the first task, another when one
job keeps others waiting: somebody's monster holds up nobody else.
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
from quire.grammar import pace
from quire.grammar.hired import Crashed, Hired
from quire.grammar.pace import Allowance
from quire.grammar.vocabulary import Vocabulary
from quire.grammar.worker import Done, Job
from quire.workers.watched import Hire

if TYPE_CHECKING:
    from quire.grammar.closing import FillAll, Guide

log = logging.getLogger(__name__)

MOST_CLERKS = 2
SLOW_S = 1.0
"""A job of so many seconds has those behind it go to another clerk."""
FIRST_IDLE_S = 900.0
OTHER_IDLE_S = 60.0
"""A worker that has had nothing to do for so long ends: of the first clerk, of others."""
END_S = 5.0
"""How long a clerk may take to end."""

Fault = RequestError | EngineError


class Ready(Protocol):
    """A grammar that is built, with what closes its texts."""

    @property
    def size(self) -> int:
        """Bytes of memory it holds, about."""
        ...

    @property
    def least(self) -> int:
        """Tokens that a whole text takes at least."""
        ...

    @property
    def fill_all(self) -> FillAll:
        """Fills the masks of many matchers in parallel."""
        ...

    def guide(self) -> Guide:
        """A fresh one, for one sequence."""
        ...


class Load(Protocol):
    """Builds in this process what was compiled in another."""

    def prepare(self, vocabulary: Vocabulary) -> None:
        """Make what is made once, if it is not yet."""
        ...

    def __call__(self, done: Done) -> Ready:
        """Raises RequestError."""
        ...


@dataclass(slots=True, eq=False)
class Task:
    """One grammar on its way. A clerk writes what is below `wanted`."""

    constraint: Constraint
    wanted: bool = True  # somebody waits for it
    outcome: Ready | Fault | None = None  # None at the end: nobody waited
    lasting: bool = True
    seconds: float = 0.0


class _Preparing:
    """In the place of a task: nothing is to be compiled yet."""


class Clerks:
    """put() is for one thread; `done` is where tasks come out."""

    def __init__(self, hire: Hire, load: Load, *, seconds: float, memory: int) -> None:
        """seconds of processor time and bytes of memory: what one grammar may take."""
        self.done: deque[Task] = deque()
        self.ring: Callable[[], None] = lambda: None
        """Called when a task is done."""
        self._hire, self._load = hire, load
        self._seconds, self._memory = seconds, memory
        self._todo: queue.SimpleQueue[Task | _Preparing | None] = queue.SimpleQueue()
        self._prepares = False
        self._clerks: list[_Clerk] = []
        self._lock = threading.Lock()
        self._closed = False
        self._vocabulary: Vocabulary | None = None  # the first worker finds it

    def put(self, task: Task) -> None:
        """Have it compiled."""
        self._todo.put(task)
        if not self._clerks:
            self._add()

    def prepare(self) -> None:
        """Have made now what is made once: a part of it holds up the whole process."""
        if not self._prepares and not self._clerks:
            self._prepares = True
            self._todo.put(_Preparing())
            self._add()

    def close(self) -> None:
        """End workers and clerks. What is not done stays undone."""
        with self._lock:
            self._closed = True
            clerks = list(self._clerks)
        for _ in clerks:
            self._todo.put(None)
        for clerk in clerks:
            clerk.end()

    @property
    def workers(self) -> list[int]:
        """Process ids of those that live."""
        return [pid for clerk in list(self._clerks) if (pid := clerk.pid) is not None]

    def _add(self) -> None:
        with self._lock:
            if not self._closed and len(self._clerks) < MOST_CLERKS:
                self._clerks.append(_Clerk(self, is_first=not self._clerks))

    def _remove(self, clerk: _Clerk) -> None:
        with self._lock:
            self._clerks.remove(clerk)


class _Clerk:
    """One thread, and the worker it has hired."""

    def __init__(self, clerks: Clerks, *, is_first: bool) -> None:
        self._clerks = clerks
        self._is_first = is_first
        self._worker: Hired | None = None
        self._allowance = Allowance()
        self._began = 0.0
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
        self._thread.join(END_S)

    # Below: its own thread.

    def _run(self) -> None:
        while (task := self._next()) is not None:
            if isinstance(task, _Preparing):
                self._prepare()
                continue
            if task.wanted and not self._clerks._closed:
                began = self._began = time.monotonic()
                task.outcome, task.lasting = self._outcome(task)
                task.seconds = time.monotonic() - began
            self._clerks.done.append(task)
            self._clerks.ring()
        self._dismiss()
        if not self._clerks._closed:
            self._clerks._remove(self)

    def _prepare(self) -> None:
        try:
            self._hired()
            assert self._clerks._vocabulary is not None
            self._clerks._load.prepare(self._clerks._vocabulary)
        except EngineError as error:
            log.warning("%s", error)  # who needs a grammar is told

    def _next(self) -> Task | _Preparing | None:
        """The next task, waited for. None: the clerk ends."""
        todo = self._clerks._todo
        try:
            return todo.get(timeout=FIRST_IDLE_S if self._is_first else OTHER_IDLE_S)
        except queue.Empty:
            self._dismiss()
        return todo.get() if self._is_first else None

    def _outcome(self, task: Task) -> tuple[Ready | Fault, bool]:
        """What comes of a task, and whether it would another time."""
        clerks = self._clerks
        job = Job(task.constraint.form, task.constraint.backend, clerks._seconds, clerks._memory)
        try:
            done = self._compiled(job)
            return self._built(done), True
        except RequestError as error:
            log.info("a grammar was refused: %s", error)
            return error, True
        except EngineError as error:
            log.warning("%s", error)
            return error, False
        except BaseException as error:  # the border; a panic is no Exception
            log.exception("a grammar that was compiled could not be built")
            return EngineError(f"{type(error).__name__}: {error}"), False

    def _built(self, done: Done) -> Ready:
        clerks = self._clerks
        assert clerks._vocabulary is not None
        clerks._load.prepare(clerks._vocabulary)
        return pace.run(lambda: clerks._load(done), self._allowance)

    def _compiled(self, job: Job) -> Done:
        """By a worker, and once more if that one ends. Raises RequestError, EngineError."""
        try:
            return self._hired().compile(job, self._wait)
        except Crashed as error:
            if self._clerks._closed:
                raise
            log.warning("%s; the job is tried once more", error)
        try:
            return self._hired().compile(job, self._wait)
        except Crashed as error:
            if error.killed:
                told = "the process that compiles grammars was killed, twice: does memory run out?"
                raise EngineError(told) from None
            raise RequestError(
                "compiling the grammar of the structured output crashed, twice: it may need more "
                f"than {job.memory >> 20} MiB of memory"
            ) from None

    def _hired(self) -> Hired:
        """A worker that can take a job."""
        if self._worker is not None and not self._worker.alive:
            self._dismiss()
        if self._worker is None:
            clerks = self._clerks
            worker = self._worker = Hired(clerks._hire)
            if clerks._closed:  # who closed could not see it
                worker.kill()
            try:
                clerks._vocabulary = worker.begin(clerks._vocabulary)
            except EngineError:
                self._worker = None
                raise
        return self._worker

    def _wait(self) -> None:
        """Now and then while a job goes on."""
        if time.monotonic() - self._began > SLOW_S and not self._clerks._todo.empty():
            self._clerks._add()

    def _dismiss(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

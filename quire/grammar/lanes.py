"""Threads that have grammars compiled: each has a worker, and builds here what passed there.

A lane takes tasks from one queue and puts them, with what came of them, into another; that is all
that it shares with the engine's thread. The first lane starts with the first task, another when one
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
from quire.grammar.hired import Crashed, Hire, Hired
from quire.grammar.pace import Allowance
from quire.grammar.vocabulary import Vocabulary
from quire.grammar.worker import Done, Job

if TYPE_CHECKING:
    from quire.grammar.closing import FillAll, Guide

log = logging.getLogger(__name__)

MOST_LANES = 2
SLOW_S = 1.0
"""A job of so many seconds has those behind it take another lane."""
FIRST_IDLE_S = 900.0
OTHER_IDLE_S = 60.0
"""A worker that has had nothing to do for so long ends: of the first lane, of others."""
END_S = 5.0
"""How long a lane may take to end."""

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
    """One grammar on its way. A lane writes what is below `wanted`."""

    constraint: Constraint
    wanted: bool = True  # somebody waits for it
    outcome: Ready | Fault | None = None  # None at the end: nobody waited
    lasting: bool = True
    seconds: float = 0.0


class Lanes:
    """put() is for one thread; `done` is where tasks come out."""

    def __init__(self, hire: Hire, load: Load, *, seconds: float, memory: int) -> None:
        """seconds of processor time and bytes of memory: what one grammar may take."""
        self.done: deque[Task] = deque()
        self.ring: Callable[[], None] = lambda: None
        """Called when a task is done."""
        self._hire, self._load = hire, load
        self._seconds, self._memory = seconds, memory
        self._todo: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lanes: list[_Lane] = []
        self._lock = threading.Lock()
        self._closed = False
        self._vocabulary: Vocabulary | None = None  # the first worker finds it

    def put(self, task: Task) -> None:
        """Have it compiled."""
        self._todo.put(task)
        if not self._lanes:
            self._add()

    def close(self) -> None:
        """End workers and lanes. What is not done stays undone."""
        with self._lock:
            self._closed = True
            lanes = list(self._lanes)
        for _ in lanes:
            self._todo.put(None)
        for lane in lanes:
            lane.end()

    @property
    def workers(self) -> list[int]:
        """Process ids of those that live."""
        return [pid for lane in list(self._lanes) if (pid := lane.pid) is not None]

    def _add(self) -> None:
        with self._lock:
            if not self._closed and len(self._lanes) < MOST_LANES:
                self._lanes.append(_Lane(self, is_first=not self._lanes))

    def _remove(self, lane: _Lane) -> None:
        with self._lock:
            self._lanes.remove(lane)


class _Lane:
    """One thread, and the worker it has hired."""

    def __init__(self, lanes: Lanes, *, is_first: bool) -> None:
        self._lanes = lanes
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
            if task.wanted and not self._lanes._closed:
                began = self._began = time.monotonic()
                task.outcome, task.lasting = self._outcome(task)
                task.seconds = time.monotonic() - began
            self._lanes.done.append(task)
            self._lanes.ring()
        self._dismiss()
        if not self._lanes._closed:
            self._lanes._remove(self)

    def _next(self) -> Task | None:
        """The next task, waited for. None: the lane ends."""
        todo = self._lanes._todo
        try:
            return todo.get(timeout=FIRST_IDLE_S if self._is_first else OTHER_IDLE_S)
        except queue.Empty:
            self._dismiss()
        return todo.get() if self._is_first else None

    def _outcome(self, task: Task) -> tuple[Ready | Fault, bool]:
        """What comes of a task, and whether it would another time."""
        lanes = self._lanes
        job = Job(task.constraint.form, task.constraint.backend, lanes._seconds, lanes._memory)
        try:
            done = self._compiled(job)
            return self._built(done), True
        except RequestError as error:
            log.info("a grammar was refused: %s", error)
            return error, True
        except EngineError as error:
            log.warning("%s", error)
            return error, False
        except Exception as error:  # the border: it ends one request and no lane
            log.exception("a grammar that was compiled could not be built")
            return EngineError(f"{type(error).__name__}: {error}"), False

    def _built(self, done: Done) -> Ready:
        lanes = self._lanes
        assert lanes._vocabulary is not None
        lanes._load.prepare(lanes._vocabulary)
        return pace.run(lambda: lanes._load(done), self._allowance)

    def _compiled(self, job: Job) -> Done:
        """By a worker, and once more if that one ends. Raises RequestError, EngineError."""
        try:
            return self._hired().compile(job, self._wait)
        except Crashed as error:
            if self._lanes._closed:
                raise
            log.warning("%s; the job is tried once more", error)
        try:
            return self._hired().compile(job, self._wait)
        except Crashed:
            raise RequestError(
                "compiling the grammar of the structured output crashed, twice: it may need more "
                f"than {job.memory >> 20} MiB of memory"
            ) from None

    def _hired(self) -> Hired:
        """A worker that can take a job."""
        if self._worker is not None and not self._worker.alive:
            self._dismiss()
        if self._worker is None:
            lanes = self._lanes
            self._worker = Hired(lanes._hire, lanes._vocabulary)
            lanes._vocabulary = self._worker.vocabulary
        return self._worker

    def _wait(self) -> None:
        """Now and then while a job goes on."""
        if time.monotonic() - self._began > SLOW_S and not self._lanes._todo.empty():
            self._lanes._add()

    def _dismiss(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

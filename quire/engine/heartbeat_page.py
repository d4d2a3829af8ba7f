"""Heartbeat page: shows the progress of the engine's thread to other processes, in shared memory.

Each field is a 64-bit number, stored at once; two fields may be of two moments. Times are
nanoseconds of the monotonic clock, which all processes of a machine share. The engines of a server
use one page, one after the other.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from operator import itemgetter
from typing import NamedTuple

from quire.core.accounting.step_time import TOKEN_BASE_COST, StepTimeEstimate, step_cost
from quire.core.types import StepPlan, Update
from quire.engine.core.step_observer import StepObserver


class EnginePhase(IntEnum):
    """State of the engine's process."""

    NONE = 0
    STARTING = 1
    SERVING = 2
    ENDED = 3


class Heartbeat(NamedTuple):
    """The fields of the page. Times in ns of the monotonic clock; 0: never."""

    phase: int = EnginePhase.NONE
    pid: int = 0
    iterations: int = 0
    beat_at: int = 0  # when the loop was last at its start
    progress_at: int = 0  # when a step last finished, or the engine was idle
    steps: int = 0  # finished
    tokens: int = 0  # generated
    requests: int = 0  # running or waiting
    rows: int = 0  # of the last plan
    working: int = 0  # 1: it is not idle
    expected_ns: int = 0  # expected time of the slowest step in flight
    submitted_at: int = 0  # the oldest step in flight; 0: none
    asleep: int = 0
    probe_at: int = 0  # when a health probe step last finished
    probes: int = 0
    unbounded_since: int = 0  # since when a call runs that may take any time; 0: none


_TOKEN_IDS = itemgetter(Update._fields.index("token_ids"))
_FIELD_INDEX = {name: i for i, name in enumerate(Heartbeat._fields)}
PAGE_BYTES = 8 * len(Heartbeat._fields)


def create_page() -> int:
    """Returns the descriptor of a new page, a file without a name. The caller must close it."""
    descriptor = os.memfd_create("quire-beat")
    os.truncate(descriptor, PAGE_BYTES)
    return descriptor


class HeartbeatWriter(StepObserver):
    """Writer of the page: the engine's thread alone, after mark_starting()."""

    def __init__(self, descriptor: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._memory = memoryview(mmap.mmap(descriptor, PAGE_BYTES)).cast("q")
        self._clock = clock
        self._iterations = self._steps = self._tokens = 0
        self._has_work = False
        self._in_flight: deque[tuple[int, int, int]] = deque()  # since, expected time, cost
        self.step_time = StepTimeEstimate()

    def mark_starting(self, pid: int) -> None:
        """Reset the page for a new engine."""
        now = self._clock()
        fresh = Heartbeat(EnginePhase.STARTING, pid, beat_at=now, progress_at=now)
        for i, value in enumerate(fresh):
            self._memory[i] = value

    def mark_serving(self) -> None:
        """The engine accepts requests."""
        self.mark_idle(0)
        self._memory[_PHASE] = EnginePhase.SERVING

    def mark_ended(self) -> None:
        """The engine runs no more steps."""
        self._memory[_PHASE] = EnginePhase.ENDED

    def mark_idle(self, asleep: int) -> None:
        """The engine is idle."""
        memory, now = self._memory, self._clock()
        memory[_ASLEEP] = asleep
        memory[_PROGRESS_AT] = memory[_BEAT] = now
        if self._has_work:
            self._has_work = False
            memory[_WORKING] = memory[_EXPECTED_NS] = memory[_SUBMITTED_AT] = 0

    def mark_iteration(self, *, working: bool, requests: int) -> None:
        """An iteration of the loop begins. working: there is a step to run, or one in flight."""
        memory, now = self._memory, self._clock()
        self._iterations += 1
        memory[_ITERATIONS] = self._iterations
        memory[_BEAT] = now
        memory[_REQUESTS] = requests
        if working is not self._has_work:
            self._has_work = working
            memory[_PROGRESS_AT] = now
            memory[_WORKING] = working

    def mark_unbounded(self, whether: bool) -> None:
        """A call that may take any time begins, or has ended."""
        now = self._clock()
        self._memory[_EXCUSED] = now if whether else 0
        self._memory[_PROGRESS_AT] = self._memory[_BEAT] = now

    def mark_probe(self, whether: bool) -> None:
        """A health probe step begins, or has finished."""
        memory, now = self._memory, self._clock()
        if whether:
            memory[_PROGRESS_AT] = memory[_SUBMITTED_AT] = now
            memory[_EXPECTED_NS] = self.step_time.estimate_ns(TOKEN_BASE_COST + 1)
            memory[_WORKING] = 1
            self._has_work = True
            return
        self.step_time.update(TOKEN_BASE_COST + 1, now - memory[_SUBMITTED_AT])
        memory[_PROBE_AT] = now
        memory[_PROBES] += 1
        self.mark_idle(memory[_ASLEEP])

    # -- as an observer -------------------------------------------------------------------------

    def on_step_planned(self, plan: StepPlan) -> None:
        memory, now = self._memory, self._clock()
        work = step_cost(plan)
        expected = self.step_time.estimate_ns(work)
        if not self._in_flight:
            memory[_SUBMITTED_AT] = now
            memory[_EXPECTED_NS] = expected
        elif expected > memory[_EXPECTED_NS]:
            memory[_EXPECTED_NS] = expected
        self._in_flight.append((now, expected, work))
        memory[_ROWS] = len(plan.rows)

    def on_step_finished(
        self, plan: StepPlan, updates: Sequence[Update], prompt_tokens: int, seconds: float
    ) -> None:
        work = self._pop_oldest_step()
        self._tokens += sum(map(len, map(_TOKEN_IDS, updates)))
        self._memory[_TOKENS] = self._tokens
        if plan.rows:
            self._memory[_PROGRESS_AT] = self._clock()
            self.step_time.update(work, int(seconds * 1e9))

    def on_step_failed(self, plan: StepPlan) -> None:
        self._pop_oldest_step()
        if plan.rows:
            self._memory[_PROGRESS_AT] = self._clock()

    def _pop_oldest_step(self) -> int:
        memory = self._memory
        work = self._in_flight.popleft()[2] if self._in_flight else 0
        self._steps += 1
        memory[_STEPS] = self._steps
        if self._in_flight:
            memory[_SUBMITTED_AT], memory[_EXPECTED_NS] = self._in_flight[0][:2]
        else:
            memory[_SUBMITTED_AT] = memory[_EXPECTED_NS] = 0
        return work


class HeartbeatReader:
    """Reader of the page, in any process."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, PAGE_BYTES, prot=mmap.PROT_READ)
        self._fields = memoryview(self._memory).cast("q")

    def read(self) -> Heartbeat:
        """Returns the current fields."""
        return Heartbeat(*self._fields)


_PHASE, _ITERATIONS, _BEAT = (
    _FIELD_INDEX["phase"],
    _FIELD_INDEX["iterations"],
    _FIELD_INDEX["beat_at"],
)
_PROGRESS_AT, _STEPS, _TOKENS = (
    _FIELD_INDEX["progress_at"],
    _FIELD_INDEX["steps"],
    _FIELD_INDEX["tokens"],
)
_REQUESTS, _ROWS, _WORKING = _FIELD_INDEX["requests"], _FIELD_INDEX["rows"], _FIELD_INDEX["working"]
_EXPECTED_NS, _SUBMITTED_AT, _ASLEEP = (
    _FIELD_INDEX["expected_ns"],
    _FIELD_INDEX["submitted_at"],
    _FIELD_INDEX["asleep"],
)
_PROBE_AT, _PROBES, _EXCUSED = (
    _FIELD_INDEX["probe_at"],
    _FIELD_INDEX["probes"],
    _FIELD_INDEX["unbounded_since"],
)

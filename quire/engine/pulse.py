"""The beat: a page that the engine's thread writes and anybody reads without asking it.

Numbers of 64 bits, each stored at once, so a reader never sees half of one; two numbers may be of
two moments. Times are nanoseconds of the monotonic clock, which all processes of a machine share.
One page serves all engines of a server, one after the other: it is theirs while they live.

How long a step may take is learnt from steps that landed, by how much work was in them: a step of
8,192 tokens is not expected to be as quick as one of one token, nor suspected for it.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from operator import itemgetter, mul
from typing import NamedTuple

from quire.core.types import StepPlan, Update
from quire.engine.witness import Witness

BASE = 1024
"""Tokens of context whose attention is taken to cost as much as the rest of a token's work, at
least: small models reach that early, and an estimate had better be too long."""
UNKNOWN_S = 60.0
"""What is expected of a step while none has landed."""
FORGET = 0.98
"""Of a step that was slow once, so much is remembered with each further one of its size."""
_SIZES = 64


class Phase(IntEnum):
    """What the engine's process is at."""

    NONE = 0
    STARTING = 1
    SERVING = 2
    ENDED = 3


class Beat(NamedTuple):
    """The page, read. Times in ns of the monotonic clock; 0: never."""

    phase: int = Phase.NONE
    pid: int = 0
    turns: int = 0
    beat_at: int = 0  # when its thread last passed by
    progress_at: int = 0  # when a step last landed, or there was nothing to do
    steps: int = 0  # that landed
    tokens: int = 0  # said
    requests: int = 0  # here, running or waiting
    rows: int = 0  # of the latest plan
    working: int = 0  # there is something to do
    expected_ns: int = 0  # of the steps under way: how long one may well take
    submitted_at: int = 0  # the oldest step under way; 0: none is
    asleep: int = 0
    canary_at: int = 0  # when a canary last came back
    canaries: int = 0
    excused_at: int = 0  # since when it does what may take long, and is no step; 0: it does not


_SAID = itemgetter(Update._fields.index("token_ids"))
_AT = {name: i for i, name in enumerate(Beat._fields)}
SIZE = 8 * len(Beat._fields)


def page() -> int:
    """A file without a name; its descriptor. Whoever made it closes it."""
    made = os.memfd_create("quire-beat")
    os.truncate(made, SIZE)
    return made


class Pulse(Witness):
    """The writer: the engine's thread alone, after begin()."""

    def __init__(self, descriptor: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._memory = memoryview(mmap.mmap(descriptor, SIZE)).cast("q")
        self._clock = clock
        self._turns = self._steps = self._tokens = 0
        self._working = False
        self._under_way: deque[tuple[int, int, int]] = deque()  # since, expected, work
        self.pace = Expectation()

    def begin(self, pid: int) -> None:
        """Of a new engine: nothing of the one before counts."""
        now = self._clock()
        fresh = Beat(Phase.STARTING, pid, beat_at=now, progress_at=now)
        for i, value in enumerate(fresh):
            self._memory[i] = value

    def serve(self) -> None:
        """It takes requests."""
        self.rest(0)
        self._memory[_PHASE] = Phase.SERVING

    def end(self) -> None:
        """It will make no more turns."""
        self._memory[_PHASE] = Phase.ENDED

    def rest(self, asleep: int) -> None:
        """There is nothing to do."""
        memory, now = self._memory, self._clock()
        memory[_ASLEEP] = asleep
        memory[_PROGRESS] = memory[_BEAT] = now
        if self._working:
            self._working = False
            memory[_WORKING] = memory[_EXPECTED] = memory[_SUBMITTED] = 0

    def turn(self, *, working: bool, requests: int) -> None:
        """A turn begins. working: there is a step to make, or one under way."""
        memory, now = self._memory, self._clock()
        self._turns += 1
        memory[_TURNS] = self._turns
        memory[_BEAT] = now
        memory[_REQUESTS] = requests
        if working is not self._working:
            self._working = working
            memory[_PROGRESS] = now
            memory[_WORKING] = working

    def excuse(self, whether: bool) -> None:
        """What comes now may take as long as it likes."""
        now = self._clock()
        self._memory[_EXCUSED] = now if whether else 0
        self._memory[_PROGRESS] = self._memory[_BEAT] = now

    def canary(self, whether: bool) -> None:
        """A canary is sent, or has come back."""
        memory, now = self._memory, self._clock()
        if whether:
            memory[_PROGRESS] = memory[_SUBMITTED] = now
            memory[_EXPECTED] = self.pace.of(BASE + 1)
            memory[_WORKING] = 1
            self._working = True
            return
        self.pace.learn(BASE + 1, now - memory[_SUBMITTED])
        memory[_CANARY] = now
        memory[_CANARIES] += 1
        self.rest(memory[_ASLEEP])

    # -- as a witness ---------------------------------------------------------------------------

    def planned(self, plan: StepPlan) -> None:
        memory, now = self._memory, self._clock()
        work = work_of(plan)
        expected = self.pace.of(work)
        if not self._under_way:
            memory[_SUBMITTED] = now
            memory[_EXPECTED] = expected
        elif expected > memory[_EXPECTED]:
            memory[_EXPECTED] = expected
        self._under_way.append((now, expected, work))
        memory[_ROWS] = len(plan.rows)

    def landed(
        self, plan: StepPlan, updates: Sequence[Update], prompt_tokens: int, seconds: float
    ) -> None:
        work = self._landed()
        self._tokens += sum(map(len, map(_SAID, updates)))
        self._memory[_TOKENS] = self._tokens
        if plan.rows:
            self._memory[_PROGRESS] = self._clock()
            self.pace.learn(work, int(seconds * 1e9))

    def failed(self, plan: StepPlan, updates: Sequence[Update]) -> None:
        self._landed()
        if plan.rows:
            self._memory[_PROGRESS] = self._clock()

    def _landed(self) -> int:
        memory = self._memory
        work = self._under_way.popleft()[2] if self._under_way else 0
        self._steps += 1
        memory[_STEPS] = self._steps
        if self._under_way:
            memory[_SUBMITTED], memory[_EXPECTED] = self._under_way[0][:2]
        else:
            memory[_SUBMITTED] = memory[_EXPECTED] = 0
        return work


def work_of(plan: StepPlan) -> int:
    """How much a step has to do, in tokens times the context that each looks at."""
    if not plan.rows:
        return 0
    _, starts, counts, _ = zip(*plan.rows)
    tokens = sum(counts)
    looked_at = sum(starts) if tokens == len(counts) else sum(map(mul, counts, starts))
    return int(BASE * tokens + looked_at + sum(map(mul, counts, counts)) // 2)


class Expectation:
    """How long a step of some work may well take: the slowest of its size, in powers of two."""

    def __init__(self) -> None:
        self._slowest = [0] * _SIZES  # ns

    def learn(self, work: int, ns: int) -> None:
        """A step landed."""
        size = work.bit_length()
        self._slowest[size] = max(ns, int(self._slowest[size] * FORGET))

    def of(self, work: int) -> int:
        """In ns. What is larger than all that was seen is thought to take as much longer."""
        size, slowest = work.bit_length(), self._slowest
        if slowest[size]:
            return max(slowest[: size + 1])
        for smaller in range(size - 1, -1, -1):
            if slowest[smaller]:
                return max(slowest[: smaller + 1]) << (size - smaller)
        return max(slowest) or int(UNKNOWN_S * 1e9)


class Reader:
    """Of any process that has the page."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, SIZE, prot=mmap.PROT_READ)
        self._numbers = memoryview(self._memory).cast("q")

    def read(self) -> Beat:
        """As it is now."""
        return Beat(*self._numbers)


_PHASE, _TURNS, _BEAT = _AT["phase"], _AT["turns"], _AT["beat_at"]
_PROGRESS, _STEPS, _TOKENS = _AT["progress_at"], _AT["steps"], _AT["tokens"]
_REQUESTS, _ROWS, _WORKING = _AT["requests"], _AT["rows"], _AT["working"]
_EXPECTED, _SUBMITTED, _ASLEEP = _AT["expected_ns"], _AT["submitted_at"], _AT["asleep"]
_CANARY, _CANARIES, _EXCUSED = _AT["canary_at"], _AT["canaries"], _AT["excused_at"]

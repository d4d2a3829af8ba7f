"""Compiled grammars: made beside the engine, kept while they are used, and for some time after.

    ask ──▶ waiting ──▶ submitted ──▶ used ──▶ unused ──▶ forgotten
                           │ ▲
                  a clerk: has it compiled by a worker process, and builds it here

All of it but the clerks (quire.grammar.clerks) belongs to the engine's thread. What is asked for
stays until it is released, so a grammar is there as long as a sequence needs it; what nobody uses
is kept as far as there is room. How much may be in use at a time has a bound, too: others wait.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quire.core.constraint import Constraint
from quire.core.snapshot import GrammarFigures
from quire.errors import Overloaded
from quire.grammar.clerks import Clerks, Fault, Ready, Task

AHEAD = 16
"""Jobs that are submitted before one is done: clerks need not wait for the engine's next step."""
RETRY_S = 2.0
_FAULT_BYTES = 500


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is kept that nobody uses; what may be in use at a time, and may wait."""

    cache_size: int = 512
    cache_memory: int = 1 << 26
    use_size: int = 1024
    use_memory: int = 1 << 30
    waiting: int = 10_000
    waiting_memory: int = 1 << 27


@dataclass(slots=True, eq=False)
class _Entry:
    """A constraint that somebody asked for, or whose outcome is kept."""

    constraint: Constraint
    users: int = 0
    task: Task | None = None  # while it is submitted
    outcome: Ready | Fault | None = None
    lasting: bool = True  # the outcome would be the same another time
    size: int = 0


class Grammars:
    """One per engine. Implements quire.core.limits.grammars.Grammars."""

    def __init__(self, clerks: Clerks, bounds: Bounds = Bounds(), *, early: bool = False) -> None:
        """early: what is made once is much, and better made before it is needed."""
        self._clerks, self._early = clerks, early
        self._bounds = bounds
        self._entries: dict[Constraint, _Entry] = {}
        self._waiting: OrderedDict[Constraint, _Entry] = OrderedDict()
        self._unused: OrderedDict[Constraint, _Entry] = OrderedDict()  # the oldest first
        self._news: list[Constraint] = []
        self._submitted = 0
        self._used = 0
        self._kept = 0
        self._used_bytes = 0
        self._kept_bytes = 0
        self._waiting_bytes = 0
        self._counted = GrammarFigures()
        weakref.finalize(self, clerks.close)

    # -- asking -------------------------------------------------------------------------------

    def accept(self, constraint: Constraint) -> None:
        """Raise Overloaded if it would have to wait, and too many do."""
        if constraint in self._entries:
            return
        size = self._waiting_bytes + len(constraint.form)
        if len(self._waiting) >= self._bounds.waiting or size > self._bounds.waiting_memory:
            here = f"{len(self._waiting)} grammars of structured output wait to be compiled"
            raise Overloaded(f"{here}: try again later", retry_after_s=RETRY_S)

    def ask(self, constraint: Constraint) -> None:
        """Have it compiled, and kept until release(); outcomes() will tell."""
        entry = self._entries.get(constraint)
        if entry is None:
            entry = self._entries[constraint] = _Entry(constraint)
            self._waiting[constraint] = entry
            self._waiting_bytes += len(constraint.form)
        entry.users += 1
        if entry.outcome is not None:
            self._counted = self._counted._replace(hits=self._counted.hits + 1)
            self._news.append(constraint)
            if entry.users == 1:
                del self._unused[constraint]
                self._count_use(entry, 1)
        elif entry.task is not None:
            entry.task.wanted = True
        self._submit()

    def release(self, constraint: Constraint) -> None:
        """One who asked needs it no longer."""
        entry = self._entries[constraint]
        entry.users -= 1
        if entry.users:
            return
        if entry.outcome is not None:
            self._count_use(entry, -1)
            self._unused[constraint] = entry
            self._evict()
        elif entry.task is not None:
            entry.task.wanted = False
        else:
            del self._waiting[constraint], self._entries[constraint]
            self._waiting_bytes -= len(constraint.form)
        self._submit()

    def get(self, constraint: Constraint) -> Ready:
        """One that was asked for, and is ready. From any thread."""
        outcome = self._entries[constraint].outcome
        assert outcome is not None, "a grammar is used before it is compiled"
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    # -- telling ------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """outcomes() would do something."""
        return bool(self._news or self._clerks.done)

    def outcomes(self) -> Iterator[tuple[Constraint, int | Fault]]:
        """Of each that was asked for: how many tokens a whole text takes at least, or a fault."""
        while self._clerks.done:
            self._take(self._clerks.done.popleft())
        self._submit()
        news, self._news = self._news, []
        for constraint in dict.fromkeys(news):
            entry = self._entries.get(constraint)
            if entry is not None and entry.users and entry.outcome is not None:
                outcome = entry.outcome
                yield constraint, outcome if isinstance(outcome, Exception) else outcome.least

    def call_when_settled(self, ring: Callable[[], None]) -> None:
        """Have ring() called, by any thread, when `settled` may have become true."""
        self._clerks.ring = ring

    def figures(self) -> GrammarFigures:
        """What it did, and how it is now."""
        return self._counted._replace(
            waiting=len(self._waiting) + self._submitted,
            kept=self._kept,
            kept_bytes=self._kept_bytes,
        )

    def prepare(self) -> None:
        """Nothing is to be done now: make what is made once for a vocabulary, if it is much."""
        if self._early:
            self._clerks.prepare()

    def close(self) -> None:
        """End the workers: nothing more is compiled."""
        self._clerks.close()

    # -- below --------------------------------------------------------------------------------

    def _submit(self) -> None:
        """Give the clerks what they may have now."""
        bounds = self._bounds
        while (
            self._waiting
            and self._submitted < AHEAD
            and self._submitted + self._used < bounds.use_size
            and self._used_bytes < bounds.use_memory
        ):
            constraint, entry = self._waiting.popitem(last=False)
            self._waiting_bytes -= len(constraint.form)
            entry.task = Task(constraint)
            self._submitted += 1
            self._clerks.put(entry.task)

    def _take(self, task: Task) -> None:
        """Note what came of a task. Of one that nobody wanted any more nothing did."""
        self._submitted -= 1
        entry = self._entries[task.constraint]
        entry.task = None
        if task.outcome is None:
            self._take_back(entry)
            return
        failed = isinstance(task.outcome, Exception)
        counted = self._counted
        self._counted = counted._replace(
            failed=counted.failed + failed,
            compiled=counted.compiled + (not failed),
            compile_seconds=counted.compile_seconds + task.seconds,
        )
        entry.outcome, entry.lasting = task.outcome, task.lasting
        entry.size = len(task.constraint.form) + _size(task.outcome)
        self._kept += 1
        self._kept_bytes += entry.size
        if entry.users:
            self._count_use(entry, 1)
            self._news.append(task.constraint)
        else:
            self._unused[task.constraint] = entry
        self._evict()

    def _take_back(self, entry: _Entry) -> None:
        """It was not compiled: forget it, unless somebody has asked for it again."""
        if entry.users:
            self._waiting[entry.constraint] = entry
            self._waiting_bytes += len(entry.constraint.form)
        else:
            del self._entries[entry.constraint]

    def _count_use(self, entry: _Entry, sign: int) -> None:
        self._used += sign
        self._used_bytes += sign * entry.size

    def _evict(self) -> None:
        """Forget what is too much, and faults that another time need not be one."""
        bounds = self._bounds
        last = next(reversed(self._unused), None)
        if last is not None and not self._entries[last].lasting:
            self._forget(last)
        while (
            len(self._unused) > bounds.cache_size
            or self._kept_bytes - self._used_bytes > bounds.cache_memory
        ):
            self._forget(next(iter(self._unused)))

    def _forget(self, constraint: Constraint) -> None:
        entry = self._unused.pop(constraint)
        del self._entries[constraint]
        self._kept -= 1
        self._kept_bytes -= entry.size


def _size(outcome: Ready | Fault) -> int:
    return _FAULT_BYTES if isinstance(outcome, Exception) else outcome.size

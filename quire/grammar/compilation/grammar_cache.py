"""Cache of compiled grammars, which tracks the requests that use them.

    requested ──▶ waiting ──▶ submitted ──▶ in use ──▶ unused ──▶ evicted
                                 │ ▲
                       compile thread: a worker compiles, the thread loads

Only the engine's thread uses the cache; compile threads (compile_threads) return results to it. A
grammar in use is never evicted; unused ones are kept within limits of count and memory. Limits also
bound how many may be in use at a time: other requests wait.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quire.core.constraint import Constraint
from quire.core.snapshot import GrammarStats
from quire.errors import Overloaded
from quire.grammar.compilation.compile_threads import (
    CacheableGrammar,
    CompileError,
    CompilePool,
    CompileTask,
)

MAX_SUBMITTED = 16
"""Jobs that are submitted before one is done: threads need not wait for the engine's next step."""
RETRY_S = 2.0
_FAULT_BYTES = 500


@dataclass(frozen=True, slots=True)
class CacheBounds:
    """Limits of unused grammars, of grammars in use, and of grammars that wait."""

    cache_size: int = 512
    cache_memory: int = 1 << 26
    use_size: int = 1024
    use_memory: int = 1 << 30
    waiting: int = 10_000
    waiting_memory: int = 1 << 27


@dataclass(slots=True, eq=False)
class _CacheEntry:
    """A constraint that a request uses, or with an outcome that is kept."""

    constraint: Constraint
    users: int = 0
    task: CompileTask | None = None  # while it is submitted
    outcome: CacheableGrammar | CompileError | None = None
    cacheable: bool = True  # the outcome would be the same another time
    size: int = 0


class GrammarCache:
    """One per engine. Implements quire.core.scheduling.grammar_wait.GrammarProvider."""

    def __init__(self, pool: CompilePool, bounds: CacheBounds = CacheBounds()) -> None:
        self._compile_pool = pool
        self._bounds = bounds
        self._entries: dict[Constraint, _CacheEntry] = {}
        self._waiting: OrderedDict[Constraint, _CacheEntry] = OrderedDict()
        self._unused: OrderedDict[Constraint, _CacheEntry] = OrderedDict()  # the oldest first
        self._unreported: list[Constraint] = []
        self._submitted = 0
        self._used = 0
        self._kept = 0
        self._used_bytes = 0
        self._kept_bytes = 0
        self._waiting_bytes = 0
        self._stats = GrammarStats()
        weakref.finalize(self, pool.close)

    # -- requests -----------------------------------------------------------------------------

    def check_constraint(self, constraint: Constraint) -> None:
        """Raise Overloaded if it would have to wait, and too many do."""
        if constraint in self._entries:
            return
        size = self._waiting_bytes + len(constraint.form)
        if len(self._waiting) >= self._bounds.waiting or size > self._bounds.waiting_memory:
            here = f"{len(self._waiting)} grammars of structured output wait to be compiled"
            raise Overloaded(f"{here}: try again later", retry_after_s=RETRY_S)

    def acquire(self, constraint: Constraint) -> None:
        """Have it compiled, and kept until release(); outcomes() returns the result."""
        entry = self._entries.get(constraint)
        if entry is None:
            entry = self._entries[constraint] = _CacheEntry(constraint)
            self._waiting[constraint] = entry
            self._waiting_bytes += len(constraint.form)
        entry.users += 1
        if entry.outcome is not None:
            self._stats = self._stats._replace(hits=self._stats.hits + 1)
            self._unreported.append(constraint)
            if entry.users == 1:
                del self._unused[constraint]
                self._count_use(entry, 1)
        elif entry.task is not None:
            entry.task.wanted = True
        self._submit()

    def release(self, constraint: Constraint) -> None:
        """Stop using the grammar for one request."""
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

    def get(self, constraint: Constraint) -> CacheableGrammar:
        """Return an acquired grammar that is compiled, or raise its error. From any thread."""
        outcome = self._entries[constraint].outcome
        assert outcome is not None, "a grammar is used before it is compiled"
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    # -- outcomes -----------------------------------------------------------------------------

    @property
    def has_outcomes(self) -> bool:
        """outcomes() would do something."""
        return bool(self._unreported or self._compile_pool.done)

    def outcomes(self) -> Iterator[tuple[Constraint, int | CompileError]]:
        """Yield acquired constraints, each with the least tokens of a whole text or its error."""
        while self._compile_pool.done:
            self._record_outcome(self._compile_pool.done.popleft())
        self._submit()
        news, self._unreported = self._unreported, []
        for constraint in dict.fromkeys(news):
            entry = self._entries.get(constraint)
            if entry is not None and entry.users and entry.outcome is not None:
                outcome = entry.outcome
                yield constraint, outcome if isinstance(outcome, Exception) else outcome.min_tokens

    def set_outcome_callback(self, ring: Callable[[], None]) -> None:
        """Have ring() called, by any thread, when `settled` may have become true."""
        self._compile_pool.notify = ring

    def stats(self) -> GrammarStats:
        """Counters, and the present state."""
        return self._stats._replace(
            waiting=len(self._waiting) + self._submitted,
            cached=self._kept,
            cached_bytes=self._kept_bytes,
        )

    def prepare(self) -> None:
        """Start a worker, and make in another thread what is made once for a vocabulary."""
        self._compile_pool.prepare()

    def close(self) -> None:
        """End the workers: nothing more is compiled."""
        self._compile_pool.close()

    # -- below --------------------------------------------------------------------------------

    def _submit(self) -> None:
        """Submit what the limits allow now."""
        bounds = self._bounds
        while (
            self._waiting
            and self._submitted < MAX_SUBMITTED
            and self._submitted + self._used < bounds.use_size
            and self._used_bytes < bounds.use_memory
        ):
            constraint, entry = self._waiting.popitem(last=False)
            self._waiting_bytes -= len(constraint.form)
            entry.task = CompileTask(constraint)
            self._submitted += 1
            self._compile_pool.submit(entry.task)

    def _record_outcome(self, task: CompileTask) -> None:
        """Take the outcome of a task. A task that no request wanted any more has none."""
        self._submitted -= 1
        entry = self._entries[task.constraint]
        entry.task = None
        if task.outcome is None:
            self._discard(entry)
            return
        failed = isinstance(task.outcome, Exception)
        counted = self._stats
        self._stats = counted._replace(
            failed=counted.failed + failed,
            compiled=counted.compiled + (not failed),
            compile_seconds=counted.compile_seconds + task.seconds,
        )
        entry.outcome, entry.cacheable = task.outcome, task.cacheable
        entry.size = len(task.constraint.form) + _size(task.outcome)
        self._kept += 1
        self._kept_bytes += entry.size
        if entry.users:
            self._count_use(entry, 1)
            self._unreported.append(task.constraint)
        else:
            self._unused[task.constraint] = entry
        self._evict()

    def _discard(self, entry: _CacheEntry) -> None:
        """It was not compiled: forget it, unless a request needs it again."""
        if entry.users:
            self._waiting[entry.constraint] = entry
            self._waiting_bytes += len(entry.constraint.form)
        else:
            del self._entries[entry.constraint]

    def _count_use(self, entry: _CacheEntry, sign: int) -> None:
        self._used += sign
        self._used_bytes += sign * entry.size

    def _evict(self) -> None:
        """Forget what is too much, and faults that another time need not be one."""
        bounds = self._bounds
        last = next(reversed(self._unused), None)
        if last is not None and not self._entries[last].cacheable:
            self._remove(last)
        while (
            len(self._unused) > bounds.cache_size
            or self._kept_bytes - self._used_bytes > bounds.cache_memory
        ):
            self._remove(next(iter(self._unused)))

    def _remove(self, constraint: Constraint) -> None:
        entry = self._unused.pop(constraint)
        del self._entries[constraint]
        self._kept -= 1
        self._kept_bytes -= entry.size


def _size(outcome: CacheableGrammar | CompileError) -> int:
    return _FAULT_BYTES if isinstance(outcome, Exception) else outcome.size

"""Deferred free: holds freed blocks until the steps that may still use them have finished.

A block freed while step n is in flight returns to its pool when n is applied. Until then the pool
counts it as held. There is one instance per pool.
"""

from __future__ import annotations

from collections.abc import Callable


class DeferredFree:
    """Blocks that will be freed when a step has finished."""

    def __init__(self, drop: Callable[[list[int]], None]) -> None:
        self._free = drop
        self._pending: list[tuple[int, list[int]]] = []
        self._last_finished = 0
        self.num_pending = 0  # blocks

    def free_after(self, blocks: list[int], after: int) -> None:
        """Free the blocks when step `after` has finished."""
        if after <= self._last_finished:
            self._free(blocks)
        elif blocks:
            self._pending.append((after, blocks))
            self.num_pending += len(blocks)

    def step_finished(self, step: int) -> None:
        """Free the blocks that waited for this step or for an earlier one."""
        self._last_finished = step
        if not self._pending:
            return
        kept, self._pending = self._pending, []
        for after, num_pending in kept:
            if after <= step:
                self.num_pending -= len(num_pending)
                self._free(num_pending)
            else:
                self._pending.append((after, num_pending))

    def pending_blocks(self) -> list[int]:
        """Return the blocks that are not freed yet, with repetitions. For checks."""
        return [block for _, blocks in self._pending for block in blocks]

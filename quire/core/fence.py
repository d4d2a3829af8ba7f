"""Keeps blocks back until the steps that may still touch them are over.

A block given up while step n is in flight returns to its pool only when n is applied. Until then
the pool counts it as held. One fence per pool; it knows step numbers and blocks, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable


class Fence:
    """Blocks on their way back."""

    def __init__(self, drop: Callable[[list[int]], None]) -> None:
        self._drop = drop
        self._kept: list[tuple[int, list[int]]] = []
        self._landed = 0
        self.blocks = 0  # how many wait here

    def give_back(self, blocks: list[int], after: int) -> None:
        """Drop the blocks, once step `after` is over."""
        if after <= self._landed:
            self._drop(blocks)
        elif blocks:
            self._kept.append((after, blocks))
            self.blocks += len(blocks)

    def landed(self, step: int) -> None:
        """Step `step`, and so every one before it, is over."""
        self._landed = step
        if not self._kept:
            return
        kept, self._kept = self._kept, []
        for after, blocks in kept:
            if after <= step:
                self.blocks -= len(blocks)
                self._drop(blocks)
            else:
                self._kept.append((after, blocks))

    def held(self) -> list[int]:
        """The blocks that wait here, with repetitions. For checks."""
        return [block for _, blocks in self._kept for block in blocks]

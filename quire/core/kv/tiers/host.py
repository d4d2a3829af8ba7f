"""Host block pool: allocates blocks of host memory for the KV of swapped sequences.

It manages block numbers; the runner owns the memory and copies as plans say. A block is read by the
swap_in of the plan that frees it, so it returns through DeferredFree when that plan is over.
"""

from __future__ import annotations


class HostBlockPool:
    """Host block ids [0, size): each taken or free."""

    def __init__(self, num_blocks: int) -> None:
        self.size = num_blocks
        self._free = list(range(num_blocks))

    @property
    def available(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int] | None:
        """Hold n blocks. All or nothing: None if n are not available."""
        if n > len(self._free):
            return None
        return [self._free.pop() for _ in range(n)]

    def free(self, blocks: list[int]) -> None:
        self._free += blocks

    def check(self, taken: list[int]) -> None:
        """Raise AssertionError unless every block is free or among `taken`, exactly once."""
        if sorted([*self._free, *taken]) != list(range(self.size)):
            raise AssertionError(f"host blocks leaked or doubled: free {self._free}, taken {taken}")

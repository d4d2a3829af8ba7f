"""Cache specs: compute what each kind of layer group must keep, and how many blocks that needs.

A layer group is a set of layers that share a block table. Full attention keeps everything; a
sliding window frees blocks that are behind it. Arithmetic only, without state.

    position p of a window layer of size w reads (p - w, p]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class CacheSpec(Protocol):
    """One kind of layer group."""

    @property
    def window(self) -> int | None:
        """Number of positions that a token attends to, itself included. None: all."""

    def first_needed(self, position: int) -> int:
        """The first position that tokens at `position` and later still read."""

    def max_blocks(self, tokens: int, block_size: int) -> int:
        """Maximum of blocks that a sequence of `tokens` tokens holds, computed one by one."""


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """Every token sees all before it."""

    @property
    def window(self) -> int | None:
        return None

    def first_needed(self, position: int) -> int:
        return 0

    def max_blocks(self, tokens: int, block_size: int) -> int:
        return -(-tokens // block_size)


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec:
    """A token sees itself and the size - 1 before it."""

    size: int

    def __post_init__(self) -> None:
        assert self.size > 0, self.size

    @property
    def window(self) -> int | None:
        return self.size

    def first_needed(self, position: int) -> int:
        return max(0, position - self.size + 1)

    def max_blocks(self, tokens: int, block_size: int) -> int:
        worst = (self.size + block_size - 2) // block_size + 1  # the window straddles block edges
        return min(-(-tokens // block_size), worst)

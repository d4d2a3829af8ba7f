"""Integer arithmetic of grids and tiles for the host: Triton's own takes microseconds per call."""

from __future__ import annotations


def cdiv(count: int, size: int) -> int:
    """How many pieces of a size hold so many."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The least power of two that is at least count; 1 for 0."""
    return 1 << max(count - 1, 0).bit_length()

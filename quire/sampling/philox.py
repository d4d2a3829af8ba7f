"""Philox: random numbers that depend only on (seed, position); maps a counter to bits.

    key      the sequence's seed, 64 bits
    counter  the token's position among the outputs, and which of its draws it is

So a draw is the same in any batch, slot or device, and after preemption. On the host, vectorised;
`Uniforms` keeps a window of draws per slot so that a step costs one lookup.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), Philox 4x32-10.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
WINDOW = 64
"""Draws made at once for one sequence: the cost of the vector call is spread over as many steps."""


def philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Four random 32-bit words from four words of counter and two of key.

    counter: [..., 4], key: [..., 2], words in uint64. Returns [..., 4], uint64 below 2**32.
    """
    a, b, c, d = np.moveaxis(counter, -1, 0)
    k0, k1 = np.moveaxis(key, -1, 0)
    for _ in range(ROUNDS):
        left, right = a * MULTIPLIERS[0], c * MULTIPLIERS[1]  # below 2**64: no overflow
        a, b, c, d = (right >> HALF) ^ b ^ k0, right & LOW, (left >> HALF) ^ d ^ k1, left & LOW
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return np.stack(np.broadcast_arrays(a, b, c, d), -1)


def uniforms(seeds: np.ndarray, positions: np.ndarray, draw: int = 0) -> np.ndarray:
    """A float64 in [0, 1) of 53 random bits for each (seed, position). Both uint64, one shape."""
    zero = np.zeros_like(positions)
    counter = np.stack([positions & LOW, positions >> HALF, zero + np.uint64(draw), zero], -1)
    words = philox(counter, np.stack([seeds & LOW, seeds >> HALF], -1))
    high, low = words[..., 0] >> np.uint64(5), words[..., 1] >> np.uint64(6)
    return (high * np.uint64(1 << 26) + low).astype(np.float64) * 2.0**-53


class Uniforms:
    """The draws of each slot's sequence, WINDOW positions at a time."""

    def __init__(self, max_seqs: int, draw: int = 0) -> None:
        """draw: which of a token's, if it may take several."""
        self._draw = draw
        self._seeds = np.zeros(max_seqs, np.uint64)
        self._starts = np.full(max_seqs, -1, np.int64)
        self._window = np.zeros((max_seqs, WINDOW), np.float64)

    def join(self, slot: int, seed: int) -> None:
        """The slot's draws are now of this seed (any int; its low 64 bits count)."""
        self._seeds[slot] = seed & (2**64 - 1)
        self._starts[slot] = -1

    def draw(self, slots: np.ndarray, positions: Sequence[int]) -> np.ndarray:
        """A draw of each slot at a position: [n] float64. slots: [n] int64, may repeat."""
        where = np.asarray(positions, np.int64)
        offsets = where % WINDOW
        starts = where - offsets
        stale = starts != self._starts[slots]
        if stale.any():
            self._fill(slots[stale], starts[stale])
        found: np.ndarray = self._window[slots, offsets]
        others = starts != self._starts[slots]
        if others.any():  # positions of one slot on both sides of a window's end
            at = where[others].astype(np.uint64)
            found[others] = uniforms(self._seeds[slots[others]], at, self._draw)
        return found

    def _fill(self, slots: np.ndarray, starts: np.ndarray) -> None:
        positions = (starts[:, None] + np.arange(WINDOW)).astype(np.uint64)
        seeds = np.broadcast_to(self._seeds[slots][:, None], positions.shape)
        self._window[slots] = uniforms(seeds, positions, self._draw)
        self._starts[slots] = starts

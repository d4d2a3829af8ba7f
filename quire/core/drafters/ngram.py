"""N-gram drafter: proposes what followed the latest earlier place of the last tokens.

Each sequence has an index of the n-grams of its prompt and output: hash -> where it ends. Only
every few positions are in it, so it is small and quick to extend; in return a lookup tries the ends
of as many last n-grams, and compares the tokens behind them. A match of n + stride - 1 tokens is
always found if its n-grams do not occur later too, and one of n tokens if it lies well.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from quire.config.engine_config import SpeculationSection
from quire.core.drafters.base import HostDrafter
from quire.core.types import Sequence

MAX_STRIDE = 4
"""Positions from one n-gram of an index to the next, at most."""
MAX_INDEXED = 16_384
"""Tokens that one call adds to an index: a longer prompt takes several calls."""


class NgramIndex:
    """Places of n-grams in one list of tokens that only grows. A place is where an n-gram ends."""

    __slots__ = ("_next", "_places", "_size", "_stride")

    def __init__(self, size: int) -> None:
        """size: n."""
        self._size = size
        self._stride = min(max(size - 1, 1), MAX_STRIDE)
        self._next = size  # the next place to add
        self._places: dict[int, int] = {}  # hash -> latest place

    def extend(self, tokens: list[int], known: int) -> bool:
        """Add tokens[:known], but not the places that find() starts from. Returns False if there
        are more to add in a later call."""
        first, size, stride = self._next, self._size, self._stride
        last = min(known - stride, first + MAX_INDEXED)
        if last < first:
            return True
        columns = [tokens[first - i : last - i + 1 : stride] for i in range(size, 0, -1)]
        places = range(first, last + 1, stride)
        # an n-gram that ends at a place has the tokens before it
        self._places.update(zip(map(hash, zip(*columns)), places))
        self._next = places[-1] + stride
        return self._next > known - stride

    def find(self, tokens: list[int], known: int) -> int | None:
        """Return the index of the token behind an earlier place of the last tokens before `known`.

        The tokens before both agree in n positions at least.
        """
        size, places = self._size, self._places
        for back in range(min(self._stride, known - size + 1)):
            end = known - back
            place = places.get(hash(tuple(tokens[end - size : end])))
            if place is not None:
                begin, length = place - size, size + back
                if tokens[begin : begin + length] == tokens[known - length : known]:
                    return place + back
        return None


def continuation(tokens: list[int], at: int, known: int, most: int) -> list[int]:
    """Return up to `most` tokens from index `at` on, as if what begins there followed `known`.

    Where that reaches `known` itself, the tokens repeat with a period of known - at.
    """
    found = tokens[at : min(at + most, known)]
    while len(found) < most:
        found += found[: most - len(found)]
    return found


class NgramDrafter(HostDrafter):
    """sizes: of n-grams, the largest first."""

    def __init__(self, smallest: int, largest: int) -> None:
        self._sizes = sorted({smallest, largest}, reverse=True)
        self._indexes: dict[Sequence, list[NgramIndex]] = {}

    def propose(self, seq: Sequence, known: int, most: int) -> Seq[int]:
        indexes = self._indexes.get(seq)
        if indexes is None:
            indexes = self._indexes[seq] = [NgramIndex(size) for size in self._sizes]
        tokens = seq.tokens
        for index in indexes:
            index.extend(tokens, known)
            at = index.find(tokens, known)
            if at is not None:
                return continuation(tokens, at, known, most)
        return ()

    def remove(self, seq: Sequence) -> None:
        self._indexes.pop(seq, None)


def build(section: SpeculationSection) -> HostDrafter:
    return NgramDrafter(section.lookup_min, section.lookup_max)

"""Random choices that keep training and evaluation apart.

A `Draw` belongs to one side. Lists passed to `phrase` and `value` are split once, by a checksum of their
entries: about one entry in eight is only ever seen by the evaluation side, all the others only by the
training side. Pairs of operands are split the same way. Nothing here depends on the order of calls.
"""

import random
import zlib
from collections.abc import Sequence
from typing import TypeVar

from wording import loosen

T = TypeVar("T")


def checksum(text: str) -> int:
    return zlib.crc32(("quill:" + text).encode())


def held_out_pair(op: str, a: int, b: int) -> bool:
    """Whether a calculation belongs to the evaluation side (5 %; products 10 %); symmetric in a, b.

    The tables that every trace builds on (sums of digits, products up to 12 x 12) belong to training.
    """
    low, high = min(a, b), max(a, b)
    share, table = (10, 12) if op == "*" else (20, 9)
    return checksum(f"{op}:{low}:{high}") % share == 0 and high > table


class Draw:
    """A seeded source of choices for one side of the split."""

    def __init__(self, seed: int, held_out: bool = False) -> None:
        self.rng = random.Random(seed)
        self.held_out = held_out
        self._splits: dict[int, tuple[object, list[object], list[object]]] = {}

    def any(self, items: Sequence[T]) -> T:
        return items[int(self.rng.random() * len(items))]

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def int(self, low: int, high: int) -> int:
        """A whole number in [low, high]."""
        return low + int(self.rng.random() * (high - low + 1))

    def some(self, items: Sequence[T], count: int) -> list[T]:
        return self.rng.sample(list(items), count)

    def pattern(self, items: Sequence[str], drop: bool = True) -> str:
        """A sentence pattern of this side; in training often in a looser wording (drop: with words missing)."""
        text = self.phrase(items)
        if self.held_out:
            return text
        looser = loosen(self.rng, text, drop)
        return text if self.is_kept(items, looser) else looser

    def is_kept(self, items: Sequence[str], text: str) -> bool:
        """Whether a pattern made on the training side is one that `items` keeps for evaluation."""
        return plain(text) in {plain(kept) for kept in self.sides(items)[1]}

    def phrase(self, items: Sequence[T]) -> T:
        """One entry of this side's share of `items` (a module-level list: split once, by identity)."""
        return self.any(self.sides(items)[1 if self.held_out else 0])

    def sides(self, items: Sequence[T]) -> tuple[list[T], list[T]]:
        entry = self._splits.get(id(items))
        if entry is None:
            entry = (items, *split(items))
            self._splits[id(items)] = entry
        return entry[1], entry[2]  # type: ignore[return-value]

    value = phrase

    def pair(self, op: str, low: tuple[int, int], high: tuple[int, int]) -> tuple[int, int]:
        """Operands of this side: a in [low[0], high[0]], b in [low[1], high[1]]."""
        while True:
            a, b = self.int(low[0], high[0]), self.int(low[1], high[1])
            if held_out_pair(op, a, b) == self.held_out:
                return a, b


def plain(pattern: str) -> str:
    """A pattern without case and end marks."""
    return pattern.lower().strip(".?! ")


def split(items: Sequence[T]) -> tuple[list[T], list[T]]:
    """(training, evaluation) shares: an eighth for evaluation; lists under four entries are shared."""
    if len(items) < 4:
        return list(items), list(items)
    order = sorted(items, key=lambda item: checksum(repr(item)))
    cut = max(1, len(items) // 8)
    return order[cut:], order[:cut]

"""Draft costs: measures what drafts cost in steps of so many rows, as the price of a draft.

A draft pays if the step puts out more tokens per second with it than without it:

    price = (seconds with drafts - seconds without) / drafts * tokens put out / seconds with drafts

is the probability of being accepted from which on one more draft pays. It contains what a step
with drafts costs at all: the time in which the next one cannot be planned, other kernels. Steps
with prompts are not measured. Prices differ by the number of rows, and follow longer contexts.
"""

from __future__ import annotations

FIRST_PRICE = 0.2
"""Before anything is measured."""
LEAST_PRICE = 0.02
NOISE = 8
"""A step with fewer drafts than a part of its rows, 1 / NOISE, shows less about their price."""
PLAIN_EVERY = 128
"""Steps of a size with drafts after which one without is due, to measure that."""


class _Size:
    """Measurements of steps with about as many rows. since_plain: steps with drafts since one
    without."""

    __slots__ = ("plain_s", "price", "since_plain")

    def __init__(self) -> None:
        self.plain_s = 0.0  # 0: unknown
        self.price: float | None = None  # None: unknown
        self.since_plain = PLAIN_EVERY


class DraftCosts:
    """Prices by number of rows."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def price(self, rows: int) -> float:
        """Return the least probability of acceptance at which a draft pays; 1: none does."""
        price = self._size(rows).price
        return FIRST_PRICE if price is None else price

    def is_known(self, rows: int) -> bool:
        """Whether the price was measured: until then few drafts should be made."""
        return self._size(rows).price is not None

    def take_plain(self, rows: int) -> bool:
        """Whether steps without drafts are due, to measure them. Returns True once for a number of
        steps with drafts."""
        size = self._size(rows)
        due = size.since_plain >= PLAIN_EVERY
        if due:
            size.since_plain = 0
        return due

    def observe_plain(self, rows: int, seconds: float) -> None:
        """A step of one token a row was applied, so long after the one before."""
        size = self._size(rows)
        known = size.plain_s or seconds
        size.plain_s = known + (min(seconds, 2 * known) - known) / 4

    def observe_drafts(self, rows: int, drafts: int, accepted: int, seconds: float) -> None:
        """A step with drafts was applied, so long after the one before."""
        size = self._size(rows)
        size.since_plain += 1
        if not size.plain_s or seconds <= 0:
            return
        extra = max(seconds - size.plain_s, 0.0) / drafts
        price = min(max(extra * (rows + accepted) / seconds, LEAST_PRICE), 1.0)
        known = price if size.price is None else size.price
        weight = 1 / 2 if price < known else 1 / 4
        size.price = known + (price - known) * weight * min(NOISE * drafts / rows, 1.0)

    def _size(self, rows: int) -> _Size:
        bits = rows.bit_length()
        key = 8 * bits + (rows >> max(bits - 3, 0))
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = _Size()
        return size

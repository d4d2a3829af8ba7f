"""Draft costs: measures how long steps with drafts take, and derives from it which drafts pay.

    steps with so many rows take t(n) with n drafts, and t(0) without
    the n likeliest of the proposed drafts are worth it where (rows + their probabilities) / t(n)
    is greatest; the price is the least probability among them

t(n) has what a step with drafts costs at all: the time in which the next one cannot be planned,
other kernels. It is measured by number of rows and of drafts, follows longer contexts and a busy
machine, and is interpolated in between. Beyond what was measured it is assumed to grow as before,
at first little; what was measured long ago is tried again. Steps with prompts are not measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

FIRST_PRICE = 0.2
"""Before anything is measured: what one more draft costs, as a share of a row's time."""
LEAST_PRICE = 0.05
HIGHEST_PRICE = 2.0
"""Above each probability: no draft pays."""
LEAST_GAIN = 1.05
"""Tokens per second with drafts over those without that are worth it: times are not exact."""
FIRST_SHARE = 4
"""Of so many rows one draft is made, before their cost is known."""
FIRST_DRAFTS = 2
"""The least number of drafts in a first step."""
PLAIN_EVERY = 128
"""Steps of a size with drafts after which one without is due, to measure that."""
STALE = 256
"""Measured steps of a size after which the time of other steps of that size is not known."""
LEAST_SPREAD = 1.4
"""Numbers of drafts, one so many times the other, whose times show what one draft more costs."""
OUTDATED = 0.8
"""A step with drafts that took less than this share of one without was measured in other times."""

Point = tuple[float, float]
"""Drafts of a step, and its seconds."""


class _Seconds:
    """Decayed mean of a time, of the medians of the last three: one that is far off is no change.

    It is known from two on.
    """

    __slots__ = ("_last", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._last: list[float] = []

    @property
    def known(self) -> bool:
        return len(self._last) > 1

    def add(self, seconds: float) -> None:
        first = len(self._last) < 3
        last = self._last = [*self._last[-2:], seconds]
        median = sorted(last)[(len(last) - 1) // 2]
        self.value += (median - self.value) * (1 if first else 1 / 2)


class _Measured:
    """Steps with about as many drafts. at: when the last was measured, in steps of its size."""

    __slots__ = ("at", "drafts", "seconds")

    def __init__(self, drafts: int) -> None:
        self.drafts, self.seconds, self.at = float(drafts), _Seconds(), 0

    def add(self, drafts: int, seconds: float, at: int) -> None:
        if at - self.at > STALE:
            self.seconds = _Seconds()
        self.seconds.add(seconds)
        self.drafts += (drafts - self.drafts) / 4
        self.at = at


class _Size:
    """Measurements of steps with about as many rows. since_plain: steps with drafts since one
    without. measured: by number of drafts."""

    __slots__ = ("measured", "plain", "since_plain", "steps")

    def __init__(self) -> None:
        self.plain = _Seconds()
        self.since_plain = PLAIN_EVERY
        self.steps = 0
        self.measured: dict[int, _Measured] = {}

    def curve(self, slope: float) -> list[Point]:
        """Return t(n) at measured n and at one beyond. It never falls. slope: seconds of a draft,
        where steps with fewer than two numbers of them were measured."""
        plain = self.plain.value
        known = [
            (one.drafts, one.seconds.value)
            for one in self.measured.values()
            if one.seconds.known
            and self.steps - one.at <= STALE
            and one.seconds.value > OUTDATED * plain
        ]
        least = float("inf")
        points: list[Point] = []
        for drafts, seconds in sorted(known, reverse=True):
            least = min(least, seconds)
            points.append((drafts, max(least, plain)))
        points.append((0.0, plain))
        points.reverse()
        last, seconds = points[-1]
        if last:
            measured = _slope(points)
            slope = min(slope if measured is None else measured, (seconds - plain) / last)
        return [*points, (last + 1e6, seconds + 1e6 * slope)]


class DraftCosts:
    """Prices by number of rows."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._chances: list[float] = []  # of the drafts that could be in a step, the highest first
        self._chance_rows = 1  # rows of that step
        self._tried = 0  # most drafts of a measured step
        self._draft = _Seconds()  # time of a draft, in steps of any size

    def set_chances(self, rows: int, chances: Iterable[float], most: int | None = None) -> None:
        """Set the probabilities of all drafts that were proposed for a step. most: that it could
        have; None: any number."""
        self._chances, self._chance_rows = sorted(chances, reverse=True)[:most], rows

    def price(self, rows: int) -> float:
        """Return the least probability of acceptance at which a draft pays."""
        size = self._size(rows)
        plain = size.plain.value
        if not plain:
            return FIRST_PRICE
        slope = self._draft.value if self._draft.known else FIRST_PRICE * plain / rows
        curve, chances = size.curve(slope), self._chances
        scale = rows / self._chance_rows
        sums = [0.0, *accumulate(chances)]
        best, best_rate = 0, LEAST_GAIN * rows / plain
        for count in _counts(len(chances)):
            rate = (rows + sums[count] * scale) / _seconds(curve, count * scale)
            if rate > best_rate:
                best, best_rate = count, rate
        price = _marginal_price(curve, best * scale, best_rate if best else rows / plain)
        if best:
            price = min(price, chances[best - 1])
        if best < len(chances):
            price = max(price, chances[best] * 1.001)
        return min(max(price, LEAST_PRICE), HIGHEST_PRICE)

    def plain(self, rows: int) -> float:
        """Return the seconds of a step without drafts; 0: none was measured."""
        return self._size(rows).plain.value

    def is_known(self, rows: int) -> bool:
        """Whether any step with drafts was measured: until then few drafts should be made."""
        return any(one.seconds.known for one in self._size(rows).measured.values())

    def max_drafts(self, rows: int) -> int:
        """Return how many drafts a step may have: more than before only by and by."""
        return max(rows // FIRST_SHARE, FIRST_DRAFTS, 2 * self._tried)

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
        size.steps += 1
        size.plain.add(seconds)

    def observe_drafts(self, rows: int, drafts: int, seconds: float) -> None:
        """A step with drafts was applied, so long after the one before."""
        size = self._size(rows)
        size.since_plain += 1
        size.steps += 1
        if seconds <= 0:
            return
        measured = size.measured.get(key := _bucket(drafts))
        if measured is None:  # the first one prepares graphs and the like
            size.measured[key] = _Measured(drafts)
        else:
            measured.add(drafts, seconds, size.steps)
            self._tried = max(self._tried, drafts)
            slope = _slope(size.curve(0.0)[:-1])
            if slope is not None:
                self._draft.add(slope)

    def _size(self, rows: int) -> _Size:
        key = _bucket(rows)
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = _Size()
        return size


def _bucket(count: int) -> int:
    """Return the same for numbers that differ by less than a quarter."""
    bits = count.bit_length()
    return 8 * bits + (count >> max(bits - 3, 0))


def _slope(points: list[Point]) -> float | None:
    """Return the seconds of one draft more, of steps that have some: what a step with drafts costs
    at all is no part of it. None: their numbers of drafts are too close to tell."""
    (n0, t0), (n1, t1) = points[min(1, len(points) - 1)], points[-1]
    return (t1 - t0) / (n1 - n0) if n1 >= LEAST_SPREAD * n0 > 0 else None


def _counts(most: int) -> list[int]:
    """Return the numbers of drafts that are compared."""
    found, count = [], 1
    while count < most:
        found.append(count)
        count += max(count // 4, 1)
    return [*found, most] if most else []


def _seconds(curve: list[Point], drafts: float) -> float:
    (n0, t0), (n1, t1) = _segment(curve, drafts)
    return t0 + (t1 - t0) * (drafts - n0) / (n1 - n0)


def _segment(curve: list[Point], drafts: float) -> tuple[Point, Point]:
    """Return the points around a number of drafts."""
    i = min(max(bisect_left(curve, (drafts, 0.0)), 1), len(curve) - 1)
    return curve[i - 1], curve[i]


def _marginal_price(curve: list[Point], drafts: float, rate: float) -> float:
    """Return the probability at which one draft more pays, at a rate of tokens per second."""
    (n0, t0), (n1, t1) = _segment(curve, drafts + 1e-9)
    return (t1 - t0) / (n1 - n0) * rate

"""Draft costs: measures how long steps with drafts take, and derives from it which drafts pay.

    steps with so many rows take t(n) with n drafts, and t(0) without
    the n likeliest of the proposed drafts are worth it where (rows + their probabilities) / t(n)
    is greatest; the price is the least probability among them

t(n) has what a step with drafts costs at all: the time in which the next one cannot be planned,
other kernels. It is measured by number of rows and of drafts, follows longer contexts and a busy
machine, and is interpolated in between. Beyond what was measured it is assumed to grow as before,
at first little; what was measured long ago is tried again. Steps with prompts are not measured.
Rows end one by one, so steps often have a number of rows that was not measured yet: their times are
estimated from those of the nearest number, and a step without drafts is due after some of them.
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
FULL_DRAFTS = 2
"""Drafts for each row, whose time shows whether any number of them pays."""
PLAIN_EVERY = 128
"""Steps of a size with drafts after which one without is due, to measure that."""
SURE_GAIN, SURE_EVERY = 1.3, 4
"""Tokens per second with drafts over those without, from which it is due so many times later."""
FIRST_PLAIN = 16
"""The same where steps of other sizes were measured."""
NEAR = 2.0
"""Numbers of rows, one so many times the other at most, whose drafts have about one price."""
STALE = 256
"""Measured steps of a size after which the time of other steps of that size is not known."""
RECENT = 64
"""Measured steps of a size within which times are as good as the last."""
LEAST_SPREAD = 1.4
"""Numbers of drafts, one so many times the other, whose times show what one draft more costs."""
OUTDATED = 0.8
"""A step with drafts that took less than this share of one without was measured in other times."""

Point = tuple[float, float]
"""Drafts of a step, and its seconds."""


class _Seconds:
    """Decayed mean of a time, of the least of the last three: other work of the machine makes steps
    longer, and more drafts that seem dear once would not be tried again.

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
        self.value += (min(last) - self.value) * (1 if first else 1 / 2)


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

    __slots__ = ("measured", "plain", "rows", "since_plain", "steps")

    def __init__(self) -> None:
        self.rows = 1
        self.plain = _Seconds()
        self.since_plain = PLAIN_EVERY
        self.steps = 0
        self.measured: dict[int, _Measured] = {}

    @property
    def known(self) -> bool:
        """Whether steps without drafts and steps with some were measured."""
        return bool(self.plain.value) and self.has_drafts

    def distance(self, other: _Size) -> float:
        """Return how many times the rows of the other it has, or the other of its."""
        return max(self.rows / other.rows, other.rows / self.rows)

    @property
    def has_drafts(self) -> bool:
        return any(one.seconds.known for one in self.measured.values())

    def curve(self, slope: float) -> list[Point]:
        """Return t(n) at measured n and at one beyond. It never falls: where it would, a time that
        is RECENT stands, and of two as old that of more drafts. slope: seconds of a draft, where
        steps with fewer than two numbers of them were measured."""
        plain = self.plain.value
        known = [
            one
            for one in self.measured.values()
            if one.seconds.known
            and self.steps - one.at <= STALE
            and one.seconds.value > OUTDATED * plain
        ]
        points: list[Point] = [(0.0, plain)]
        for one in sorted(known, key=lambda one: ((self.steps - one.at) // RECENT, -one.drafts)):
            i = bisect_left(points, (one.drafts, 0.0))
            most = points[i][1] if i < len(points) else float("inf")
            points.insert(i, (one.drafts, max(min(one.seconds.value, most), points[i - 1][1])))
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
        self._gain = LEAST_GAIN  # of the drafts that pay, when the price was asked last
        self._draft = _Seconds()  # time of a draft, in steps of any size

    def set_chances(self, rows: int, chances: Iterable[float], most: int | None = None) -> None:
        """Set the probabilities of all drafts that were proposed for a step. most: that it could
        have; None: any number."""
        self._chances, self._chance_rows = sorted(chances, reverse=True)[:most], rows

    def price(self, rows: int) -> float:
        """Return the least probability of acceptance at which a draft pays."""
        rows = max(rows, 1)  # of a step whose sequences all begin in it
        size = self._nearest(rows)
        plain = self._plain_like(size, rows)
        if not plain:
            return FIRST_PRICE
        slope = self._draft.value if self._draft.known else FIRST_PRICE * plain / rows
        more = plain - size.plain.value
        curve = [(count, seconds + more) for count, seconds in size.curve(slope)]
        chances = self._chances
        scale = rows / self._chance_rows
        sums = [0.0, *accumulate(chances)]
        best, best_rate = 0, LEAST_GAIN * rows / plain
        for count in _counts(len(chances)):
            rate = (rows + sums[count] * scale) / _seconds(curve, count * scale)
            if rate > best_rate:
                best, best_rate = count, rate
        self._gain = best_rate * plain / rows
        price = _marginal_price(curve, best * scale, best_rate if best else rows / plain)
        if best:
            price = min(price, chances[best - 1])
        if best < len(chances):
            price = max(price, chances[best] * 1.001)
        return min(max(price, LEAST_PRICE), HIGHEST_PRICE)

    def plain(self, rows: int) -> float:
        """Return the seconds of a step without drafts; 0: none was measured."""
        size, near = self._size(rows), self._nearest(rows)
        if size.plain.value or size.distance(near) > NEAR:
            return size.plain.value
        return self._plain_like(near, rows)

    def is_known(self, rows: int) -> bool:
        """Whether any step with drafts was measured: until then few drafts should be made."""
        size, near = self._size(rows), self._nearest(rows)
        return size.has_drafts or (near.has_drafts and size.distance(near) <= NEAR)

    def is_small(self, rows: int) -> bool:
        """Whether only steps with few drafts were measured, so that more may pay where these do
        not."""
        size = self._size(rows)
        return all(count < FULL_DRAFTS * rows for count, _ in size.curve(0.0)[:-1])

    def max_drafts(self, rows: int) -> int:
        """Return how many drafts a step may have: more than before only by and by."""
        return max(rows // FIRST_SHARE, FIRST_DRAFTS, 2 * self._tried)

    def take_plain(self, rows: int) -> bool:
        """Whether steps without drafts are due, to measure them. Returns True once for a number of
        steps with drafts."""
        size = self._size(rows)
        every = SURE_EVERY * PLAIN_EVERY if size.known and self._gain > SURE_GAIN else PLAIN_EVERY
        due = size.since_plain >= every
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
            if any(one.known for one in self._sizes.values()):
                size.since_plain -= FIRST_PLAIN
        size.rows = max(rows, 1)
        return size

    def _plain_like(self, size: _Size, rows: int) -> float:
        """Return the seconds of a step of so many rows without drafts, from those of a size: a row
        takes as long as a draft, as far as that is known."""
        plain, factor = size.plain.value, rows / size.rows
        estimate = plain + (rows - size.rows) * self._draft.value
        return min(max(estimate, plain * min(factor, 1.0)), plain * max(factor, 1.0))

    def _nearest(self, rows: int) -> _Size:
        """Return the size itself if it is known, else the nearest that is; itself if none is."""
        size = self._size(rows)
        if size.known:
            return size
        known = [one for one in self._sizes.values() if one.known]
        return min(known, key=size.distance, default=size)


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

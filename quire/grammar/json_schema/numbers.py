"""Bounds and steps of numbers, narrowed to what llguidance reads exactly.

llguidance holds bounds as 64-bit integers or as floats and writes each as a regular expression. A
bound that it would round is moved inwards; a step that makes too many states is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from quire.grammar.json_schema import formats
from quire.grammar.json_schema.document import Subschema, refuse

GREATEST = 9_223_372_036_854_774_784
"""The greatest whole number that fits into 64 bits both as an integer and as a float."""
FARTHEST = 1e18
"""The greatest bound of numbers that need not be whole."""
DIGITS = 15
"""Of such a bound: llguidance reads numbers of more digits inexactly."""
LEAST = Decimal("1e-22")
"""Replaces the least number over 0: llguidance misreads bounds that exclude 0."""
EXACT = 2**53
"""Whole numbers up to here are different floats."""
MOST_STEP = 10_000
"""Of multipleOf without its decimal point: a lexer has a state for each remainder."""
MOST_ODD_STEP = 100
"""The same without factors 2 and 5: so many digits are tried to complete a number."""
MOST_LISTED = 1_000
"""Multiples of a fraction that are written one by one."""
MOST_BARRED = 64
"""Numbers that are left out one by one."""


class RangeEnd(NamedTuple):
    """One end of a range."""

    value: Fraction
    open: bool
    """The value itself is outside."""
    word: str
    """The keyword."""


class NumberRange(NamedTuple):
    """A range of numbers. None: no end."""

    low: RangeEnd | None
    high: RangeEnd | None


def exact(value: float) -> Fraction:
    """The number as it is written."""
    return Fraction(Decimal(repr(value))) if isinstance(value, float) else Fraction(value)


def read_exactly(value: float) -> bool:
    """The number is a quotient or product of two that a float holds: a simple reader gets it."""
    digits = Decimal(repr(value)).normalize().as_tuple()
    mantissa = int("".join(map(str, digits.digits)))
    return mantissa <= EXACT and -22 <= int(digits.exponent) <= 22


def range_of(part: Subschema) -> NumberRange:
    """The range that the bounds and the format of a subschema define."""
    least, most = formats.INTEGERS.get(part.get("format"), (None, None))
    lows = [RangeEnd(exact(least), False, "format")] if least is not None else []
    highs = [RangeEnd(exact(most), False, "format")] if most is not None else []
    for found, plain, strict in (
        (lows, "minimum", "exclusiveMinimum"),
        (highs, "maximum", "exclusiveMaximum"),
    ):
        beyond = part.get(strict)
        if part.get(plain) is not None:  # draft 4 has true for what excludes this bound
            found.append(RangeEnd(exact(part.value[plain]), beyond is True, plain))
        if beyond is not None and not isinstance(beyond, bool):
            found.append(RangeEnd(exact(beyond), True, strict))
    low = max(lows, key=lambda one: (one.value, one.open), default=None)
    return NumberRange(low, min(highs, key=lambda one: (one.value, not one.open), default=None))


def written(part: Subschema, whole: bool) -> dict[str, Any]:
    """The keywords of numbers, for llguidance. whole: every number of the schema is an integer."""
    low, high = range_of(part)
    made: dict[str, Any] = {}
    bound, far = (_whole, GREATEST) if whole else (_fraction, FARTHEST)
    if low is not None:
        made["minimum"] = max(bound(low, True), -far)
    if high is not None:
        made["maximum"] = min(bound(high, False), far)
    for end, value in ((low, made.get("minimum", 0)), (high, -made.get("maximum", 0))):
        if end is not None and value > far - (not whole):
            refuse(part.at(end.word), f"a bound of numbers is at most {far:.0f} here")
    if whole and made.get("minimum", 0) >= 10**18:
        made.setdefault("maximum", GREATEST)
    if whole and made.get("maximum", 0) <= -(10**18):
        made.setdefault("minimum", -GREATEST)
    if "multipleOf" in part.value and not (whole and part.value["multipleOf"] == 1):
        made["multipleOf"] = step(part)
    return made


def is_whole(value: float) -> bool:
    """The number is an integer."""
    return exact(value).denominator == 1


def multiples(part: Subschema) -> list[float] | None:
    """The numbers of a subschema, where they are few multiples of a fraction; else None."""
    low, high = range_of(part)
    step = exact(part.get("multipleOf", 1))
    if low is None or high is None or step.denominator == 1:
        return None
    first, last = math.ceil(low.value / step), math.floor(high.value / step)
    if last - first > MOST_LISTED:
        return None
    first += low.open and first * step == low.value
    last -= high.open and last * step == high.value
    return [float(at * step) for at in range(first, last + 1)]


def not_of(values: list[float]) -> Iterator[dict[str, Any]]:
    """Numbers but these, if there are any."""
    if values and len(values) <= MOST_BARRED:
        ends = [None, *(RangeEnd(one, True, "enum") for one in sorted({*map(exact, values)})), None]
        for low, high in itertools.pairwise(ends):
            made: dict[str, Any] = {"type": "number"}
            if low is not None:
                made["minimum"] = _fraction(low, True)
            if high is not None:
                made["maximum"] = _fraction(high, False)
            low_end, high_end = made.get("minimum", -FARTHEST), made.get("maximum", FARTHEST)
            if -FARTHEST <= low_end <= high_end <= FARTHEST:
                yield made


def _whole(bound: RangeEnd, is_low: bool) -> int:
    """The bound of integers: the outermost that a float holds exactly."""
    sign = 1 if is_low else -1
    value = math.ceil(sign * bound.value)
    value += bound.open and value == sign * bound.value
    if abs(value) <= GREATEST and int(float(value)) < value:
        value = int(math.nextafter(float(value), math.inf))
    elif abs(value) <= GREATEST:
        value = int(float(value))
    return sign * value


def _fraction(bound: RangeEnd, is_low: bool) -> float:
    """The bound as a number of few digits: itself, or the next one within the range."""
    rounding = ROUND_CEILING if is_low else ROUND_FLOOR
    context = Context(prec=DIGITS, rounding=rounding)
    value = context.divide(Decimal(bound.value.numerator), Decimal(bound.value.denominator))
    if bound.open and Fraction(value) == bound.value:
        value = value.next_plus(context) if is_low else value.next_minus(context)
    if value and value.adjusted() < context.prec - 22:
        value = value.quantize(LEAST, rounding)
    if abs(value) < LEAST:
        beyond_zero = bound.value > 0 if is_low else bound.value < 0
        is_beyond = beyond_zero or (bound.open and bound.value == 0)
        value = LEAST.copy_sign(Decimal(1 if is_low else -1)) if is_beyond else Decimal(0)
    return float(value)


def step(part: Subschema) -> float | int | None:
    """The multipleOf of a subschema, if it is exact and makes few states."""
    value = part.value["multipleOf"]
    exactly, places = exact(value), 0
    while (exactly * 10**places).denominator != 1 and places < 30:
        places += 1
    odd = int(exactly * 10**places)
    if odd > MOST_STEP or (exactly * 10**places).denominator != 1:
        return None
    while odd % 2 == 0 or odd % 5 == 0:
        odd //= 2 if odd % 2 == 0 else 5
    return None if odd > MOST_ODD_STEP else int(exactly) if exactly.denominator == 1 else value

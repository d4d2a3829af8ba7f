"""Shapes of null, booleans, numbers and strings, from the facts of a branch."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import ceil, floor, gcd, lcm

from quire.grammar.automata import dfa, regex_ast
from quire.grammar.automata.regex_ast import RegexExpr, RegexRepeat
from quire.grammar.schemas.branch import NUMBERS, Branch
from quire.grammar.schemas.document import Value, refuse
from quire.grammar.schemas.evaluate import exact, kind, token
from quire.grammar.schemas.shapes import Bound, Numbers, Shape, Strings, Values

MOST_BARRED = 64
"""Numbers that are ruled out one by one."""
MOST_BARRED_CHARS = 256
"""Of a text that is ruled out."""
MOST_COUNTED = 500
"""A minLength or maxLength that is held against patterns here; over it, only by the backend."""


def words(branch: Branch) -> Iterator[Shape]:
    """null, false and true, those that are left."""
    barred = set(map(token, branch.barred))
    for name, values in (("null", (None,)), ("boolean", (False, True))):
        left = tuple(one for one in values if token(one) not in barred)
        if name in branch.kinds and left:
            yield Values(left)


# -- numbers ------------------------------------------------------------------------------------


def numbers(branch: Branch) -> Iterator[Shape]:
    """Ranges, cut where a number is ruled out. Fractions alone cannot be told from integers."""
    if "integer" not in branch.kinds:
        if branch.kinds & NUMBERS:
            branch.lossy = True
            branch.die(_place(branch), "numbers that are no integers cannot be told by a grammar")
        return
    step = _common_multiple([one for one, _ in branch.steps])
    whole = "fraction" not in branch.kinds
    if whole:
        step = step and _common_multiple([step, Fraction(1)])
    whole = whole or (step is not None and step.denominator == 1)
    out = sorted({exact(one) for one in branch.barred if _is_number(one)})
    if len(out) > MOST_BARRED:
        refuse(_place(branch), f"over {MOST_BARRED} numbers are ruled out one by one")
    ends: list[Bound | None] = [branch.low]
    for value in out:
        ends += [Bound(value, True, ""), Bound(value, True, "")]
    ends.append(branch.high)
    for first, last in zip(ends[::2], ends[1::2], strict=True):
        low, high = _within(branch, first, last)
        place = branch.steps[-1][1] if branch.steps else _place(branch)
        one = Numbers(whole, low, high, step, place)
        if _has_one(one):
            yield one
        else:
            branch.die(_bound_place(branch), "no number is within the bounds")


def _is_number(value: Value) -> bool:
    return kind(value) in ("integer", "number")


def _place(branch: Branch) -> str:
    return branch.places.get("number", next(iter(branch.done))[0].place)


def _bound_place(branch: Branch) -> str:
    for bound in (branch.low, branch.high):
        if bound is not None:
            return bound.place
    return branch.steps[0][1] if branch.steps else _place(branch)


def _within(
    branch: Branch, low: Bound | None, high: Bound | None
) -> tuple[Bound | None, Bound | None]:
    """The piece of the whole range."""
    if low is not None and branch.low is not None and branch.low.value > low.value:
        low = branch.low
    if high is not None and branch.high is not None and branch.high.value < high.value:
        high = branch.high
    return low, high


def _common_multiple(steps: list[Fraction]) -> Fraction | None:
    if not steps:
        return None
    found = steps[0]
    for one in steps[1:]:
        found = Fraction(
            lcm(found.numerator, one.numerator), gcd(found.denominator, one.denominator)
        )
    return found


def _has_one(numbers: Numbers) -> bool:
    low, high, step = numbers.low, numbers.high, numbers.step or Fraction(int(numbers.whole))
    if low is None or high is None:
        return True
    if not step:
        return low.value < high.value or (low.value == high.value and not (low.open or high.open))
    first = ceil(low.value / step)
    last = floor(high.value / step)
    first += low.open and first * step == low.value
    last -= high.open and last * step == high.value
    return first <= last


# -- strings ------------------------------------------------------------------------------------


def strings(branch: Branch) -> Iterator[Shape]:
    """One Shape, or none if no text is left."""
    if "string" not in branch.kinds:
        return
    place = branch.places.get("pattern", branch.places.get("lengths", _place(branch)))
    barred = [one for one in branch.barred if isinstance(one, str)]
    if any(len(one) > MOST_BARRED_CHARS for one in barred):
        refuse(place, f"a text of over {MOST_BARRED_CHARS} characters is ruled out")
    patterns = list(dict.fromkeys(branch.musts))
    if branch.mustnts or (barred and patterns):
        patterns = [
            _made_of(patterns, [*branch.mustnts, *map(regex_ast.literal_regex, barred)], place)
        ]
    elif barred:
        patterns = [except_literals(barred)]
    shape = Strings(*branch.lengths, tuple(patterns), place)
    if has_text(shape):
        yield shape
    else:
        branch.lossy = branch.lossy or branch.narrowed
        branch.die(place, "no text is matched by all of pattern, format and length")


def _made_of(all_of: list[RegexExpr], none_of: list[RegexExpr], place: str) -> RegexExpr:
    try:
        return dfa.difference(all_of or [regex_ast.ANY_TEXT], none_of)
    except dfa.DfaTooComplex:
        refuse(
            place,
            "what is left of the patterns that must hold and must not hold is too much to write "
            f"down (over {dfa.MAX_STATES} states or {dfa.MAX_PARTS} parts)",
            "say with one pattern what is allowed",
        )


def except_literals(values: list[str]) -> RegexExpr:
    """Every text but these."""
    tree: dict[str, dict[str, object]] = {}
    ends: set[int] = set()
    for value in values:
        at = tree
        for char in value:
            at = at.setdefault(char, {})  # type: ignore[assignment]
        ends.add(id(at))
    return _rest(tree, ends)


def _rest(tree: dict[str, dict[str, object]], ends: set[int]) -> RegexExpr:
    points = regex_ast.union_ranges(tuple((ord(char), ord(char)) for char in tree))
    ways: list[RegexExpr] = [
        regex_ast.RegexSequence(
            (regex_ast.CharClass(regex_ast.complement_ranges(points)), regex_ast.ANY_TEXT)
        )
    ]
    for char, inner in tree.items():
        more = _rest(inner, ends)  # type: ignore[arg-type]
        ways.append(regex_ast.RegexSequence((regex_ast.CharClass(((ord(char), ord(char)),)), more)))
    node = ways[0] if len(ways) == 1 else regex_ast.RegexAlternation(tuple(ways))
    return node if id(tree) in ends else RegexRepeat(node, 0, 1)


def has_text(shape: Strings) -> bool:
    """Some text is of the Shape, as far as can be seen here."""
    most = shape.most
    if regex_ast.NO_MATCH in shape.patterns or (most is not None and shape.least > most):
        return False
    if len(shape.patterns) + _counts(shape) < 2:
        return True
    ends = [regex_ast.text_lengths(node) or (0, 0) for node in shape.patterns]
    if any(most is not None and first > most for first, _ in ends):
        return False
    if any(last is not None and last < shape.least for _, last in ends):
        return False
    if not ends or (len(ends) == 1 and _fits(shape, *ends)):
        return True
    try:
        return dfa.intersects(*shape.patterns, *_counter(shape))
    except dfa.DfaTooComplex:
        return True


def _fits(shape: Strings, ends: tuple[int, int | None]) -> bool:
    """The shortest text of its only pattern, or the longest, has a length that is allowed."""
    top = float("inf") if shape.most is None else shape.most
    return any(end is not None and shape.least <= end <= top for end in ends)


def _counts(shape: Strings) -> bool:
    """Its lengths say more than its pattern."""
    return shape.least > 0 or shape.most is not None


def _counter(shape: Strings) -> list[RegexExpr]:
    if not _counts(shape) or max(shape.least, shape.most or 0) > MOST_COUNTED:
        return []
    return [RegexRepeat(regex_ast.CharClass(regex_ast.ALL_CHARS), shape.least, shape.most)]

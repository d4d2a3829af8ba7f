"""Writes a Graph as a JSON schema of the few keywords that backends honour exactly.

    true  type  enum  minimum maximum multipleOf  minLength maxLength pattern
    prefixItems items minItems maxItems  properties required patternProperties additionalProperties
    minProperties maxProperties  anyOf  $ref to $defs

One type in each; anyOf and $ref stand alone; allOf only as a list of patterns. Patterns of names do
not meet, nor match a listed name. Of numbers, what a backend holds in 64 bits is minded here.
"""

from __future__ import annotations

import json
import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import Any

from quire.grammar.automata import regex_ast
from quire.grammar.schemas.document import Value, refuse
from quire.grammar.schemas.evaluate import kind
from quire.grammar.schemas.graph import Graph, within
from quire.grammar.schemas.shapes import (
    FREE,
    AnyValue,
    Array,
    Bound,
    Free,
    Key,
    Numbers,
    Object,
    Shape,
    Strings,
    Values,
    is_never,
)

GREATEST = 9_223_372_036_854_774_784
"""The greatest whole number that fits into 64 bits both as an integer and as a float."""
FARTHEST = 1e18
"""The greatest bound of numbers that need not be whole."""
DIGITS = 15
"""Of such a bound: backends read numbers of more digits inexactly."""
LEAST = Decimal("1e-22")
"""What stands for the least number over 0: backends do not get bounds right that exclude 0, nor
read smaller numbers exactly."""
EXACT = 2**53
"""Whole numbers up to here are told apart as floats."""
MOST_LISTED = 1_000
"""Multiples that are written one by one."""
MOST_STEP = 2**32 - 1
"""Of multipleOf without its decimal point."""
MOST_TEXT = 2**20
"""Bytes of a schema once it is rewritten."""

Written = dict[str, Any] | bool


def text(graph: Graph) -> str:
    """The schema, as JSON text."""
    made = json.dumps(Writer(graph).whole(), ensure_ascii=False, separators=(",", ":"))
    if len(made.encode()) > MOST_TEXT:
        refuse("", f"it has over {MOST_TEXT} bytes once its cases are told apart")
    return made


class Writer:
    """Keys and Shapes as JSON."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names = _names(graph)
        self.definitions: dict[str, Written] = {}

    def whole(self) -> Written:
        for key, name in self.names.items():
            self.definitions[name] = self.cases(key)
        root = self.of(self.graph.root)
        if not self.definitions:
            return root
        return {**({} if isinstance(root, bool) else root), "$defs": self.definitions}

    def of(self, key: Key) -> Written:
        """A Key where it is used: by name if it has one."""
        if is_never(key):
            return False
        if key in self.names:
            return {"$ref": f"#/$defs/{self.names[key]}"}
        return self.cases(key)

    def cases(self, key: Key) -> Written:
        found: dict[str, Written] = {}
        for shape in self.graph.cases[key]:
            made = self.shape(shape)
            if made is True:
                return True
            found.setdefault(json.dumps(made, sort_keys=True), made)
        ways = list(found.values())
        return ways[0] if len(ways) == 1 else {"anyOf": ways}

    def shape(self, shape: Shape) -> Written:
        if isinstance(shape, AnyValue):
            return True
        if isinstance(shape, Values):
            return _values(shape)
        if isinstance(shape, Numbers):
            return _numbers(shape)
        if isinstance(shape, Strings):
            return _strings(shape)
        return self.array(shape) if isinstance(shape, Array) else self.object(shape)

    def array(self, shape: Array) -> Written:
        made: dict[str, Any] = {"type": "array"}
        if shape.first:
            made["prefixItems"] = [self.of(key) for key in shape.first]
        if is_never(shape.rest):
            made["items"] = False
        elif shape.rest != FREE:
            made["items"] = self.of(shape.rest)
        if shape.least:
            made["minItems"] = shape.least
        if shape.most is not None and not (is_never(shape.rest) and shape.most == len(shape.first)):
            made["maxItems"] = shape.most
        return made

    def object(self, shape: Object) -> Written:
        made: dict[str, Any] = {"type": "object"}
        named = {name: self.of(key) for name, key in shape.named.items() if not is_never(key)}
        if named:
            made["properties"] = named
        required = [name for name in shape.named if name in shape.required]
        if required:
            made["required"] = required
        self.free(shape.free, made)
        if shape.least > len(required):
            made["minProperties"] = shape.least
        if shape.most is not None and (shape.free or shape.most < len(named)):
            made["maxProperties"] = shape.most
        return made

    def free(self, free: list[Free], made: dict[str, Any]) -> None:
        patterns: dict[str, Written] = {}
        for one in free:
            if one.names is None:
                if one.key != FREE:
                    made["additionalProperties"] = self.of(one.key)
                return
            patterns[regex_ast.to_anchored_pattern(one.names)] = self.of(one.key)
        if patterns:
            made["patternProperties"] = patterns
        made["additionalProperties"] = False


def _names(graph: Graph) -> dict[Key, str]:
    """Names of Keys that are written once and referred to: used twice, or within themselves."""
    uses: dict[Key, int] = {}
    todo, seen = [graph.root], {graph.root}
    order = []
    while todo:
        key = todo.pop()
        order.append(key)
        for shape in graph.cases[key]:
            for inner in within(shape):
                if is_never(inner):
                    continue
                uses[inner] = uses.get(inner, 0) + 1
                if inner not in seen:
                    seen.add(inner)
                    todo.append(inner)
    loops = _looping(graph, order)
    chosen = [
        key for key in order if key in loops or (uses.get(key, 0) > 1 and _has_inside(graph, key))
    ]
    return {key: f"d{number}" for number, key in enumerate(chosen)}


def _has_inside(graph: Graph, key: Key) -> bool:
    return any(isinstance(shape, Array | Object) for shape in graph.cases[key])


def _looping(graph: Graph, keys: list[Key]) -> set[Key]:
    """Keys at which a walk comes back to one that it is within of."""
    found: set[Key] = set()
    done: set[Key] = set()
    for start in keys:
        if start in done:
            continue
        path = {start}
        stack = [(start, iter(_inner(graph, start)))]
        while stack:
            key, following = stack[-1]
            one = next(following, None)
            if one is None:
                stack.pop()
                path.discard(key)
                done.add(key)
            elif one in path:
                found.add(one)
            elif one not in done:
                path.add(one)
                stack.append((one, iter(_inner(graph, one))))
    return found


def _inner(graph: Graph, key: Key) -> list[Key]:
    return [one for shape in graph.cases[key] for one in within(shape) if not is_never(one)]


# -- values, numbers, strings ----------------------------------------


def _values(shape: Values) -> Written:
    if shape.values == (None,):
        return {"type": "null"}
    if len(shape.values) == 2 and all(isinstance(one, bool) for one in shape.values):
        return {"type": "boolean"}
    for value in shape.values:
        _check_value(value, shape.place)
    return {"enum": list(shape.values)}


def _check_value(value: Value, place: str) -> None:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _check_value(one, place)
    elif kind(value) in ("integer", "number") and not _read_exactly(value):
        refuse(
            place,
            f"the number {value!r} has more digits than backends read exactly",
            "use fewer, or say it as text",
        )


def _read_exactly(value: float) -> bool:
    """A quotient or product of two numbers that a float holds: what a simple reader computes."""
    digits = Decimal(repr(value)).normalize().as_tuple()
    mantissa = int("".join(map(str, digits.digits)))
    return mantissa <= EXACT and -22 <= int(digits.exponent) <= 22


def _numbers(shape: Numbers) -> Written:
    step = shape.step
    listed = _multiples(shape)
    if listed is not None:
        return _values(Values(tuple(listed), shape.place))
    whole = shape.whole
    made: dict[str, Any] = {"type": "integer" if whole else "number"}
    if whole:
        _whole_bounds(shape, made)
    else:
        _bounds(shape, made)
    if step is not None and step != 1:
        made["multipleOf"] = _step(step, shape)
    return made


def _multiples(shape: Numbers) -> list[float] | None:
    """The numbers, where they are few multiples of a fraction: backends leave some out there."""
    low, high, step = shape.low, shape.high, shape.step
    if shape.whole or step is None or low is None or high is None:
        return None
    first, last = math.ceil(low.value / step), math.floor(high.value / step)
    if last - first > MOST_LISTED:
        return None
    first += low.open and first * step == low.value
    last -= high.open and last * step == high.value
    return [float(at * step) for at in range(first, last + 1)]


def _whole_bounds(shape: Numbers, made: dict[str, Any]) -> None:
    if shape.low is not None:
        low = math.floor(shape.low.value) + 1 if shape.low.open else math.ceil(shape.low.value)
        if low > GREATEST:
            refuse(shape.low.place, f"integers over {GREATEST} cannot be bounded from below")
        if low >= -GREATEST:
            made["minimum"] = _up(low)
        else:
            made["minimum"] = -GREATEST
    if shape.high is not None:
        high = math.ceil(shape.high.value) - 1 if shape.high.open else math.floor(shape.high.value)
        if high < -GREATEST:
            refuse(shape.high.place, f"integers under -{GREATEST} cannot be bounded from above")
        made["maximum"] = min(-_up(-high), GREATEST)
    if made.get("minimum", 0) >= 10**18:
        made.setdefault("maximum", GREATEST)
    if made.get("maximum", 0) <= -(10**18):
        made.setdefault("minimum", -GREATEST)


def _up(value: int) -> int:
    """The least whole number from here up that a float holds exactly."""
    near = int(float(value))
    return near if near >= value else int(math.nextafter(float(value), math.inf))


def _bounds(shape: Numbers, made: dict[str, Any]) -> None:
    low, high = shape.low, shape.high
    if low is not None:
        made["minimum"] = max(_inside(low, ROUND_CEILING), -FARTHEST)
    if high is not None:
        made["maximum"] = min(_inside(high, ROUND_FLOOR), FARTHEST)
    if made.get("minimum", -FARTHEST) > min(made.get("maximum", FARTHEST), FARTHEST - 1):
        bound = low or high
        place = "" if bound is None else bound.place
        refuse(place, f"bounds of numbers are held to {DIGITS} digits, up to {FARTHEST}")


def _inside(bound: Bound, rounding: str) -> float:
    """The bound as a number of few digits: itself, or the next one within the range."""
    context = Context(prec=DIGITS, rounding=rounding)
    value = context.divide(Decimal(bound.value.numerator), Decimal(bound.value.denominator))
    up = rounding == ROUND_CEILING
    if bound.open and Fraction(value) == bound.value:
        value = value.next_plus(context) if up else value.next_minus(context)
    if value and value.adjusted() < context.prec - 22:
        value = value.quantize(LEAST, rounding)
    if abs(value) < LEAST:
        value = LEAST.copy_sign(Decimal(1 if up else -1)) if _beyond_zero(bound, up) else Decimal(0)
    return float(value)


def _beyond_zero(bound: Bound, up: bool) -> bool:
    """Zero is not within the range."""
    return (bound.open and bound.value == 0) or (bound.value > 0 if up else bound.value < 0)


def _step(step: Fraction, shape: Numbers) -> float | int:
    """The step, if a backend that counts up decimal places gets it right."""
    value = float(step)
    places, scaled = 0, value
    while scaled != int(scaled) and places < 30:
        scaled *= 10
        places += 1
    if scaled > MOST_STEP or Fraction(int(scaled), 10**places) != step:
        refuse(
            shape.place,
            f"multiples of {value!r} cannot be told: over {MOST_STEP} without the decimal point, "
            "or not exact",
            "use fewer digits, or leave multipleOf out",
        )
    return int(step) if step.denominator == 1 else value


def _strings(shape: Strings) -> Written:
    made: dict[str, Any] = {"type": "string"}
    patterns = [regex_ast.to_anchored_pattern(node) for node in shape.patterns]
    if len(patterns) == 1:
        made["pattern"] = patterns[0]
    elif patterns:
        made["allOf"] = [{"pattern": one} for one in patterns]
    bound = shape.least or shape.most is not None
    ends = [regex_ast.text_lengths(node) for node in shape.patterns] if bound else []
    if shape.least and not any(end and end[0] >= shape.least for end in ends):
        made["minLength"] = shape.least
    if shape.most is not None and not any(
        end and end[1] is not None and end[1] <= shape.most for end in ends
    ):
        made["maxLength"] = shape.most
    return made

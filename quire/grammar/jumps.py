"""How much farther off the end of a text can come by one token, found from its form.

    bounds(form, spelling) -> Bounds    None: a recursive grammar of the user's own, or one in Lark

Upper bounds in tokens, none of them a guess at what a text costs now: that is found on the matcher
itself (quire.grammar.ways). They decide how early a budget must be looked after.

    jump    a value, a property, another item, a tag is begun: the cheapest that it then needs
    slack   a character chose between alternatives, or stands within a pattern, a name, an enum
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quire.errors import RequestError
from quire.grammar import ebnf, forms, regex
from quire.grammar.forms import Form
from quire.grammar.shortest import Shortest
from quire.grammar.spelling import Spelling

NUMBER = 4
"""Tokens that a number is from its end, at most, where no bound says more: -1.5e+ is one."""
LONGEST_CHAR = 6
"""Bytes of one character: \\u0000."""
MOST_LITERALS = 256
MOST_SAMPLE = 200
"""Characters of a text made from a pattern."""
ROUNDS = 40


@dataclass(frozen=True, slots=True)
class Bounds:
    """See above. Plain."""

    jump: int
    slack: int
    within: int
    """The same within a string, of its pattern alone."""
    mark: int
    """Tokens of a mark's rest, at most."""
    plain: bool
    """JSON alone: what lies between openers of values cannot begin anything."""
    marks: tuple[str, ...] = ()
    """What ends free text, and what begins a tag in it."""
    literals: tuple[str, ...] = ()
    """Names and values of strings, with the quote that ends them: shortest first."""
    names: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    """Short members of objects, as `"a":0`."""
    values: tuple[str, ...] = ()
    """Short values."""
    text: str | None = None
    """A short text of the form, it seems."""


@dataclass(slots=True)
class _Cost:
    """Of one form: tokens of a cheapest text, and by how much a token within it can err."""

    low: int
    jump: int = 1
    slack: int = 1


def bounds(form: Form, spelling: Spelling) -> Bounds | None:
    """What is known of the form. None: nothing."""
    reader = _Forms(spelling)
    try:
        cost = reader.cost(form)
        short = Shortest()
        text = short.of(form)
    except (_UnknownError, RequestError, RecursionError):
        return None
    reader.marks.discard("")
    return Bounds(
        jump=cost.jump,
        slack=cost.slack,
        within=reader.within,
        mark=max((reader.farthest(one.encode()) for one in reader.marks), default=0),
        plain=isinstance(form, forms.Json),
        marks=tuple(sorted(reader.marks, key=lambda one: (len(one), one))),
        literals=tuple(sorted(reader.literals, key=lambda one: (len(one), one))[:MOST_LITERALS]),
        names=tuple(sorted(reader.names)),
        members=tuple(short.members)[:MOST_LITERALS],
        values=tuple(sorted(short.values, key=len))[:MOST_LITERALS],
        text=text,
    )


class _UnknownError(Exception):
    """A form that nothing is known of."""


class _Forms:
    """Walks a form once; collects what closing has to know by name."""

    def __init__(self, spelling: Spelling) -> None:
        self.spelling = spelling
        self.within = 1
        self.marks: set[str] = set()
        self.literals: set[str] = set()
        self.names: set[str] = set()

    def cost(self, form: Form) -> _Cost:
        """Of any form."""
        if isinstance(form, forms.Json):
            return _Json(self, json.loads(form.schema)).cost()
        if isinstance(form, forms.Regex):
            return self._own(regex.whole(regex.parse(form.pattern), search=False))
        if isinstance(form, forms.Grammar):
            return self._own(ebnf.as_regex(form.text))
        if isinstance(form, forms.Choice):
            return self._either([self._text(one) for one in form.options])
        if isinstance(form, forms.Text):
            return self._text(form.text)
        if isinstance(form, forms.Until):
            self.marks.add(form.mark)
            return self._text(form.mark)
        return self._composed(form)

    def _own(self, node: regex.Node | None) -> _Cost:
        """Of a pattern that is all of the text, or of a caller's grammar that says no more."""
        if node is None:
            raise _UnknownError
        self.name_pattern(node, in_json=False)
        return _Cost(_lowest(node), _farthest(node), _farthest(node))

    def _composed(self, form: Form) -> _Cost:
        if isinstance(form, forms.Seq):
            return _after(self.cost(one) for one in form.parts)
        if isinstance(form, forms.Either):
            return self._either([self.cost(one) for one in form.parts])
        if isinstance(form, forms.Repeat):
            return self._repeat(form)
        if isinstance(form, forms.Tag):
            self.marks.add(form.end)
            begin, end = self._text(form.begin), self._text(form.end)
            return _after((begin, self.cost(form.content), end))
        if isinstance(form, forms.Tags):
            self.marks.update(form.triggers)
            either = self._either([self.cost(one) for one in form.tags])
            return _Cost(either.low * form.least, either.jump + either.low, either.slack)
        raise _UnknownError

    def _text(self, text: str) -> _Cost:
        """Farthest from its end a text is at its worst place, as tokens cut it."""
        return _Cost(*(self.farthest(text.encode()),) * 2)

    def farthest(self, text: bytes) -> int:
        """Tokens that the rest of a text takes from the worst place in it."""
        tails = self.spelling.tails(text)
        return max((len(text) if one is None else one[0] for one in tails), default=0)

    def name_pattern(self, node: regex.Node, in_json: bool = True) -> None:
        """Keep a short match, and what it ends with, as something to try."""
        self.within = max(self.within, _farthest(node) + 1)
        sample = _sample(node)
        for text in {sample, *_runs(node)}:
            if len(text) <= MOST_SAMPLE:
                self.literals.add(json.dumps(text, ensure_ascii=False)[1:] if in_json else text)

    def _either(self, costs: list[_Cost]) -> _Cost:
        """A token may choose any of them: then its cheapest text is what there is."""
        low = min((one.low for one in costs), default=0)
        worst = max((one.low for one in costs), default=0)
        jump = max((one.jump for one in costs), default=1)
        return _Cost(low, max(jump, worst), max((one.slack for one in costs), default=1) + worst)

    def _repeat(self, form: forms.Repeat) -> _Cost:
        part, between = self.cost(form.part), self.farthest(form.between.encode())
        again = part.low + between
        return _Cost(form.least * again, max(part.jump, again), part.slack + again)


def _after(costs: Iterable[_Cost]) -> _Cost:
    known = list(costs)
    return _Cost(
        sum(one.low for one in known),
        max((one.jump for one in known), default=1),
        max((one.slack for one in known), default=1),
    )


class _Json:
    """Costs of the values of one schema, as quire.grammar.schema rewrites it, and of others."""

    def __init__(self, owner: _Forms, root: Any) -> None:
        self.owner = owner
        self.root = root
        self.known: dict[int, tuple[int, int]] = {}
        self.leaf = NUMBER
        self.name = 3
        self.choice = False
        self.dearest = 1
        self.changed = True
        self.looked: set[int] = set()
        """In this round."""

    def cost(self) -> _Cost:
        """Of the root; jump is of the worst value anywhere in it."""
        for _ in range(ROUNDS):
            if not self.changed:
                break
            self.changed = False
            self.looked = set()
            low, _ = self._value(self.root)
        slack = self.leaf + (self.dearest if self.choice else 0)
        return _Cost(low, self.dearest + self.name + 2, slack)

    def _begun(self, schema: Any) -> tuple[int, int]:
        """Of a value that may be begun though nothing asks for it: the way to the end has no part
        of it before."""
        found = self._value(schema)
        self.dearest = max(self.dearest, found[1])
        return found

    def _value(self, schema: Any) -> tuple[int, int]:
        """(cheapest, dearest of the cheapest that a choice leaves) of a value of the schema."""
        if not isinstance(schema, dict):
            return 1, 1
        key = id(schema)
        if key in self.looked:
            return self.known.get(key, (10**6, 1))
        self.looked.add(key)
        found = self._found(schema)
        if self.known.get(key) != found:
            self.known[key] = found
            self.changed = True
        return found

    def _found(self, schema: dict[str, Any]) -> tuple[int, int]:
        for word in ("enum", "const"):
            if word in schema:
                return self._enum(schema[word] if word == "enum" else [schema[word]])
        parts = [self._kinds(schema)]
        if "$ref" in schema:
            parts.append(self._value(self._target(schema["$ref"])))
        parts += [self._value(one) for one in schema.get("allOf", ())]
        for word in ("anyOf", "oneOf"):
            if word in schema:
                options = [self._begun(one) for one in schema[word]]
                self.choice |= len(options) > 1
                lows, highs = zip(*options)
                parts.append((min(lows), max(highs)))
        return min(sum(one for one, _ in parts), 10**6), min(sum(one for _, one in parts), 10**4)

    def _target(self, ref: str) -> Any:
        target = self.root
        for word in ref.lstrip("#").strip("/").split("/"):
            if word:
                name = word.replace("~1", "/").replace("~0", "~")
                target = target[int(name)] if isinstance(target, list) else target[name]
        return target

    def _enum(self, values: list[Any]) -> tuple[int, int]:
        costs = []
        for value in values:
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            costs.append(self.owner.farthest(text.encode()))
            if isinstance(value, str):
                self.owner.literals.add(text[1:])
        self.leaf = max(self.leaf, *costs)
        return min(costs), max(costs)

    def _kinds(self, schema: dict[str, Any]) -> tuple[int, int]:
        """Of what keywords of single types ask: together, as any of them may be what is begun."""
        low = high = 1
        for cost in (self._string(schema), self._array(schema)):
            low, high = max(low, cost[0]), max(high, cost[1])
        cost = self._object(schema)
        self.leaf = max(self.leaf, self._number(schema))
        return max(low, cost[0]), max(high, cost[1])

    def _number(self, schema: dict[str, Any]) -> int:
        words = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
        return NUMBER + sum(len(repr(schema[one])) for one in words if one in schema)

    def _string(self, schema: dict[str, Any]) -> tuple[int, int]:
        low = far = int(schema.get("minLength", 0))
        if "pattern" in schema:
            node = regex.whole(regex.parse(schema["pattern"]))
            low, far = max(low, _lowest(node)), far + _farthest(node)
            self.owner.name_pattern(node)
        self.leaf = max(self.leaf, far + 2)
        return (low + 2, far + 2) if low or far else (1, 1)

    def _array(self, schema: dict[str, Any]) -> tuple[int, int]:
        first = schema.get("prefixItems", [])
        least = int(schema.get("minItems", 0))
        each = [self._begun(one) for one in first]
        rest = self._begun(schema.get("items", True))
        if least == 0:
            return 1, 1
        each = each[:least] + [rest] * (least - len(each))
        return sum(a + 1 for a, _ in each) + 2, sum(b + 1 for _, b in each) + 2

    def _object(self, schema: dict[str, Any]) -> tuple[int, int]:
        low = high = 2
        given = schema.get("properties", {})
        others = [*schema.get("patternProperties", {}).values()]
        if isinstance(schema.get("additionalProperties"), dict):
            others.append(schema["additionalProperties"])
        for pattern in schema.get("patternProperties", {}):
            node = regex.whole(regex.parse(pattern))
            self.owner.name_pattern(node)
            far = _farthest(node)
            self.leaf, self.name = max(self.leaf, far + 3), max(self.name, far + 3)
        rest = [self._begun(one) for one in others] or [(1, 1)]
        required = schema.get("required", ())
        for name in {**given, **dict.fromkeys(required)}:
            key = self._key(name)
            look = self._value if name in required else self._begun
            value = look(given.get(name, True))
            if name in required:
                low, high = low + key + value[0], high + key + value[1]
        more = max(int(schema.get("minProperties", 0)) - len(required), 0)
        longest = max([self.name, *(self._key(one) for one in given)])
        low += more * (longest + max(a for a, _ in rest))
        high += more * (longest + max(b for _, b in rest))
        return (low, high) if high > 2 else (1, 1)

    def _key(self, name: str) -> int:
        """Tokens of a name with its quotes, colon and comma, at most."""
        text = json.dumps(name, ensure_ascii=False)[1:]
        self.owner.names.add(name)
        self.owner.literals.add(text + ":")
        cost = self.owner.farthest(text.encode()) + 3
        self.leaf, self.name = max(self.leaf, cost), max(self.name, cost)
        return cost


@functools.lru_cache(maxsize=1024)
def _lowest(node: regex.Node) -> int:
    """Bytes of a short match."""
    if isinstance(node, regex.Chars):
        easy = any(first <= 126 and last >= 32 for first, last in node.ranges)
        return 1 if easy else LONGEST_CHAR
    if isinstance(node, regex.Repeat):
        return node.least * _lowest(node.part) if node.least else 0
    if isinstance(node, regex.Alt):
        return min(map(_lowest, node.parts), default=0)
    return sum(map(_lowest, node.parts)) if isinstance(node, regex.Seq) else 0


@functools.lru_cache(maxsize=1024)
def _farthest(node: regex.Node) -> int:
    """Bytes to the end of a match from the worst place within it.

    Of alternatives the worst; of a count what it still asks at its beginning: what a place takes
    from a node is its own rest, then the cheapest of what follows.
    """
    if isinstance(node, regex.Chars):
        return LONGEST_CHAR
    if isinstance(node, regex.Repeat):
        return _farthest(node.part) + max(node.least - 1, 0) * _lowest(node.part)
    if isinstance(node, regex.Alt):
        return max(map(_farthest, node.parts), default=0)
    if not isinstance(node, regex.Seq):
        return 0
    worst = behind = 0
    for part in reversed(node.parts):
        worst = max(worst, _farthest(part) + behind)
        behind += _lowest(part)
    return worst


def _sample(node: regex.Node) -> str:
    """A short match."""
    if isinstance(node, regex.Chars):
        easy = [max(first, 32) for first, last in node.ranges if first <= 126 and last >= 32]
        return chr(easy[0] if easy else node.ranges[0][0]) if node.ranges else ""
    if isinstance(node, regex.Repeat):
        return _sample(node.part) * min(node.least, MOST_SAMPLE + 1)
    if isinstance(node, regex.Alt):
        return min(map(_sample, node.parts), key=len, default="")
    return "".join(map(_sample, node.parts)) if isinstance(node, regex.Seq) else ""


def _runs(node: regex.Node) -> list[str]:
    """Texts that stand in a pattern as they are: what may have to come where anything may."""
    if isinstance(node, regex.Seq):
        found, run = [], ""
        for part in node.parts:
            one = isinstance(part, regex.Chars) and len(part.ranges) == 1
            if one and part.ranges[0][0] == part.ranges[0][1]:  # type: ignore[union-attr]
                run += _sample(part)
                continue
            found += [run, *_runs(part)]
            run = ""
        return [one for one in (*found, run) if one]
    if isinstance(node, regex.Alt):
        return [one for part in node.parts for one in _runs(part)]
    return _runs(node.part) if isinstance(node, regex.Repeat) else []

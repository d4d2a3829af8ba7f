"""Upper bounds of how many tokens one more token can add to the shortest completion of a text.

    completion_bounds(form, token_classes)    None: a recursive grammar of a caller, or Lark

They are computed from the form and decide how early a matcher has to search for a completion
(shortest_completion).

    jump    a value, a property, another item or a tag is begun: its cheapest text
    slack   a character chose between alternatives, or is within a pattern, a name or an enum
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import RequestError
from quire.grammar import grammar_ast
from quire.grammar.automata import regex_ast
from quire.grammar.automata.regex_ast import parse_search
from quire.grammar.frontends import ebnf
from quire.grammar.grammar_ast import GrammarNode
from quire.grammar.length_closing import schema_cases as cases
from quire.grammar.length_closing.min_example import ShortestExample
from quire.grammar.length_closing.schema_cases import SchemaCases, Together
from quire.grammar.length_closing.token_classes import TokenClasses

NUMBER = 4
"""Tokens to the end of a number, at most, without bounds: -1.5e+ is one."""
MAX_TOKENS_PER_CHAR = 6
"""Bytes of one character: \\u0000."""
MAX_LITERALS = 256
MAX_SAMPLE_CHARS = 200
"""Characters of a text made from a pattern."""
MAX_ROUNDS = 40


@dataclass(frozen=True, slots=True)
class CompletionBounds:
    """See above. Plain."""

    jump: int
    slack: int
    within: int
    """The same within a string, of its pattern alone."""
    mark: int
    """Tokens of a mark's rest, at most."""
    plain: bool
    """JSON alone: text between the openers of values begins nothing."""
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


def completion_bounds(form: GrammarNode, spelling: TokenClasses) -> CompletionBounds | None:
    """Bounds of the form; None: there are none."""
    reader = _NodeCosts(spelling)
    try:
        cost = reader.cost(form)
        short = ShortestExample()
        text = short.find(form)
    except (_UnknownError, RequestError, RecursionError):
        return None
    reader.marks.discard("")
    return CompletionBounds(
        jump=cost.jump,
        slack=cost.slack,
        within=reader.within,
        mark=max((reader.farthest(one.encode()) for one in reader.marks), default=0),
        plain=isinstance(form, grammar_ast.JsonNode),
        marks=tuple(sorted(reader.marks, key=lambda one: (len(one), one))),
        literals=tuple(sorted(reader.literals, key=lambda one: (len(one), one))[:MAX_LITERALS]),
        names=tuple(sorted(reader.names)),
        members=tuple(short.members)[:MAX_LITERALS],
        values=tuple(sorted(short.values, key=len))[:MAX_LITERALS],
        text=text,
    )


class _UnknownError(Exception):
    """A form that nothing is known of."""


class _NodeCosts:
    """Walks a form once; collects what closing has to know by name."""

    def __init__(self, spelling: TokenClasses) -> None:
        self.token_classes = spelling
        self.within = 1
        self.marks: set[str] = set()
        self.literals: set[str] = set()
        self.names: set[str] = set()

    def cost(self, form: GrammarNode) -> _Cost:
        """Of any form."""
        if isinstance(form, grammar_ast.JsonNode):
            return _JsonCosts(self, json.loads(form.schema)).cost()
        if isinstance(form, grammar_ast.RegexNode):
            return self._pattern_cost(
                regex_ast.without_anchors(regex_ast.parse_regex(form.pattern), search=False)
            )
        if isinstance(form, grammar_ast.UserGrammarNode):
            return self._pattern_cost(ebnf.as_regex(form.text))
        if isinstance(form, grammar_ast.ChoiceNode):
            return self._alternation_cost([self._literal_cost(one) for one in form.options])
        if isinstance(form, grammar_ast.LiteralNode):
            return self._literal_cost(form.text)
        if isinstance(form, grammar_ast.UntilNode):
            self.marks.add(form.terminator)
            return self._literal_cost(form.terminator)
        return self._composite_cost(form)

    def _pattern_cost(self, node: regex_ast.RegexExpr | None) -> _Cost:
        """Of a pattern that is the whole text, or of a regular grammar of a caller."""
        if node is None:
            raise _UnknownError
        self.name_pattern(node, in_json=False)
        return _Cost(_min_bytes(node), _max_remaining_bytes(node), _max_remaining_bytes(node))

    def _composite_cost(self, form: GrammarNode) -> _Cost:
        if isinstance(form, grammar_ast.SequenceNode):
            return _sequence_cost(self.cost(one) for one in form.parts)
        if isinstance(form, grammar_ast.AlternationNode):
            return self._alternation_cost([self.cost(one) for one in form.parts])
        if isinstance(form, grammar_ast.RepeatNode):
            return self._repeat_cost(form)
        if isinstance(form, grammar_ast.TagNode):
            self.marks.add(form.end)
            begin, end = self._literal_cost(form.begin), self._literal_cost(form.end)
            return _sequence_cost((begin, self.cost(form.content), end))
        if isinstance(form, grammar_ast.TaggedTextNode):
            self.marks.update(form.triggers)
            either = self._alternation_cost([self.cost(one) for one in form.tags])
            return _Cost(either.low * form.min_tags, either.jump + either.low, either.slack)
        raise _UnknownError

    def _literal_cost(self, text: str) -> _Cost:
        """Farthest from its end a text is at its worst place, as tokens cut it."""
        return _Cost(*(self.farthest(text.encode()),) * 2)

    def farthest(self, text: bytes) -> int:
        """Tokens that the rest of a text takes from the worst place in it."""
        tails = self.token_classes.min_tokens_by_offset(text)
        return max((len(text) if one is None else one[0] for one in tails), default=0)

    def name_pattern(self, node: regex_ast.RegexExpr, in_json: bool = True) -> None:
        """Keep a short match, and what it ends with, as something to try."""
        self.within = max(self.within, _max_remaining_bytes(node) + 1)
        sample = _short_match(node)
        for text in {sample, *_literal_runs(node)}:
            if len(text) <= MAX_SAMPLE_CHARS:
                self.literals.add(json.dumps(text, ensure_ascii=False)[1:] if in_json else text)

    def _alternation_cost(self, costs: list[_Cost]) -> _Cost:
        """A token may choose any of them: then its cheapest text is what there is."""
        low = min((one.low for one in costs), default=0)
        worst = max((one.low for one in costs), default=0)
        jump = max((one.jump for one in costs), default=1)
        return _Cost(low, max(jump, worst), max((one.slack for one in costs), default=1) + worst)

    def _repeat_cost(self, form: grammar_ast.RepeatNode) -> _Cost:
        part, between = self.cost(form.part), self.farthest(form.separator.encode())
        again = part.low + between
        return _Cost(form.min_count * again, max(part.jump, again), part.slack + again)


def _sequence_cost(costs: Iterable[_Cost]) -> _Cost:
    known = list(costs)
    return _Cost(
        sum(one.low for one in known),
        max((one.jump for one in known), default=1),
        max((one.slack for one in known), default=1),
    )


class _JsonCosts:
    """Costs of the values of one schema, as quire.grammar.json_schema writes it."""

    def __init__(self, owner: _NodeCosts, root: Any) -> None:
        self.owner = owner
        self.root = root
        self.cases = SchemaCases(root)
        self.known: dict[tuple[int, ...], tuple[int, int]] = {}
        self.leaf = NUMBER
        self.name = 3
        self.choice = False
        self.dearest = 1
        self.changed = True
        self.looked: set[tuple[int, ...]] = set()
        """In this round."""
        self._enums: dict[int, tuple[int, int]] = {}
        self._keys: dict[str, int] = {}

    def cost(self) -> _Cost:
        """Of the root; jump is of the worst value anywhere in it."""
        for _ in range(MAX_ROUNDS):
            if not self.changed:
                break
            self.changed = False
            self.looked = set()
            low, _ = self._value_cost((self.root,))
        slack = self.leaf + (self.dearest if self.choice else 0)
        return _Cost(low, self.dearest + self.name + 2, slack)

    def _optional_cost(self, schemas: tuple[Any, ...]) -> tuple[int, int]:
        """Of a value that may be begun though it is optional: the completion has no part of it
        before."""
        found = self._value_cost(schemas)
        self.dearest = max(self.dearest, found[1])
        return found

    def _value_cost(self, schemas: tuple[Any, ...]) -> tuple[int, int]:
        """(cheapest, dearest of the cheapest that a choice leaves) of a value of the schemas."""
        parts = tuple(one for one in schemas if isinstance(one, dict) and one)
        key = tuple(map(id, parts))
        if not parts or key in self.looked:
            return self.known.get(key, (10**6, 1)) if parts else (1, 1)
        self.looked.add(key)
        found = self._compute_cost(parts)
        if self.known.get(key) != found:
            self.known[key] = found
            self.changed = True
        return found

    def _compute_cost(self, parts: tuple[Any, ...]) -> tuple[int, int]:
        costs = [self._case_cost(case) for case in self.cases.of(parts)]
        if len(costs) > 1:
            self.choice = True
            self.dearest = max(self.dearest, *(high for _, high in costs))
        low = min((one for one, _ in costs), default=1)
        return min(low, 10**6), min(max((one for _, one in costs), default=1), 10**4)

    def _case_cost(self, case: Together) -> tuple[int, int]:
        lists = cases.value_lists(case)
        if lists:
            return self._enum_cost(min(lists, key=len))
        low = high = 1
        self.leaf = max(self.leaf, sum(map(self._number_cost, case)))
        for cost in (self._string_cost(case), self._array_cost(case), self._object_cost(case)):
            low, high = max(low, cost[0]), max(high, cost[1])
        return low, high

    def _enum_cost(self, values: Sequence[Any]) -> tuple[int, int]:
        if not isinstance(values, list):  # no part of the schema: its id may be used again
            return self._new_enum_cost(values)
        if id(values) not in self._enums:
            self._enums[id(values)] = self._new_enum_cost(values)
        return self._enums[id(values)]

    def _new_enum_cost(self, values: Sequence[Any]) -> tuple[int, int]:
        costs = []
        for value in values:
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            costs.append(self.owner.farthest(text.encode()))
            if isinstance(value, str):
                self.owner.literals.add(text[1:])
        self.leaf = max(self.leaf, *costs)
        return min(costs), max(costs)

    def _number_cost(self, schema: dict[str, Any]) -> int:
        words = ("minimum", "maximum", "multipleOf")
        return NUMBER + sum(len(repr(schema[one])) for one in words if one in schema)

    def _string_cost(self, case: Together) -> tuple[int, int]:
        low = far = int(cases.least(case, "minLength"))
        for one in case:
            if "pattern" in one:
                node = parse_search(one["pattern"])
                low, far = max(low, _min_bytes(node)), far + _max_remaining_bytes(node)
                self.owner.name_pattern(node)
        self.leaf = max(self.leaf, far + 2)
        return (low + 2, far + 2) if low or far else (1, 1)

    def _array_cost(self, case: Together) -> tuple[int, int]:
        first = max(len(one.get("prefixItems", ())) for one in case)
        least = int(cases.least(case, "minItems"))
        each = [self._optional_cost(cases.item_of(case, place)) for place in range(first + 1)]
        if least == 0:
            return 1, 1
        rest = each.pop()
        each = each[:least] + [rest] * (least - len(each))
        return sum(a + 1 for a, _ in each) + 2, sum(b + 1 for _, b in each) + 2

    def _object_cost(self, case: Together) -> tuple[int, int]:
        low = high = 2
        patterns = [pair for one in case for pair in one.get("patternProperties", {}).items()]
        for pattern, _ in patterns:
            node = parse_search(pattern)
            self.owner.name_pattern(node)
            far = _max_remaining_bytes(node)
            self.leaf, self.name = max(self.leaf, far + 3), max(self.name, far + 3)
        free = [(one,) for _, one in patterns]
        rest = [self._optional_cost(one) for one in (*free, cases.other_property(case))]
        required = cases.required(case)
        for name in dict.fromkeys((*cases.properties(case), *required)):
            key = self._key_cost(name)
            look = self._value_cost if name in required else self._optional_cost
            value = look((*cases.property_of(case, name), *(one for _, one in patterns)))
            if name in required:
                low, high = low + key + value[0], high + key + value[1]
        more = max(int(cases.least(case, "minProperties")) - len(required), 0)
        longest = max([self.name, *(self._key_cost(one) for one in cases.properties(case))])
        low += more * (longest + max(a for a, _ in rest))
        high += more * (longest + max(b for _, b in rest))
        return (low, high) if high > 2 else (1, 1)

    def _key_cost(self, name: str) -> int:
        """Tokens of a name with its quotes, colon and comma, at most."""
        if name in self._keys:
            return self._keys[name]
        text = json.dumps(name, ensure_ascii=False)[1:]
        self.owner.names.add(name)
        self.owner.literals.add(text + ":")
        cost = self.owner.farthest(text.encode()) + 3
        self.leaf, self.name = max(self.leaf, cost), max(self.name, cost)
        self._keys[name] = cost
        return cost


@functools.lru_cache(maxsize=1024)
def _min_bytes(node: regex_ast.RegexExpr) -> int:
    """Bytes of a short match."""
    if isinstance(node, regex_ast.CharClass):
        easy = any(first <= 126 and last >= 32 for first, last in node.ranges)
        return 1 if easy else MAX_TOKENS_PER_CHAR
    if isinstance(node, regex_ast.RegexRepeat):
        return node.min_count * _min_bytes(node.part) if node.min_count else 0
    if isinstance(node, regex_ast.RegexAlternation):
        return min(map(_min_bytes, node.parts), default=0)
    return sum(map(_min_bytes, node.parts)) if isinstance(node, regex_ast.RegexSequence) else 0


@functools.lru_cache(maxsize=1024)
def _max_remaining_bytes(node: regex_ast.RegexExpr) -> int:
    """Bytes to the end of a match from the worst place within it.

    Of alternatives the worst; of a count what it still needs at its beginning: what a place takes
    from a node is its own rest, then the cheapest of what follows.
    """
    if isinstance(node, regex_ast.CharClass):
        return MAX_TOKENS_PER_CHAR
    if isinstance(node, regex_ast.RegexRepeat):
        return _max_remaining_bytes(node.part) + max(node.min_count - 1, 0) * _min_bytes(node.part)
    if isinstance(node, regex_ast.RegexAlternation):
        return max(map(_max_remaining_bytes, node.parts), default=0)
    if not isinstance(node, regex_ast.RegexSequence):
        return 0
    worst = behind = 0
    for part in reversed(node.parts):
        worst = max(worst, _max_remaining_bytes(part) + behind)
        behind += _min_bytes(part)
    return worst


def _short_match(node: regex_ast.RegexExpr) -> str:
    """A short match."""
    if isinstance(node, regex_ast.CharClass):
        easy = [max(first, 32) for first, last in node.ranges if first <= 126 and last >= 32]
        return chr(easy[0] if easy else node.ranges[0][0]) if node.ranges else ""
    if isinstance(node, regex_ast.RegexRepeat):
        return _short_match(node.part) * min(node.min_count, MAX_SAMPLE_CHARS + 1)
    if isinstance(node, regex_ast.RegexAlternation):
        return min(map(_short_match, node.parts), key=len, default="")
    return (
        "".join(map(_short_match, node.parts)) if isinstance(node, regex_ast.RegexSequence) else ""
    )


def _literal_runs(node: regex_ast.RegexExpr) -> list[str]:
    """Literal texts of a pattern: they may be needed where any text is possible."""
    if isinstance(node, regex_ast.RegexSequence):
        found, run = [], ""
        for part in node.parts:
            one = isinstance(part, regex_ast.CharClass) and len(part.ranges) == 1
            if one and part.ranges[0][0] == part.ranges[0][1]:  # type: ignore[union-attr]
                run += _short_match(part)
                continue
            found += [run, *_literal_runs(part)]
            run = ""
        return [one for one in (*found, run) if one]
    if isinstance(node, regex_ast.RegexAlternation):
        return [one for part in node.parts for one in _literal_runs(part)]
    return _literal_runs(node.part) if isinstance(node, regex_ast.RegexRepeat) else []

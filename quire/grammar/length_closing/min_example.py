"""Builds a short text of a form from the form itself, as the start of a search.

    ShortestExample().find(form) -> str | None     None: no text is easily made
    ShortestExample().members, .values             members of JSON objects, and values

Results are hints: each is tried on the matcher before it is used. Schemas are read as
quire.grammar.json_schema.rewrite writes them; other keywords are skipped.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import deque
from collections.abc import Callable
from typing import Any

from quire.errors import RequestError
from quire.grammar import grammar_ast
from quire.grammar.automata import regex_ast
from quire.grammar.automata.dfa import DfaState, DfaTooComplex, RegexDfa, fully_matches
from quire.grammar.automata.regex_ast import parse_search
from quire.grammar.frontends import ebnf
from quire.grammar.grammar_ast import GrammarNode
from quire.grammar.length_closing import schema_cases as cases
from quire.grammar.length_closing.schema_cases import SchemaCases, Together

MAX_CALLS = 50_000
MAX_CHARS = 20_000
MAX_STATES = 5000


class ShortestExample:
    """One walk over a form."""

    def __init__(self) -> None:
        self.members: dict[str, None] = {}
        """Names with their values, as `"a":0`, of what objects must have; in their order."""
        self.values: dict[str, None] = {}
        """Values that are more than a word."""

    def find(self, form: GrammarNode) -> str | None:
        """A short text, if one is found."""
        if isinstance(form, grammar_ast.JsonNode):
            return _SchemaExamples(self, json.loads(form.schema)).text()
        if isinstance(form, grammar_ast.RegexNode):
            return _shortest_match(
                [regex_ast.without_anchors(regex_ast.parse_regex(form.pattern), search=False)]
            )
        if isinstance(form, grammar_ast.UserGrammarNode):
            node = ebnf.as_regex(form.text)
            return None if node is None else _shortest_match([node])
        if isinstance(form, grammar_ast.ChoiceNode):
            return min(form.options, key=len, default=None)
        if isinstance(form, grammar_ast.LiteralNode):
            return form.text
        if isinstance(form, grammar_ast.UntilNode):
            return form.terminator
        return self._find_composite(form)

    def _find_composite(self, form: GrammarNode) -> str | None:
        if isinstance(form, grammar_ast.SequenceNode):
            return _join_all([self.find(one) for one in form.parts])
        if isinstance(form, grammar_ast.AlternationNode):
            return _shortest_of([self.find(one) for one in form.parts])
        if isinstance(form, grammar_ast.TagNode):
            return _join_all([form.begin, self.find(form.content), form.end])
        if isinstance(form, grammar_ast.RepeatNode):
            part = self.find(form.part)
            if form.min_count == 0:
                return ""
            return None if part is None else form.separator.join([part] * form.min_count)
        if isinstance(form, grammar_ast.TaggedTextNode):
            one = _shortest_of([self.find(tag) for tag in form.tags])
            return "" if form.min_tags == 0 else None if one is None else one * form.min_tags
        return None


def _join_all(parts: list[str | None]) -> str | None:
    known = [one for one in parts if one is not None]
    return "".join(known) if len(known) == len(parts) else None


def _shortest_of(texts: list[str | None]) -> str | None:
    return min((one for one in texts if one is not None), key=len, default=None)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class _SchemaExamples:
    """The shortest values of the parts of one schema."""

    def __init__(self, owner: ShortestExample, root: Any) -> None:
        self.owner = owner
        self.root = root
        self.cases = SchemaCases(root)
        self.known: dict[tuple[int, ...], str] = {}
        self.open: set[tuple[int, ...]] = set()
        self.calls = 0

    def text(self) -> str | None:
        """Of the root. All other parts are walked as well: what they need may come to be begun."""
        found = self.value((self.root,))
        self._walk(self.root)
        return found

    def _walk(self, part: Any) -> None:
        if isinstance(part, list):
            for one in part:
                self._walk(one)
        elif isinstance(part, dict):
            self.value((part,))
            for name, one in part.items():
                if name in ("properties", "patternProperties", "$defs"):
                    self._walk(list(one.values()))
                elif name in ("items", "prefixItems", "anyOf", "allOf", "additionalProperties"):
                    self._walk(one)

    def value(self, schemas: tuple[Any, ...]) -> str | None:
        """A short value, or None: there is none without one of the same schemas in it."""
        parts = tuple(one for one in schemas if one is not True and one != {})
        if False in parts or not parts:
            return None if parts else "0"
        key = tuple(map(id, parts))
        self.calls += 1
        if key in self.known or key in self.open or self.calls > MAX_CALLS:
            return self.known.get(key)
        self.open.add(key)
        found = _shortest_of([self._build(case) for case in self.cases.of(parts)])
        self.open.remove(key)
        if found is None or len(found) > MAX_CHARS:
            return None
        self.known[key] = found
        if len(found) > 2:
            self.owner.values.setdefault(found)
        return found

    def _build(self, case: Together) -> str | None:
        kinds = cases.types(case)
        lists = cases.value_lists(case)
        if lists:
            rest = [{*map(_dumped, one)} for one in lists[1:]]
            texts = map(_dumped, lists[0])
            good = (one for one in texts if all(one in other for other in rest))
            return _shortest_of([one for one in good if _kinds_of(one) & kinds])
        makers: dict[str, Callable[[], str | None]] = {
            "integer": lambda: _number(case, whole="number" not in kinds),
            "string": lambda: _string(case),
            "array": lambda: self._array(case),
            "object": lambda: self._object(case),
        }
        found = ["null"] if "null" in kinds else ["true"] if "boolean" in kinds else []
        return _shortest_of([*found, *(make() for name, make in makers.items() if name in kinds)])

    def _array(self, case: Together) -> str | None:
        count = int(cases.least(case, "minItems"))
        if count > min(cases.most(case, "maxItems"), MAX_CHARS):
            return None
        parts = [self.value(cases.item_of(case, place)) for place in range(count)]
        inner = _join_all([one if one is None else one + "," for one in parts])
        return None if inner is None else f"[{inner[:-1]}]"

    def _object(self, case: Together) -> str | None:
        required = cases.required(case)
        given = cases.properties(case)
        spare = [one for one in given if one not in required]
        missing = int(cases.least(case, "minProperties")) - len(required)
        chosen = {*required, *spare[: max(missing, 0)]}
        names = [one for one in dict.fromkeys((*given, *required)) if one in chosen]
        parts: list[str | None] = []
        for name in names:
            value = self.value(self._property(case, name))
            parts.append(None if value is None else f"{_dumped(name)}:{value}")
        for name in given:
            value = self.value(cases.property_of(case, name))
            if value is not None:
                self.owner.members.setdefault(f"{_dumped(name)}:{value}")
        parts += self._unnamed_members(case, missing - len(spare))
        inner = _join_all([one if one is None else one + "," for one in parts])
        return None if inner is None else f"{{{inner[:-1]}}}"

    def _property(self, case: Together, name: str) -> tuple[Any, ...]:
        """What holds of a property, patterns of names included."""
        found = list(cases.property_of(case, name))
        for place, one in enumerate(case):
            for pattern, inner in one.get("patternProperties", {}).items():
                if name in one.get("properties", ()):
                    continue
                if _is_match(pattern, name):
                    found[place] = inner
        return tuple(found)

    def _unnamed_members(self, case: Together, count: int) -> list[str | None]:
        """Members with names that the schema does not list."""
        if count <= 0:
            return []
        for pattern, one in (pair for p in case for pair in p.get("patternProperties", {}).items()):
            node = parse_search(pattern)
            names = [_shortest_match([node], least) for least in range(count)]
            value = self.value((one,))
            if value is not None and len({*names}) == count and None not in names:
                return [f"{_dumped(name)}:{value}" for name in names]
        value = self.value(cases.other_property(case))
        made = ["" if at == 0 else f"{at}" for at in range(count)]
        return [None if value is None else f"{_dumped(name)}:{value}" for name in made]


def _kinds_of(text: str) -> set[str]:
    """Types of a JSON text."""
    named = {
        "{": "object",
        "[": "array",
        '"': "string",
        "n": "null",
        "t": "boolean",
        "f": "boolean",
    }
    if text[0] in named:
        return {named[text[0]]}
    return {"integer", "number"} if re.fullmatch(r"-?[0-9]+(\.0)?", text) else {"number"}


def _is_match(pattern: str, name: str) -> bool:
    try:
        return fully_matches(parse_search(pattern), name)
    except (DfaTooComplex, RequestError):
        return False


def _number(case: Together, whole: bool) -> str | None:
    least = cases.least(case, "minimum", -math.inf)
    most = cases.most(case, "maximum")
    step = max((one["multipleOf"] for one in case if "multipleOf" in one), default=int(whole))
    if least <= 0 <= most:
        return "0"
    if least > most:
        return None
    near = least if least > 0 else most
    if step:
        count = near / step
        near = (math.ceil(count) if least > 0 else math.floor(count)) * step
    if whole or float(near).is_integer():
        near = int(near)
    text = _dumped(near)
    return text if "e" not in text else None


def _string(case: Together) -> str | None:
    patterns = [one["pattern"] for one in case if "pattern" in one]
    least, most = int(cases.least(case, "minLength")), cases.most(case, "maxLength")
    if least > most:
        return None
    if not patterns:
        return _dumped("a" * least)
    found = _shortest_string(tuple(patterns), least, None if most == math.inf else int(most))
    return None if found is None else _dumped(found)


@functools.lru_cache(maxsize=1024)
def _shortest_string(patterns: tuple[str, ...], least: int, most: int | None) -> str | None:
    return _shortest_match([parse_search(one) for one in patterns], least, most)


def _shortest_match(
    nodes: list[regex_ast.RegexExpr], least: int = 0, most: int | None = None
) -> str | None:
    """A shortest text that all of them match, of so many characters."""
    if least or most is not None:
        nodes = [
            *nodes,
            regex_ast.RegexRepeat(regex_ast.CharClass(regex_ast.ALL_CHARS), least, most),
        ]
    try:
        texts = RegexDfa(nodes)
        return _breadth_first(texts)
    except (DfaTooComplex, RequestError, RecursionError):
        return None


def _breadth_first(texts: RegexDfa) -> str | None:
    """Breadth first."""
    start: DfaState = texts.start
    seen: dict[DfaState, tuple[DfaState, str] | None] = {start: None}
    queue = deque([start])
    while queue and len(seen) < MAX_STATES:
        place = queue.popleft()
        if texts.is_accepting(place):
            return _path(seen, place)
        for ranges, after in texts.transitions(place):
            if ranges and after not in seen:
                seen[after] = (place, _plain_char(ranges))
                queue.append(after)
    return None


def _path(seen: dict[DfaState, tuple[DfaState, str] | None], place: DfaState) -> str:
    chars: list[str] = []
    step = seen[place]
    while step is not None:
        chars.append(step[1])
        step = seen[step[0]]
    return "".join(reversed(chars))


def _plain_char(ranges: regex_ast.CharRanges) -> str:
    """A character of the set that is written as it is."""
    for first, last in ((97, 122), (48, 57), (65, 90), (35, 91), (32, 33), (93, 126)):
        for low, high in ranges:
            if max(low, first) <= min(high, last):
                return chr(max(low, first))
    return chr(ranges[0][0])

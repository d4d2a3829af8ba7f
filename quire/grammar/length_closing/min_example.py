"""A short text of a form, made from the form itself: what a search for one begins with.

    Shortest().of(form) -> str | None     None: it has none that is easily made
    Shortest().members, .values           what has to stand in JSON objects, and as values

Nothing relies on them being right: each is tried on the matcher before it is used. Schemas are
read as quire.grammar.frontends.json_schema rewrites them; what else stands in them is not looked
at.
"""

from __future__ import annotations

import json
import math
from collections import deque
from typing import Any

from quire.errors import RequestError
from quire.grammar import grammar_ast
from quire.grammar.automata import regex_ast
from quire.grammar.automata.dfa import DfaState, DfaTooComplex, RegexDfa
from quire.grammar.frontends import ebnf
from quire.grammar.grammar_ast import GrammarNode

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
        self.known: dict[int, str] = {}
        self.open: set[int] = set()
        self.calls = 0

    def text(self) -> str | None:
        """Of the root. All other parts are walked as well: what they need may come to be begun."""
        found = self.value(self.root)
        self._walk(self.root)
        return found

    def _walk(self, part: Any) -> None:
        if isinstance(part, list):
            for one in part:
                self._walk(one)
        elif isinstance(part, dict):
            self.value(part)
            for name, one in part.items():
                if name in ("properties", "patternProperties", "$defs"):
                    self._walk(list(one.values()))
                elif name in ("items", "prefixItems", "anyOf", "additionalProperties"):
                    self._walk(one)

    def value(self, schema: Any) -> str | None:
        """A short value, or None: there is none without one of the same schema in it."""
        if not isinstance(schema, dict) or not schema:
            return None if schema is False else "0"
        key = id(schema)
        self.calls += 1
        if key in self.known or key in self.open or self.calls > MAX_CALLS:
            return self.known.get(key)
        self.open.add(key)
        found = self._build(schema)
        self.open.remove(key)
        if found is None or len(found) > MAX_CHARS:
            return None
        self.known[key] = found
        if len(found) > 2:
            self.owner.values.setdefault(found)
        return found

    def _build(self, schema: dict[str, Any]) -> str | None:
        if "$ref" in schema:
            return self.value(self._resolve(schema["$ref"]))
        if "anyOf" in schema:
            return _shortest_of([self.value(one) for one in schema["anyOf"]])
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return _shortest_of([_dumped(one) for one in values])
        kind = schema.get("type")
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "string":
            return _string(schema)
        if kind in ("integer", "number"):
            return _number(schema, whole=kind == "integer")
        return {"boolean": "true", "null": "null"}.get(str(kind), "0")

    def _resolve(self, ref: str) -> Any:
        target = self.root
        for word in ref.lstrip("#").strip("/").split("/"):
            if word:
                target = target[word.replace("~1", "/").replace("~0", "~")]
        return target

    def _array(self, schema: dict[str, Any]) -> str | None:
        first = schema.get("prefixItems", [])
        least = int(schema.get("minItems", 0))
        parts = [self.value(one) for one in first[:least]]
        if least > len(first):
            parts += [self.value(schema.get("items", True))] * (least - len(first))
        inner = _join_all([one if one is None else one + "," for one in parts])
        return None if inner is None else f"[{inner[:-1]}]"

    def _object(self, schema: dict[str, Any]) -> str | None:
        given = schema.get("properties", {})
        required = schema.get("required", ())
        names = [one for one in given if one in required]
        names += [one for one in required if one not in given]
        spare = [one for one in given if one not in required]
        missing = int(schema.get("minProperties", 0)) - len(names)
        if missing > 0:
            chosen = {*names, *spare[:missing]}
            names = [one for one in (*given, *required) if one in chosen]
            names = list(dict.fromkeys(names))
        parts: list[str | None] = []
        for name in names:
            value = self.value(given.get(name, schema.get("additionalProperties", True)))
            parts.append(None if value is None else f"{_dumped(name)}:{value}")
        for name in given:
            value = self.value(given[name])
            if value is not None:
                self.owner.members.setdefault(f"{_dumped(name)}:{value}")
        parts += self._unnamed_members(schema, missing - len(spare))
        inner = _join_all([one if one is None else one + "," for one in parts])
        return None if inner is None else f"{{{inner[:-1]}}}"

    def _unnamed_members(self, schema: dict[str, Any], count: int) -> list[str | None]:
        """Members whose names the schema does not say."""
        if count <= 0:
            return []
        for pattern, one in schema.get("patternProperties", {}).items():
            node = regex_ast.without_anchors(regex_ast.parse_regex(pattern))
            names = [_shortest_match([node], least) for least in range(count)]
            value = self.value(one)
            if value is not None and len({*names}) == count and None not in names:
                return [f"{_dumped(name)}:{value}" for name in names]
        value = self.value(schema.get("additionalProperties", True))
        made = ["" if at == 0 else f"{at}" for at in range(count)]
        return [None if value is None else f"{_dumped(name)}:{value}" for name in made]


def _number(schema: dict[str, Any], whole: bool) -> str | None:
    least, most = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    step = schema.get("multipleOf", 1 if whole else 0)
    if least <= 0 <= most:
        return "0"
    near = least if least > 0 else most
    if step:
        count = near / step
        near = (math.ceil(count) if least > 0 else math.floor(count)) * step
    if whole or float(near).is_integer():
        near = int(near)
    text = _dumped(near)
    return text if "e" not in text else None


def _string(schema: dict[str, Any]) -> str | None:
    patterns = [schema["pattern"]] if "pattern" in schema else []
    patterns += [one["pattern"] for one in schema.get("allOf", ()) if "pattern" in one]
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    if not patterns:
        return _dumped("a" * least)
    nodes = [regex_ast.without_anchors(regex_ast.parse_regex(one)) for one in patterns]
    found = _shortest_match(nodes, least, most)
    return None if found is None else _dumped(found)


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

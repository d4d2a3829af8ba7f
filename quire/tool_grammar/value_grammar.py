"""Grammars of argument values in notations other than plain JSON.

    between tags     strings as they are, other values as JSON           TaggedValue
    literals         of Python, or with quotes and keys of their own     LiteralNotation

The parser of the format (quire.text.tools) parses every text of such a grammar to a value that is
valid under the schema, or InexpressibleSchema is raised. The grammar is narrower
than the schema in places: text between tags cannot contain the tag that ends it. One gap is left: a
string within JSON between tags can, or one that ends the call, and the parser ends the value there.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from quire.grammar.grammar_ast import (
    AlternationNode,
    ChoiceNode,
    GrammarNode,
    JsonNode,
    LiteralNode,
    RegexNode,
    RepeatNode,
    SequenceNode,
    TaggedTextNode,
    TagNode,
    UntilNode,
    is_larger,
)
from quire.text.tools._render_calls import render_value
from quire.text.tools._schema_coercion import coerce_to_json
from quire.text.tools.base import CallTemplate
from quire.tool_grammar.parameter_schemas import (
    InexpressibleSchema,
    JsonSchema,
    assertion_keywords,
    resolve_schema,
    standalone_schema,
)

MAX_VALUES = 300
"""Values of one function's arguments in a notation of their own, and options of one value."""
MAX_PARTS = 2_000
"""Parts of the grammar of one value; optional properties are written out for each before them."""
MAX_OPTION_DEPTH = 8
"""Options within options."""
_TEXT_LIKE_TYPES = frozenset({"null", "boolean"})
"""Kinds of which a text that looks like one may as well be one, if the schema allows any."""
_NO_TEXT = ["array", "boolean", "null", "number", "object"]
_MARKUP_PATTERN = re.compile(r"(?<!\\)\.|\[\^|\\[SWDPsp]|<")
"""In a pattern: may match the tag that ends a value."""


@dataclass(frozen=True, slots=True)
class TaggedValue:
    """Tags around a value.

    close: the tag that ends it, which `after` contains. barred: literals that a text must not
    contain. kinds: the types that the parser gives it. json: the tags of a JSON value, where the
    tags mark a value as text or JSON; `before` and `after` are then those of text.
    """

    before: str
    after: str
    close: str
    barred: tuple[str, ...]
    kinds: frozenset[str]
    json: tuple[str, str] | None = None

    def to_grammar(self, schema: object, root: JsonSchema) -> GrammarNode:
        """Everything from the first tag to the last. Raises Inexpressible."""
        texts, others = split_string_schemas(schema, root)
        if self.json is not None and texts and not (others or assertion_keywords(texts[0])):
            others = [{"type": _NO_TEXT}]
        parts = [self._string_value(one, root, mixed=bool(others)) for one in texts]
        begin, end = self.json or (self.before, self.after)
        for one in others:
            parts.append(
                SequenceNode((LiteralNode(begin), self._non_string(one, root), LiteralNode(end)))
            )
        if not parts:
            raise InexpressibleSchema("a value that nothing is allowed for")
        return parts[0] if len(parts) == 1 else AlternationNode(tuple(parts))

    def _non_string(self, schema: object, root: JsonSchema) -> GrammarNode:
        """A value that is no string."""
        if not isinstance(schema, Mapping) or self.json is not None:
            return JsonNode(standalone_schema(schema, root))
        values = _values(schema)
        if values is None:
            return JsonNode(standalone_schema(schema, root))
        return _one_of([text for value in values if (text := self._round_trip(value)) is not None])

    def _string_value(self, schema: JsonSchema, root: JsonSchema, *, mixed: bool) -> GrammarNode:
        """A value that is a string, as it is."""
        words = assertion_keywords(schema) - {"type"}
        before, after = LiteralNode(self.before), LiteralNode(self.after)
        values = _values(schema)
        if values is not None:
            texts = [text for value in values if (text := self._round_trip(value)) is not None]
            return SequenceNode((before, _one_of(texts), after))
        if words & {"pattern", "format", "minLength", "maxLength"}:
            self._check_unambiguous(mixed)
            return SequenceNode((before, RegexNode(_pattern(schema, words, self.close[0])), after))
        rest = self.after[self.after.index(self.close) + len(self.close) :]
        if mixed and self.json is None and not self.kinds <= _TEXT_LIKE_TYPES | {"string"}:
            return SequenceNode(
                (before, self._unambiguous_text(), *([LiteralNode(rest)] if rest else []))
            )
        return SequenceNode((before, self._any_text(), *([LiteralNode(rest)] if rest else [])))

    def _any_text(self) -> GrammarNode:
        """Text up to and with `close`."""
        if not self.barred:
            return UntilNode(self.close)
        close = TagNode(self.close, SequenceNode(()), "")
        return TaggedTextNode((self.close, *self.barred), (close,), min_tags=1, only_first=True)

    def _unambiguous_text(self) -> GrammarNode:
        """Text that is no number, list or object."""
        first = RegexNode(rf"[^\s0-9+\-(\[{{{re.escape(self.close[0])}]")
        layout = self.after[: self.after.index(self.close)]
        empty = [LiteralNode(self.close), *([LiteralNode(layout + self.close)] if layout else [])]
        return AlternationNode((SequenceNode((first, self._any_text())), *empty))

    def _check_unambiguous(self, mixed: bool) -> None:
        if mixed and self.json is None and not self.kinds <= _TEXT_LIKE_TYPES | {"string"}:
            raise InexpressibleSchema("a limited string or something else")

    def _round_trip(self, value: object) -> str | None:
        """The text of a value, if it parses to the value again."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if self.json is not None:
            return text if self.close not in text else None
        kinds = self.kinds - {"string"}
        coerced = coerce_to_json(text, kinds) if kinds else json.dumps(text)
        same = json.loads(coerced) == value and isinstance(json.loads(coerced), bool) == isinstance(
            value, bool
        )
        return text if same and self.close not in text else None


def _one_of(texts: Sequence[str]) -> GrammarNode:
    if not texts:
        raise InexpressibleSchema("none of the values allowed")
    filled = [text for text in texts if text]
    if len(filled) == len(texts):
        return ChoiceNode(tuple(dict.fromkeys(texts)))
    return (
        RepeatNode(ChoiceNode(tuple(dict.fromkeys(filled))), min_count=0, max_count=1)
        if filled
        else SequenceNode(())
    )


def _values(schema: JsonSchema) -> list[object] | None:
    """The values that a schema lists, if it does."""
    words = assertion_keywords(schema) - {"type"}
    if not words & {"enum", "const"}:
        return None
    if len(words) > 1:
        raise InexpressibleSchema(f"{min(words & {'enum', 'const'})!r} beside other keywords")
    listed = schema.get("enum", [schema.get("const")])
    if not isinstance(listed, list):
        raise InexpressibleSchema("an 'enum' that is no list")
    kinds = _types(schema)
    return [value for value in listed if kinds is None or json_types_of(value) & kinds]


def json_types_of(value: object) -> frozenset[str]:
    """The types of JSON Schema that a value has."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    plain = {str: "string", float: "number", type(None): "null", list: "array"}
    return frozenset({plain.get(type(value), "object")})


def _types(schema: JsonSchema) -> frozenset[str] | None:
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    return frozenset(map(str, named)) if isinstance(named, list) else None


def _pattern(schema: JsonSchema, words: set[str], never: str) -> str:
    """A regular expression for a string that is limited. never: characters not to be in it."""
    if words == {"pattern"}:
        pattern = str(schema["pattern"])
        if _MARKUP_PATTERN.search(pattern):
            raise InexpressibleSchema(f"the pattern {pattern!r:.80}, which may match markup")
        if not (pattern.startswith("^") and pattern.endswith("$")) or pattern.endswith("\\$"):
            raise InexpressibleSchema(f"the pattern {pattern!r:.80}, which leaves an end open")
        inner = pattern[1:-1]
        if "^" in inner.replace("[^", "") or "$" in inner.replace("\\$", "") or "|" in inner:
            raise InexpressibleSchema(f"the pattern {pattern!r:.80}")
        return inner
    if words <= {"minLength", "maxLength"}:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        return f"[^{re.escape(never)}]{{{least},{'' if most is None else most}}}"
    raise InexpressibleSchema(f"{' and '.join(sorted(words))} of a string")


def split_string_schemas(
    schema: object, root: JsonSchema, depth: int = 0
) -> tuple[list[JsonSchema], list[object]]:
    """The schema of a value as those of its strings and those of all else. Either list is "or"."""
    if depth > MAX_OPTION_DEPTH:
        raise InexpressibleSchema("options within options")
    if not isinstance(schema, Mapping):
        if schema is False:
            raise InexpressibleSchema("a value that nothing is allowed for")
        return [{}], []
    schema = resolve_schema(schema, root)
    words = assertion_keywords(schema)
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        if word in words and isinstance(options, list):
            return _split_options(schema, options, words - {word}, root, depth)
    if words & {"enum", "const"}:
        return _split_values(schema)
    types = _types(schema)
    if types is None:
        return _split_untyped(schema, words)
    others = sorted(types - {"string"})
    texts: list[JsonSchema] = [{**schema, "type": "string"}] if "string" in types else []
    if not texts:
        return [], [schema]
    return texts, [{**schema, "type": others}] if others else []


def _split_options(
    schema: JsonSchema, options: list[object], beside: set[str], root: JsonSchema, depth: int
) -> tuple[list[JsonSchema], list[object]]:
    texts: list[JsonSchema] = []
    others: list[object] = []
    for option in options:
        more, rest = split_string_schemas(option, root, depth + 1)
        texts += more
        others += rest
        if len(texts) + len(others) > MAX_VALUES:
            raise InexpressibleSchema(f"over {MAX_VALUES} options")
    if not beside:
        return texts, others
    if not texts:
        return [], [schema]
    if beside == {"type"} and schema["type"] == "string" and not others:
        return texts, []
    raise InexpressibleSchema(f"{min(beside)!r} beside other keywords, for what may be a string")


def _split_values(schema: JsonSchema) -> tuple[list[JsonSchema], list[object]]:
    values = _values(schema) or []
    texts = [value for value in values if isinstance(value, str)]
    others = [value for value in values if not isinstance(value, str)]
    return [{"enum": texts}] if texts else [], [{"enum": others}] if others else []


def _split_untyped(schema: JsonSchema, words: set[str]) -> tuple[list[JsonSchema], list[object]]:
    """The type that the parser gives to such a value; by default text."""
    if words & {"allOf", "not", "if", "$dynamicRef", "$recursiveRef"}:
        raise InexpressibleSchema(f"{min(words)!r} for what may be a string")
    if words & {"properties", "items"}:
        kind = "object" if "properties" in words else "array"
        return [], [{**schema, "type": kind}]
    return [schema], []


# -- literals -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LiteralNotation:
    """A notation of values: Python's, or braces with quotes of their own."""

    template: CallTemplate
    root: JsonSchema
    _num_values: Iterator[int] = field(default_factory=itertools.count)

    @property
    def _python(self) -> bool:
        return self.template.notation == "python"

    def to_grammar(self, schema: object, depth: int = 0) -> GrammarNode:
        """A value. Where the notation's own way does not do, the JSON that its readers take too."""
        try:
            made = self._native_value(schema, depth)
        except InexpressibleSchema:
            made = None
        if made is None or is_larger(made, MAX_PARTS):
            return JsonNode(standalone_schema(schema, self.root))
        return made

    def _native_value(self, schema: object, depth: int) -> GrammarNode:
        if schema is True or schema == {}:
            return AlternationNode((JsonNode("true"), *(self._scalar(one) for one in _SCALARS)))
        if not isinstance(schema, Mapping) or depth > 6 or next(self._num_values) > MAX_VALUES:
            raise InexpressibleSchema("deep, or of many values")
        schema = resolve_schema(schema, self.root)
        values = _values(schema)
        if values is not None:
            return AlternationNode(
                tuple(LiteralNode(render_value(self.template, value)) for value in values)
            )
        words = assertion_keywords(schema)
        for word in ("anyOf", "oneOf"):
            options = schema.get(word)
            if words == {word} and isinstance(options, list) and options:
                return AlternationNode(tuple(self.to_grammar(one, depth + 1) for one in options))
        types = _types(schema)
        if not types:
            raise InexpressibleSchema("no type")
        return AlternationNode(
            tuple(self._typed(one, schema, words, depth) for one in sorted(types))
        )

    def _typed(self, kind: str, schema: JsonSchema, words: set[str], depth: int) -> GrammarNode:
        if kind == "array" and words <= {"type", "items", "minItems", "maxItems"}:
            return self._array(schema, depth)
        if kind == "object" and words <= {"type", "properties", "required", "additionalProperties"}:
            return self._object(schema, depth)
        plain = JsonNode(standalone_schema({**schema, "type": kind}, self.root))
        if kind == "string":
            own = (
                self.string()
                if words == {"type"}
                else self._limited_string(schema, words - {"type"})
            )
            return plain if own is None else AlternationNode((plain, own))
        is_word = kind in ("boolean", "null") and self._python
        return self._scalar(kind) if is_word else plain

    def _scalar(self, kind: str) -> GrammarNode:
        if kind == "string":
            return self.string()
        words = {"boolean": (True, False), "null": (None,)}[kind]
        return ChoiceNode(tuple(render_value(self.template, word) for word in words))

    def string(self) -> GrammarNode:
        """Any text in the notation's own quotes."""
        if self._python:
            return RegexNode(r"'([^'\\\x00-\x1f]|\\['\\nrt])*'")
        return SequenceNode((LiteralNode(self.template.quote), UntilNode(self.template.quote)))

    def _limited_string(self, schema: JsonSchema, words: set[str]) -> GrammarNode | None:
        """Such a string in the notation's own quotes, if it can be written."""
        quote = "'" if self._python else self.template.quote
        try:
            pattern = _pattern(schema, words, "'\\" if self._python else quote[0])
        except InexpressibleSchema:
            return None
        if "pattern" in words and (quote[0] in pattern or r"\\" in pattern):
            return None
        return SequenceNode((LiteralNode(quote), RegexNode(pattern), LiteralNode(quote)))

    def _array(self, schema: JsonSchema, depth: int) -> GrammarNode:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(least, int) or not isinstance(most, int | None):
            raise InexpressibleSchema("malformed 'minItems' or 'maxItems'")
        if most == 0:
            return LiteralNode("[]")
        item = self.to_grammar(schema.get("items", True), depth + 1)
        between = ", " if self._python else ","
        return SequenceNode(
            (LiteralNode("["), RepeatNode(item, between, least, most), LiteralNode("]"))
        )

    def _object(self, schema: JsonSchema, depth: int) -> GrammarNode:
        properties, rest = schema.get("properties"), schema.get("additionalProperties", True)
        required = schema.get("required", [])
        if not isinstance(properties, Mapping) or not properties or not isinstance(required, list):
            raise InexpressibleSchema("an object of any keys")
        if rest is not False or not set(required) <= set(properties):
            raise InexpressibleSchema("an object of more keys")
        items = [
            (
                SequenceNode((LiteralNode(self.key(key)), self.to_grammar(one, depth + 1))),
                key in required,
            )
            for key, one in properties.items()
        ]
        between = ", " if self._python else ","
        return SequenceNode((LiteralNode("{"), ordered_grammar(items, between), LiteralNode("}")))

    def key(self, key: str) -> str:
        """A key of an object, up to its value."""
        if self._python:
            return f"{key!r}: "
        bare = re.fullmatch(r"[^,:{}\[\]<>\"'\s]+", key)
        return f"{key}:" if bare else f"{json.dumps(key, ensure_ascii=False)}:"


_SCALARS = ("string", "boolean", "null")


def ordered_grammar(items: Sequence[tuple[GrammarNode, bool]], between: str) -> GrammarNode:
    """These in their order, `between` each two; those that are not required may be left out."""
    if not between:
        return SequenceNode(tuple(one if needed else _optional(one) for one, needed in items))
    ways: list[GrammarNode] = []
    for place, (first, needed) in enumerate(items):
        later = [SequenceNode((LiteralNode(between), one)) for one, _ in items[place + 1 :]]
        wanted = [need for _, need in items[place + 1 :]]
        rest = [one if need else _optional(one) for one, need in zip(later, wanted)]
        ways.append(SequenceNode((first, *rest)))
        if needed:
            break
    if not ways or not any(needed for _, needed in items):
        ways.append(SequenceNode(()))
    return ways[0] if len(ways) == 1 else AlternationNode(tuple(ways))


def _optional(node: GrammarNode) -> GrammarNode:
    return RepeatNode(node, min_count=0, max_count=1)

"""Values of arguments as forms, in the notations that are not JSON through and through.

    between tags     strings as they stand, other values as JSON         Tagged
    literals         of Python, or with quotes and keys of their own     literal()

What a form allows, the reader of the dialect (quire.text.tools) reads into a value that the schema
allows: that is the contract, and where it cannot be kept Inexpressible is raised. It is narrower
than the schema in places: text between tags cannot hold the tag that ends it. One gap is left: a
string within JSON between tags can, and then the reader sees the value end there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.binding.schemas import Inexpressible, Schema, alone, asserted, resolved
from quire.grammar.forms import Choice, Either, Form, Json, Regex, Repeat, Seq, Text, Until
from quire.text.tools._typed import as_json
from quire.text.tools._write import written
from quire.text.tools.base import Written

_READ_ALIKE = frozenset({"null", "boolean"})
"""Kinds of which a text that looks like one may as well be one, if the schema allows any."""
_NO_TEXT = ["array", "boolean", "null", "number", "object"]
_LOOSE_PATTERN = re.compile(r"(?<!\\)\.|\[\^|\\[SWDPsp]|<")
"""In a pattern: may match the tag that ends a value."""


@dataclass(frozen=True, slots=True)
class Tagged:
    """Where a value stands between tags.

    close: the tag that ends it, which `after` holds. kinds: as what the reader takes it. typed: the
    tags say whether it is text or JSON; then these are those of text, and `json` those of JSON.
    """

    before: str
    after: str
    close: str
    kinds: frozenset[str]
    json: tuple[str, str] | None = None

    def form(self, schema: object, root: Schema) -> Form:
        """Everything from the first tag to the last. Raises Inexpressible."""
        texts, others = split(schema, root)
        if self.json is not None and texts and not (others or asserted(texts[0])):
            others = [{"type": _NO_TEXT}]
        parts = [self._text(one, root, mixed=bool(others)) for one in texts]
        begin, end = self.json or (self.before, self.after)
        for one in others:
            parts.append(Seq((Text(begin), self._other(one, root), Text(end))))
        if not parts:
            raise Inexpressible("a value that nothing is allowed for")
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _other(self, schema: object, root: Schema) -> Form:
        """A value that is no string."""
        if not isinstance(schema, Mapping) or self.json is not None:
            return Json(alone(schema, root))
        values = _values(schema)
        if values is None:
            return Json(alone(schema, root))
        return _one_of([text for value in values if (text := self._read_back(value)) is not None])

    def _text(self, schema: Schema, root: Schema, *, mixed: bool) -> Form:
        """A value that is a string, as it stands."""
        words = asserted(schema) - {"type"}
        before, after = Text(self.before), Text(self.after)
        values = _values(schema)
        if values is not None:
            texts = [text for value in values if (text := self._read_back(value)) is not None]
            return Seq((before, _one_of(texts), after))
        if words & {"pattern", "format", "minLength", "maxLength"}:
            self._need_plain(mixed)
            return Seq((before, Regex(_pattern(schema, words, self.close[0])), after))
        rest = self.after[self.after.index(self.close) + len(self.close) :]
        if mixed and self.json is None and not self.kinds <= _READ_ALIKE | {"string"}:
            return Seq((before, self._no_json(), *([Text(rest)] if rest else [])))
        return Seq((before, Until(self.close), *([Text(rest)] if rest else [])))

    def _no_json(self) -> Form:
        """Text that nobody takes for a number, a list or an object."""
        first = Regex(rf"[^\s0-9+\-(\[{{{re.escape(self.close[0])}]")
        layout = self.after[: self.after.index(self.close)]
        empty = [Text(self.close), *([Text(layout + self.close)] if layout else [])]
        return Either((Seq((first, Until(self.close))), *empty))

    def _need_plain(self, mixed: bool) -> None:
        if mixed and self.json is None and not self.kinds <= _READ_ALIKE | {"string"}:
            raise Inexpressible("a limited string or something else")

    def _read_back(self, value: object) -> str | None:
        """The text of a value, if what is read is the value again."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if self.json is not None:
            return text if self.close not in text else None
        kinds = self.kinds - {"string"}
        told = as_json(text, kinds) if kinds else json.dumps(text)
        same = json.loads(told) == value and isinstance(json.loads(told), bool) == isinstance(
            value, bool
        )
        return text if same and self.close not in text else None


def _one_of(texts: Sequence[str]) -> Form:
    if not texts:
        raise Inexpressible("none of the values allowed")
    filled = [text for text in texts if text]
    if len(filled) == len(texts):
        return Choice(tuple(dict.fromkeys(texts)))
    return Repeat(Choice(tuple(dict.fromkeys(filled))), least=0, most=1) if filled else Seq(())


def _values(schema: Schema) -> list[object] | None:
    """The values that a schema lists, if it does."""
    words = asserted(schema) - {"type"}
    if not words & {"enum", "const"}:
        return None
    if len(words) > 1:
        raise Inexpressible(f"{min(words & {'enum', 'const'})!r} beside other keywords")
    listed = schema.get("enum", [schema.get("const")])
    if not isinstance(listed, list):
        raise Inexpressible("an 'enum' that is no list")
    kinds = _types(schema)
    return [value for value in listed if kinds is None or kind_of(value) & kinds]


def kind_of(value: object) -> frozenset[str]:
    """The types of JSON Schema that a value has."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    plain = {str: "string", float: "number", type(None): "null", list: "array"}
    return frozenset({plain.get(type(value), "object")})


def _types(schema: Schema) -> frozenset[str] | None:
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    return frozenset(map(str, named)) if isinstance(named, list) else None


def _pattern(schema: Schema, words: set[str], never: str) -> str:
    """A regular expression for a string that is limited. never: characters not to be in it."""
    if words == {"pattern"}:
        pattern = str(schema["pattern"])
        if _LOOSE_PATTERN.search(pattern):
            raise Inexpressible(f"the pattern {pattern!r:.80}, which may match markup")
        if not (pattern.startswith("^") and pattern.endswith("$")) or pattern.endswith("\\$"):
            raise Inexpressible(f"the pattern {pattern!r:.80}, which leaves an end open")
        inner = pattern[1:-1]
        if "^" in inner.replace("[^", "") or "$" in inner.replace("\\$", "") or "|" in inner:
            raise Inexpressible(f"the pattern {pattern!r:.80}")
        return inner
    if words <= {"minLength", "maxLength"}:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        return f"[^{re.escape(never)}]{{{least},{'' if most is None else most}}}"
    raise Inexpressible(f"{' and '.join(sorted(words))} of a string")


def split(schema: object, root: Schema) -> tuple[list[Schema], list[object]]:
    """The schema of a value as those of its strings and those of all else. Either list is "or"."""
    if not isinstance(schema, Mapping):
        if schema is False:
            raise Inexpressible("a value that nothing is allowed for")
        return [{}], []
    schema = resolved(schema, root)
    words = asserted(schema)
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        if word in words and isinstance(options, list):
            return _split_options(schema, options, words - {word}, root)
    if words & {"enum", "const"}:
        return _split_values(schema)
    types = _types(schema)
    if types is None:
        return _split_untyped(schema, words)
    others = sorted(types - {"string"})
    texts: list[Schema] = [{**schema, "type": "string"}] if "string" in types else []
    if not texts:
        return [], [schema]
    return texts, [{**schema, "type": others}] if others else []


def _split_options(
    schema: Schema, options: list[object], beside: set[str], root: Schema
) -> tuple[list[Schema], list[object]]:
    texts: list[Schema] = []
    others: list[object] = []
    for option in options:
        more, rest = split(option, root)
        texts += more
        others += rest
    if not beside:
        return texts, others
    if not texts:
        return [], [schema]
    if beside == {"type"} and schema["type"] == "string" and not others:
        return texts, []
    raise Inexpressible(f"{min(beside)!r} beside other keywords, for what may be a string")


def _split_values(schema: Schema) -> tuple[list[Schema], list[object]]:
    values = _values(schema) or []
    texts = [value for value in values if isinstance(value, str)]
    others = [value for value in values if not isinstance(value, str)]
    return [{"enum": texts}] if texts else [], [{"enum": others}] if others else []


def _split_untyped(schema: Schema, words: set[str]) -> tuple[list[Schema], list[object]]:
    """What the reader takes such a value for, and where it says nothing: text."""
    if words & {"allOf", "not", "if", "$dynamicRef", "$recursiveRef"}:
        raise Inexpressible(f"{min(words)!r} for what may be a string")
    if words & {"properties", "items"}:
        kind = "object" if "properties" in words else "array"
        return [], [{**schema, "type": kind}]
    return [schema], []


# -- literals -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Literals:
    """A notation of values: Python's, or braces with quotes of their own."""

    how: Written
    root: Schema

    @property
    def _python(self) -> bool:
        return self.how.values == "python"

    def form(self, schema: object, depth: int = 0) -> Form:
        """A value. Where the notation's own way does not do, the JSON that its readers take too."""
        try:
            return self._own(schema, depth)
        except Inexpressible:
            return Json(alone(schema, self.root))

    def _own(self, schema: object, depth: int) -> Form:
        if schema is True or schema == {}:
            return Either((Json("true"), *(self._scalar(one) for one in _SCALARS)))
        if not isinstance(schema, Mapping) or depth > 6:
            raise Inexpressible("deep")
        schema = resolved(schema, self.root)
        values = _values(schema)
        if values is not None:
            return Either(tuple(Text(written(self.how, value)) for value in values))
        words = asserted(schema)
        for word in ("anyOf", "oneOf"):
            options = schema.get(word)
            if words == {word} and isinstance(options, list) and options:
                return Either(tuple(self.form(one, depth + 1) for one in options))
        types = _types(schema)
        if not types:
            raise Inexpressible("no type")
        return Either(tuple(self._typed(one, schema, words, depth) for one in sorted(types)))

    def _typed(self, kind: str, schema: Schema, words: set[str], depth: int) -> Form:
        if kind == "array" and words <= {"type", "items", "minItems", "maxItems"}:
            return self._array(schema, depth)
        if kind == "object" and words <= {"type", "properties", "required", "additionalProperties"}:
            return self._object(schema, depth)
        plain = Json(alone({**schema, "type": kind}, self.root))
        if kind == "string":
            own = self.string() if words == {"type"} else self._limited(schema, words - {"type"})
            return plain if own is None else Either((plain, own))
        is_word = kind in ("boolean", "null") and self._python
        return self._scalar(kind) if is_word else plain

    def _scalar(self, kind: str) -> Form:
        if kind == "string":
            return self.string()
        words = {"boolean": (True, False), "null": (None,)}[kind]
        return Choice(tuple(written(self.how, word) for word in words))

    def string(self) -> Form:
        """Any text in the notation's own quotes."""
        if self._python:
            return Regex(r"'([^'\\\x00-\x1f]|\\['\\nrt])*'")
        return Seq((Text(self.how.quote), Until(self.how.quote)))

    def _limited(self, schema: Schema, words: set[str]) -> Form | None:
        """Such a string in the notation's own quotes, if there is a way to say it."""
        quote = "'" if self._python else self.how.quote
        try:
            pattern = _pattern(schema, words, "'\\" if self._python else quote[0])
        except Inexpressible:
            return None
        if "pattern" in words and (quote[0] in pattern or r"\\" in pattern):
            return None
        return Seq((Text(quote), Regex(pattern), Text(quote)))

    def _array(self, schema: Schema, depth: int) -> Form:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(least, int) or not isinstance(most, int | None):
            raise Inexpressible("malformed 'minItems' or 'maxItems'")
        if most == 0:
            return Text("[]")
        item = self.form(schema.get("items", True), depth + 1)
        between = ", " if self._python else ","
        return Seq((Text("["), Repeat(item, between, least, most), Text("]")))

    def _object(self, schema: Schema, depth: int) -> Form:
        properties, rest = schema.get("properties"), schema.get("additionalProperties", True)
        required = schema.get("required", [])
        if not isinstance(properties, Mapping) or not properties or not isinstance(required, list):
            raise Inexpressible("an object of any keys")
        if rest is not False or not set(required) <= set(properties):
            raise Inexpressible("an object of more keys")
        items = [
            (Seq((Text(self.key(key)), self.form(one, depth + 1))), key in required)
            for key, one in properties.items()
        ]
        between = ", " if self._python else ","
        return Seq((Text("{"), in_order(items, between), Text("}")))

    def key(self, key: str) -> str:
        """A key of an object, up to its value."""
        if self._python:
            return f"{key!r}: "
        bare = re.fullmatch(r"[^,:{}\[\]<>\"'\s]+", key)
        return f"{key}:" if bare else f"{json.dumps(key, ensure_ascii=False)}:"


_SCALARS = ("string", "boolean", "null")


def in_order(items: Sequence[tuple[Form, bool]], between: str) -> Form:
    """These in their order, `between` each two; those that are not required may be left out."""
    if not between:
        return Seq(tuple(one if needed else _maybe(one) for one, needed in items))
    ways: list[Form] = []
    for place, (first, needed) in enumerate(items):
        later = [Seq((Text(between), one)) for one, _ in items[place + 1 :]]
        wanted = [need for _, need in items[place + 1 :]]
        rest = [one if need else _maybe(one) for one, need in zip(later, wanted)]
        ways.append(Seq((first, *rest)))
        if needed:
            break
    if not ways or not any(needed for _, needed in items):
        ways.append(Seq(()))
    return ways[0] if len(ways) == 1 else Either(tuple(ways))


def _maybe(form: Form) -> Form:
    return Repeat(form, least=0, most=1)

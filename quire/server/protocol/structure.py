"""The form of an answer, in the words of all dialects -> one `Structure`.

Two forms at once are refused, both named. Not here: what a form may ask (quire.grammar.admit).
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from quire.core.structured import (
    GUIDED,
    GUIDED_HOW,
    StructuredOutputsParams,
    guided,
    in_words_of,
)
from quire.errors import RequestError
from quire.server.asked import Structure
from quire.server.protocol.base import Body, Texts
from quire.server.strict import Ignored

KINDS = ("text", "json_object", "json_schema", "structural_tag", "grammar")
"""Types of a format."""

_LABELS = ("name", "description")
"""They tell people what a schema is for; nobody shows them to the model here."""


class StructuredBody(Body):
    """What the text of the answer must look like; the same words on every route."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_decoding: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    structural_tag: str | dict[str, Any] | None = None

    def structure(self) -> Structure | None:
        """The form that is asked for. Raises RequestError in the client's words."""
        asked = [one for one in self._structures() if one is not None]
        if len(asked) > 1:
            first, second = asked[0].word, asked[1].word
            message = f"give {first} or {second}, not both: an answer has one form"
            raise RequestError(message, param=second)
        return asked[0] if asked else None

    def formats(self) -> Iterable[tuple[str, Mapping[str, Any] | None]]:
        """Objects with a `type` that say the form, and where they stand."""
        return [("response_format", self.response_format)]

    def ignored(self) -> list[Ignored]:
        found = super().ignored()
        for where, given in self.formats():
            found += _ignored(where, given or {})
        how = [name for name in GUIDED_HOW if getattr(self, name) is not None]
        if how and self.structure() is None:
            found += [Ignored(name, True) for name in how]
        return found

    def _structures(self) -> Iterable[Structure | None]:
        how = {GUIDED[name]: getattr(self, name) for name in GUIDED_HOW}
        for where, given in self.formats():
            yield _of_format(where, given, how)
        yield _of_params("structured_outputs", self.structured_outputs)
        yield _of_params("guided_decoding", self.guided_decoding)
        yield self._guided()

    def _guided(self) -> Structure | None:
        given = {name: getattr(self, name) for name in GUIDED}
        if isinstance(given["structural_tag"], dict):
            given["structural_tag"] = json.dumps(given["structural_tag"])
        found = guided(given)
        if found is None:
            return None
        wanted, word = found
        words = {today: name for name, today in GUIDED.items()}
        return Structure(word=word, param=word, wanted=wanted, words=words)


def _of_params(where: str, given: Mapping[str, Any] | None) -> Structure | None:
    """Of the fields of StructuredOutputsParams."""
    if given is None:
        return None
    given = dict(given)
    if isinstance(given.get("structural_tag"), dict):
        given["structural_tag"] = json.dumps(given["structural_tag"])
    words = {name: f"{where}.{name}" for name in StructuredOutputsParams.__slots__}
    words["structured_outputs"] = where
    with in_words_of(words):
        wanted = StructuredOutputsParams.of(given, where)
    return Structure(word=where, param=words[wanted.kind.value], wanted=wanted, words=words)


def _of_format(
    where: str, given: Mapping[str, Any] | None, how: Mapping[str, Any]
) -> Structure | None:
    """Of an object with a type. how: settings that stand beside it."""
    if given is None:
        return None
    kind = given.get("type")
    if kind not in KINDS:
        allowed = ", ".join(KINDS)
        message = f"{where}.type must be one of {allowed}, got {reprlib.repr(kind)}"
        raise RequestError(message, param=f"{where}.type")
    if kind == "text":
        return None
    place, fields = _FORMATS[kind](where, given)
    words = dict.fromkeys(("json", "json_object", "structural_tag", "grammar"), place)
    words |= {today: name for name, today in GUIDED_HOW.items()}
    with in_words_of(words):
        wanted = StructuredOutputsParams(**how, **fields)
    return Structure(word=where, param=place, wanted=wanted, words=words, is_content=True)


def _json_schema(where: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """OpenAI's chat has it in an object of its own, Responses and others flat."""
    inner = given.get("json_schema", given if "schema" in given else None)
    place = f"{where}.json_schema" if inner is not given else where
    if not isinstance(inner, Mapping):
        raise _wrong(place, "an object with a 'schema'", inner)
    for name in _LABELS:
        if not isinstance(inner.get(name, ""), str | None):
            raise _wrong(f"{place}.{name}", "text", inner[name])
    strict = inner.get("strict")
    if not isinstance(strict, bool | None):
        raise _wrong(f"{place}.strict", "true or false", strict)
    return f"{place}.schema", {
        "json": _schema(f"{place}.schema", inner.get("schema")),
        "disable_additional_properties": bool(strict),
    }


def _json_object(where: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Some servers read a schema here."""
    if given.get("schema") is None:
        return where, {"json_object": True}
    return f"{where}.schema", {"json": _schema(f"{where}.schema", given["schema"])}


def _structural_tag(where: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return where, {"structural_tag": json.dumps(given)}


def _grammar(where: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return f"{where}.grammar", {"grammar": given.get("grammar", "")}


def _schema(place: str, given: object) -> str | dict[str, Any]:
    if isinstance(given, bool):
        return json.dumps(given)
    if not isinstance(given, dict):
        raise _wrong(place, "a JSON schema: an object", given)
    return given


_FORMATS = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "structural_tag": _structural_tag,
    "grammar": _grammar,
}
"""Type of a format -> where the form stands in it, and fields of StructuredOutputsParams."""

_READ = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema", "schema", "strict"),
    "structural_tag": ("format", "structures", "triggers", "at_least_one", "stop_after_first"),
    "grammar": ("grammar",),
}


def _ignored(where: str, given: Mapping[str, Any]) -> list[Ignored]:
    read = _READ.get(str(given.get("type")), ())
    found = [(where, name) for name in given if name not in ("type", *read)]
    inner = given.get("json_schema")
    if isinstance(inner, Mapping):
        found += [
            (f"{where}.json_schema", name) for name in inner if name not in ("schema", "strict")
        ]
    return [Ignored(f"{place}.{name}", name in _LABELS) for place, name in found]


def _wrong(place: str, allowed: str, given: object) -> RequestError:
    return RequestError(f"{place} must be {allowed}, got {reprlib.repr(given)}", param=place)

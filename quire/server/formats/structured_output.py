"""Response formats: converts the fields of all APIs to one `StructuredOutputRequest`.

A request with two formats is refused, and the error names both. quire.grammar.frontends.validate
checks the format itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from quire.core.param_checks import shown_json
from quire.core.structured_output_params import (
    GUIDED_FIELDS,
    GUIDED_OPTIONS,
    StructuredOutputsParams,
    parse_guided_fields,
    translate_error_param,
)
from quire.errors import RequestError
from quire.server.formats.ignored_fields import IgnoredField
from quire.server.formats.request_body import RequestBody, StringList
from quire.server.generation.generation_request import StructuredOutputRequest

_LABELS = ("name", "description")
"""Descriptions for people; the model does not see them here."""


class StructuredOutputFields(RequestBody):
    """Fields that constrain the text of the answer; the same on every route."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_decoding: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: StringList | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    structural_tag: str | dict[str, Any] | None = None

    def structured_output(self) -> StructuredOutputRequest | None:
        """The response format, if there is one. Raises RequestError."""
        asked = [one for one in self._given_outputs() if one is not None]
        if len(asked) > 1:
            first, second = asked[0].field_name, asked[1].field_name
            message = f"give {first} or {second}, not both: an answer has one format"
            raise RequestError(message, param=second)
        return asked[0] if asked else None

    def output_formats(self) -> Iterable[tuple[str, Mapping[str, Any] | None]]:
        """Response format objects, and their field names."""
        return [("response_format", self.response_format)]

    def ignored_fields(self) -> list[IgnoredField]:
        found = super().ignored_fields()
        for where, given in self.output_formats():
            found += _find_ignored_fields(where, given or {})
        how = [name for name in GUIDED_OPTIONS if getattr(self, name) is not None]
        if how and self.structured_output() is None:
            found += [IgnoredField(name, True) for name in how]
        return found

    def _given_outputs(self) -> Iterable[StructuredOutputRequest | None]:
        how = {GUIDED_FIELDS[name]: getattr(self, name) for name in GUIDED_OPTIONS}
        for where, given in self.output_formats():
            yield _from_format(where, given, how)
        yield _from_params("structured_outputs", self.structured_outputs)
        yield _from_params("guided_decoding", self.guided_decoding)
        yield self._from_guided()

    def _from_guided(self) -> StructuredOutputRequest | None:
        given = {name: getattr(self, name) for name in GUIDED_FIELDS}
        if isinstance(given["structural_tag"], dict):
            given["structural_tag"] = json.dumps(given["structural_tag"])
        found = parse_guided_fields(given)
        if found is None:
            return None
        wanted, word = found
        words = {today: name for name, today in GUIDED_FIELDS.items()}
        return StructuredOutputRequest(
            field_name=word, param=word, params=wanted, field_names=words
        )


def _from_params(where: str, given: Mapping[str, Any] | None) -> StructuredOutputRequest | None:
    """Read the fields of StructuredOutputsParams."""
    if given is None:
        return None
    given = dict(given)
    if isinstance(given.get("structural_tag"), dict):
        given["structural_tag"] = json.dumps(given["structural_tag"])
    words = {name: f"{where}.{name}" for name in StructuredOutputsParams.__slots__}
    words["structured_outputs"] = where
    with translate_error_param(words):
        wanted = StructuredOutputsParams.from_mapping(given, where)
    return StructuredOutputRequest(
        field_name=where, param=words[wanted.kind.value], params=wanted, field_names=words
    )


def _from_format(
    where: str, given: Mapping[str, Any] | None, how: Mapping[str, Any]
) -> StructuredOutputRequest | None:
    """From an object with a type. how: settings beside it in the body."""
    if given is None:
        return None
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in RESPONSE_FORMATS:
        allowed = ", ".join(RESPONSE_FORMATS)
        message = f"{where}.type must be one of {allowed}, got {shown_json(kind)}"
        raise RequestError(message, param=f"{where}.type")
    read = RESPONSE_FORMATS[kind].read
    if read is None:
        return None
    place, fields = read(where, given)
    words = dict.fromkeys(fields, place)
    words |= {today: name for name, today in GUIDED_OPTIONS.items()}
    with translate_error_param(words):
        wanted = StructuredOutputsParams(**how, **fields)
    strict = kind == "json_schema" and bool(fields["disable_additional_properties"])
    return StructuredOutputRequest(
        field_name=where,
        param=place,
        params=wanted,
        field_names=words,
        content_only=True,
        strict=strict,
    )


def _read_json_schema(where: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """OpenAI's chat has it in an object of its own, Responses and others flat."""
    inner = given.get("json_schema", given if "schema" in given else None)
    place = f"{where}.json_schema" if inner is not given else where
    if not isinstance(inner, Mapping):
        raise _invalid_format(place, "an object with a 'schema'", inner)
    for name in _LABELS:
        if not isinstance(inner.get(name, ""), str | None):
            raise _invalid_format(f"{place}.{name}", "text", inner[name])
    strict = inner.get("strict")
    if not isinstance(strict, bool | None):
        raise _invalid_format(f"{place}.strict", "true or false", strict)
    return f"{place}.schema", {
        "json": _check_schema(f"{place}.schema", inner.get("schema")),
        "disable_additional_properties": bool(strict),
    }


def _read_json_object(where: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Read json_object, with a schema if one is given, as in some servers."""
    if given.get("schema") is None:
        return where, {"json_object": True}
    return f"{where}.schema", {"json": _check_schema(f"{where}.schema", given["schema"])}


def _read_structural_tag(where: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return where, {"structural_tag": json.dumps(given)}


def _read_grammar(where: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return f"{where}.grammar", {"grammar": given.get("grammar", "")}


def _check_schema(place: str, given: object) -> str | dict[str, Any]:
    if isinstance(given, bool):
        return json.dumps(given)
    if not isinstance(given, dict):
        raise _invalid_format(place, "a JSON schema: an object", given)
    return given


class ResponseFormat(NamedTuple):
    """One type of `response_format`.

    read: (where the object is, the object) -> (where its constraint is, fields of
    StructuredOutputsParams); None: the type constrains nothing.
    """

    read: Callable[[str, Mapping[str, Any]], tuple[str, dict[str, Any]]] | None
    fields: tuple[str, ...] = ()
    """Fields of the object that are read; others are reported as ignored."""


_TAG_FIELDS = ("format", "structures", "triggers", "at_least_one", "stop_after_first")

RESPONSE_FORMATS = {
    "text": ResponseFormat(None),
    "json_object": ResponseFormat(_read_json_object, ("schema",)),
    "json_schema": ResponseFormat(_read_json_schema, ("json_schema", "schema", "strict")),
    "structural_tag": ResponseFormat(_read_structural_tag, _TAG_FIELDS),
    "grammar": ResponseFormat(_read_grammar, ("grammar",)),
}
"""By type. A new one is an entry here, for all APIs."""


def _find_ignored_fields(where: str, given: Mapping[str, Any]) -> list[IgnoredField]:
    kind = RESPONSE_FORMATS.get(str(given.get("type")))
    read = () if kind is None else kind.fields
    found = [(where, name) for name in given if name not in ("type", *read)]
    inner = given.get("json_schema")
    if isinstance(inner, Mapping):
        found += [
            (f"{where}.json_schema", name) for name in inner if name not in ("schema", "strict")
        ]
    return [IgnoredField(f"{place}.{name}", name in _LABELS) for place, name in found]


def _invalid_format(place: str, allowed: str, given: object) -> RequestError:
    return RequestError(f"{place} must be {allowed}, got {shown_json(given)}", param=place)

"""Splits the JSON schemas of functions into the schemas of their parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quire.grammar.json_schema import formats

JsonSchema = Mapping[str, object]

ANNOTATION_KEYWORDS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "$anchor", "$defs", "definitions", "strict"),
        *("contentEncoding", "contentMediaType", "contentSchema", "nullable", "example"),
    }
)
"""Keywords that allow everything."""

_DEFINITION_KEYWORDS = ("$defs", "definitions")


class InexpressibleSchema(Exception):
    """The format cannot express exactly what this schema allows."""


@dataclass(frozen=True, slots=True)
class FunctionParameter:
    """A parameter of a function."""

    name: str
    schema: object
    required: bool


@dataclass(frozen=True, slots=True)
class FunctionParameters:
    """Parameters of a function. additional: the schema of any other; None: there are no others."""

    named: tuple[FunctionParameter, ...]
    additional: object | None


def arguments_schema(schema: JsonSchema) -> dict[str, object]:
    """The schema of a function's arguments, which are an object.

    Where properties are named and others are not mentioned, there are no others: a function takes
    the arguments that it takes.
    """
    if not schema:
        return {"type": "object"}
    made = {"type": "object", **schema}
    says_more = ("additionalProperties", "patternProperties", "unevaluatedProperties")
    mixed = ("$ref", "anyOf", "oneOf", "allOf", "if", "dependentSchemas", "propertyNames")
    if "properties" in made and not any(word in made for word in (*says_more, *mixed)):
        made["additionalProperties"] = False
    return made


def function_parameters(root: JsonSchema) -> FunctionParameters:
    """The parameters one by one. Raises InexpressibleSchema for schemas with other keywords."""
    schema = resolve_schema(arguments_schema(root), root)
    if schema.get("type") not in ("object", ["object"], None):
        raise InexpressibleSchema("arguments that are no object")
    words = {"type", "properties", "required", "additionalProperties"}
    for word in schema:
        if word not in words and is_assertion(word):
            raise InexpressibleSchema(f"{word!r} of all the arguments")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise InexpressibleSchema("malformed 'properties' or 'required'")
    rest = schema.get("additionalProperties", True)
    named = [FunctionParameter(key, one, key in required) for key, one in properties.items()]
    missing = [key for key in required if key not in properties]
    if missing and rest is False:
        raise InexpressibleSchema(f"{missing[0]!r} is required and not allowed")
    named += [FunctionParameter(key, rest, True) for key in missing if isinstance(key, str)]
    named = [one for one in named if one.schema is not False or _is_required(one)]
    return FunctionParameters(tuple(named), None if rest is False else rest)


def _is_required(one: FunctionParameter) -> bool:
    if one.required:
        raise InexpressibleSchema(f"{one.name!r} is required and nothing is allowed there")
    return False


def is_assertion(word: str) -> bool:
    """Whether a keyword forbids anything. JSON Schema ignores unknown keywords."""
    return word not in ANNOTATION_KEYWORDS and word in _ASSERTING


_ASSERTING = frozenset(
    {
        *("type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "$ref"),
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
        *("dependencies", "unevaluatedProperties", "items", "prefixItems", "contains"),
        *("minContains", "maxContains", "minItems", "maxItems", "unevaluatedItems"),
        *("additionalItems", "minLength", "maxLength", "pattern", "format", "$dynamicRef"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("$recursiveRef",),
    }
)


def assertion_keywords(schema: JsonSchema) -> set[str]:
    """The keywords of a schema that forbid something."""
    found = {word for word in schema if is_assertion(word)}
    return found if schema.get("format") in formats.KNOWN else found - {"format"}


def resolve_schema(schema: JsonSchema, root: JsonSchema) -> JsonSchema:
    """The schema without references and wrappings around all of it. Raises InexpressibleSchema."""
    for _ in range(32):
        inner = _unwrap(schema, root)
        if inner is None:
            return schema
        schema = inner
    raise InexpressibleSchema("references that lead in a circle")


def _unwrap(schema: JsonSchema, root: JsonSchema) -> JsonSchema | None:
    """The schema that a reference or a single allOf refers to; None: this is neither."""
    words = assertion_keywords(schema)
    if "$ref" in words:
        if words - {"$ref", "type"}:
            raise InexpressibleSchema("'$ref' beside other keywords")
        return _resolve_reference(schema["$ref"], root)
    whole = schema.get("allOf")
    if words - {"type"} == {"allOf"} and isinstance(whole, list) and len(whole) == 1:
        return whole[0] if isinstance(whole[0], Mapping) else None
    return None


def _resolve_reference(reference: object, root: JsonSchema) -> JsonSchema:
    if reference == "#":
        return root
    if not isinstance(reference, str) or not reference.startswith("#/"):
        raise InexpressibleSchema(f"the reference {reference!r:.80}")
    found: object = root
    for part in reference[2:].split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or part not in found:
            raise InexpressibleSchema(f"the reference {reference!r:.80}, which leads nowhere")
        found = found[part]
    if isinstance(found, Mapping):
        return found
    raise InexpressibleSchema(f"the reference {reference!r:.80} to no object")


def standalone_schema(schema: object, root: JsonSchema) -> str:
    """A part of the root's schema as the text of a schema of its own."""
    references = list(_references(schema)) if isinstance(schema, Mapping) else []
    if not references:
        return json.dumps(schema, ensure_ascii=False)
    assert isinstance(schema, Mapping)
    shelves = {name: root[name] for name in _DEFINITION_KEYWORDS if name in root}
    for reference in (*references, *_references(shelves)):
        if not reference.startswith(("#/$defs/", "#/definitions/")):
            raise InexpressibleSchema(f"the reference {reference!r:.80}")
    return json.dumps({**schema, **shelves}, ensure_ascii=False)


def _references(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            if key == "$ref" and isinstance(one, str):
                yield one
            elif key not in ("enum", "const", "default", "examples"):
                yield from _references(one)
    elif isinstance(value, list):
        for one in value:
            yield from _references(one)

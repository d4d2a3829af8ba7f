"""The schema of a Json form, read; and closed where the form says so."""

from __future__ import annotations

import json
from typing import Any

from quire.errors import RequestError
from quire.grammar.grammar_ast import JsonNode

_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains")
_ADDITIONAL_KEYWORDS = ("additionalProperties", "unevaluatedProperties", "patternProperties")


def closed_schema(form: JsonNode) -> Any:
    """The schema as data. Admission closes schemas itself; this is for forms made by hand."""
    try:
        schema = json.loads(form.schema)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not JSON: {error}") from None
    return _close(schema) if form.closed else schema


def _close(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key in _SCHEMA_MAPS:
        if isinstance(made.get(key), dict):
            made[key] = {name: _close(one) for name, one in made[key].items()}
    for key in _SCHEMA_LISTS:
        if isinstance(made.get(key), list):
            made[key] = [_close(one) for one in made[key]]
    for key in _SINGLE_SCHEMAS:
        if key in made:
            made[key] = _close(made[key])
    if "properties" in made and not any(key in made for key in _ADDITIONAL_KEYWORDS):
        made["additionalProperties"] = False
    return made

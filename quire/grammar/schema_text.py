"""The schema of a Json form, read; and closed where the form says so."""

from __future__ import annotations

import json
from typing import Any

from quire.errors import RequestError
from quire.grammar.forms import Json

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONES = ("items", "additionalProperties", "not", "if", "then", "else", "contains")
_SAYS = ("additionalProperties", "unevaluatedProperties", "patternProperties")


def closed(form: Json) -> Any:
    """The schema as data. Admission closes schemas itself; this is for forms made by hand."""
    try:
        schema = json.loads(form.schema)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not JSON: {error}") from None
    return _closed(schema) if form.closed else schema


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key in _MAPS:
        if isinstance(made.get(key), dict):
            made[key] = {name: _closed(one) for name, one in made[key].items()}
    for key in _LISTS:
        if isinstance(made.get(key), list):
            made[key] = [_closed(one) for one in made[key]]
    for key in _ONES:
        if key in made:
            made[key] = _closed(made[key])
    if "properties" in made and not any(key in made for key in _SAYS):
        made["additionalProperties"] = False
    return made

"""What a JSON Schema may ask: rewritten exactly into what the backends honour, or refused."""

from __future__ import annotations

import json

from quire.errors import RequestError


def rewritten(text: str, closed: bool) -> str:
    """The schema in keywords that every backend honours. Raises RequestError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the schema is no JSON: {error}") from None
    if not isinstance(value, dict | bool):
        raise RequestError("a schema is an object, true or false")
    return text

"""Renders the parts of calls in the format of a model, for grammars that force calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from quire.text.tools._value_parsers import escape_json
from quire.text.tools.base import CallTemplate, ToolFormat

_PLACEHOLDER = re.compile("«([a-z]+)»")


@dataclass(frozen=True, slots=True)
class CallFrame:
    """The text around the arguments of one call of a function.

    Several calls are template.before, frames separated by template.between, template.after.
    """

    begin: str
    end: str
    template: CallTemplate
    """Its `notation` decides the text between begin and end: "json" one JSON object, "params" any
    number of `template.param`, and so on."""


def call_frame(tool_format: ToolFormat, name: str, place: int | str = 0) -> CallFrame:
    """Texts that a model writes before and after the arguments of a call of this function.

    place: which call it is, or a text that is to stand where models write that.
    """
    template = tool_format.template
    middle = "«arguments»" if "«arguments»" in template.call else "«params»"
    begin, _, end = template.call.partition(middle)
    known = _placeholders(template, name, place)
    return CallFrame(_fill(begin, known), _fill(end, known), template)


def _placeholders(template: CallTemplate, name: str, place: int | str) -> dict[str, str]:
    return {"name": escape_json(name) if template.name_in_json else name, "place": str(place)}


def _fill(template: str, known: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda found: known[found[1]], template)


def render_value(template: CallTemplate, item: object) -> str:
    """A value as it is written among the arguments of a call."""
    if template.notation == "python":
        return repr(item)
    if template.notation == "braces":
        return _to_braces(item, template.quote)
    return (
        item
        if isinstance(item, str) and template.notation in ("params", "elements")
        else _to_json(item)
    )


def param_frame(template: CallTemplate, key: str, *, text: bool) -> tuple[str, str]:
    """The text before and after the value of a parameter. text: the value is marked as text."""
    begin, _, end = template.param.partition("«value»")
    known = {"key": key, "type": template.text_attribute if text else template.json_attribute}
    return _fill(begin, known), _fill(end, known)


def _to_json(item: object) -> str:
    return json.dumps(item, ensure_ascii=False)


def _to_braces(item: object, quote: str) -> str:
    """As FunctionGemma writes: keys bare, strings between tokens."""
    if isinstance(item, Mapping):
        return "{" + ",".join(f"{key}:{_to_braces(one, quote)}" for key, one in item.items()) + "}"
    if isinstance(item, (list, tuple)):
        return "[" + ",".join(_to_braces(one, quote) for one in item) + "]"
    return f"{quote}{item}{quote}" if isinstance(item, str) else _to_json(item)

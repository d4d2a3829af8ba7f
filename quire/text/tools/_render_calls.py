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


def call_frame(dialect: ToolFormat, name: str, place: int | str = 0) -> CallFrame:
    """What a model writes before and after the arguments of a call of this function.

    place: which call it is, or a text that is to stand where models write that.
    """
    how = dialect.template
    middle = "«arguments»" if "«arguments»" in how.call else "«params»"
    begin, _, end = how.call.partition(middle)
    known = _placeholders(how, name, place)
    return CallFrame(_fill(begin, known), _fill(end, known), how)


def _placeholders(how: CallTemplate, name: str, place: int | str) -> dict[str, str]:
    return {"name": escape_json(name) if how.name_in_json else name, "place": str(place)}


def _fill(template: str, known: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda found: known[found[1]], template)


def render_value(how: CallTemplate, item: object) -> str:
    """A value as it stands among the arguments of a call."""
    if how.notation == "python":
        return repr(item)
    if how.notation == "braces":
        return _to_braces(item, how.quote)
    return (
        item if isinstance(item, str) and how.notation in ("params", "elements") else _to_json(item)
    )


def param_frame(how: CallTemplate, key: str, *, text: bool) -> tuple[str, str]:
    """The text before and after the value of a parameter. text: the value is marked as text."""
    begin, _, end = how.param.partition("«value»")
    known = {"key": key, "type": how.text_attribute if text else how.json_attribute}
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

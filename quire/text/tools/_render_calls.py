"""Renders calls in the format of a model: the inverse of parsing.

For the history of a conversation, for tests, and for output that is forced to begin as a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.text.tools._value_parsers import escape_json
from quire.text.tools.base import CallTemplate, ToolFormat

_PLACEHOLDER = re.compile("«([a-z]+)»")


@dataclass(frozen=True, slots=True)
class CallToRender:
    """A call to be written."""

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallFrame:
    """What stands around the arguments of one call of a function.

    Several calls are written.before, frames with written.between between them, written.after.
    """

    begin: str
    end: str
    template: CallTemplate
    """Its `values` say what stands between: "json" one JSON object, "params" any number of
    written.param, ..."""


def render_calls(dialect: ToolFormat, calls: Sequence[CallToRender]) -> str:
    """The text of these calls."""
    how = dialect.template
    texts = [_render_call(how, call, place) for place, call in enumerate(calls)]
    return how.before + how.between.join(texts) + how.after


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


def _render_call(how: CallTemplate, call: CallToRender, place: int) -> str:
    known = _placeholders(how, call.name, place)
    if how.notation == "json":
        known["arguments"] = _to_json(call.arguments)
    elif how.notation == "braces":
        known["arguments"] = _to_braces(call.arguments, how.quote)
    else:
        items = [_render_param(how, key, item) for key, item in call.arguments.items()]
        known["params"] = how.param_between.join(items)
    return _fill(how.call, known)


def _fill(template: str, known: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda found: known[found[1]], template)


def render_value(how: CallTemplate, item: object) -> str:
    """A value as it stands among the arguments of a call."""
    if how.notation == "python":
        return repr(item)
    if how.notation == "braces":
        return _to_braces(item, how.quote)
    return item if how.notation == "params" and isinstance(item, str) else _to_json(item)


def param_frame(how: CallTemplate, key: str, *, text: bool) -> tuple[str, str]:
    """The text before and after the value of a parameter. text: the value is marked as text."""
    begin, _, end = how.param.partition("«value»")
    known = {"key": key, "type": how.text_attribute if text else how.json_attribute}
    return _fill(begin, known), _fill(end, known)


def _render_param(how: CallTemplate, key: str, item: object) -> str:
    begin, end = param_frame(how, key, text=isinstance(item, str))
    return begin + render_value(how, item) + end


def _to_json(item: object) -> str:
    return json.dumps(item, ensure_ascii=False)


def _to_braces(item: object, quote: str) -> str:
    """As FunctionGemma writes: keys bare, strings between tokens."""
    if isinstance(item, Mapping):
        return "{" + ",".join(f"{key}:{_to_braces(one, quote)}" for key, one in item.items()) + "}"
    if isinstance(item, (list, tuple)):
        return "[" + ",".join(_to_braces(one, quote) for one in item) + "]"
    return f"{quote}{item}{quote}" if isinstance(item, str) else _to_json(item)

"""Calls as a model of a dialect would have written them: the inverse of reading.

For the history of a conversation, for tests, and for output that is forced to begin as a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.text.tools._values import escaped
from quire.text.tools.base import Dialect, Written

_PLACE = re.compile("«([a-z]+)»")


@dataclass(frozen=True, slots=True)
class Asked:
    """A call to be written."""

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around the arguments of one call of a function.

    Several calls are written.before, frames with written.between between them, written.after.
    """

    begin: str
    end: str
    written: Written
    """Its `values` say what stands between: "json" one JSON object, "params" any number of
    written.param, ..."""


def render(dialect: Dialect, calls: Sequence[Asked]) -> str:
    """The text of these calls."""
    how = dialect.written
    texts = [_call(how, call, place) for place, call in enumerate(calls)]
    return how.before + how.between.join(texts) + how.after


def frame(dialect: Dialect, name: str, place: int | str = 0) -> Frame:
    """What a model writes before and after the arguments of a call of this function.

    place: which call it is, or a text that is to stand where models write that.
    """
    how = dialect.written
    middle = "«arguments»" if "«arguments»" in how.call else "«params»"
    begin, _, end = how.call.partition(middle)
    known = _known(how, name, place)
    return Frame(_filled(begin, known), _filled(end, known), how)


def _known(how: Written, name: str, place: int | str) -> dict[str, str]:
    return {"name": escaped(name) if how.name_in_json else name, "place": str(place)}


def _call(how: Written, call: Asked, place: int) -> str:
    known = _known(how, call.name, place)
    if how.values == "json":
        known["arguments"] = _json(call.arguments)
    elif how.values == "braces":
        known["arguments"] = _braces(call.arguments, how.quote)
    else:
        items = [_param(how, key, item) for key, item in call.arguments.items()]
        known["params"] = how.param_between.join(items)
    return _filled(how.call, known)


def _filled(template: str, known: Mapping[str, str]) -> str:
    return _PLACE.sub(lambda found: known[found[1]], template)


def written(how: Written, item: object) -> str:
    """A value as it stands among the arguments of a call."""
    if how.values == "python":
        return repr(item)
    if how.values == "braces":
        return _braces(item, how.quote)
    return item if how.values == "params" and isinstance(item, str) else _json(item)


def around(how: Written, key: str, *, text: bool) -> tuple[str, str]:
    """What stands before and after the value of a parameter. text: the value is marked as text."""
    begin, _, end = how.param.partition("«value»")
    known = {"key": key, "type": how.text_attribute if text else how.json_attribute}
    return _filled(begin, known), _filled(end, known)


def _param(how: Written, key: str, item: object) -> str:
    begin, end = around(how, key, text=isinstance(item, str))
    return begin + written(how, item) + end


def _json(item: object) -> str:
    return json.dumps(item, ensure_ascii=False)


def _braces(item: object, quote: str) -> str:
    """As FunctionGemma writes: keys bare, strings between tokens."""
    if isinstance(item, Mapping):
        return "{" + ",".join(f"{key}:{_braces(one, quote)}" for key, one in item.items()) + "}"
    if isinstance(item, (list, tuple)):
        return "[" + ",".join(_braces(one, quote) for one in item) + "]"
    return f"{quote}{item}{quote}" if isinstance(item, str) else _json(item)

"""Whether more stands behind a part of a form that has no clear end.

A reader of lexemes takes such a part as far as it goes: what stands behind it never comes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from quire.grammar import regex
from quire.grammar.forms import Either, Form, Json, Repeat, Seq, Tag, Tags, Text, Until
from quire.grammar.lexemes import Lexemes
from quire.grammar.regular import regular

_ANY_TEXT = Until("\n")
_BEGINS = {
    "object": "{",
    "array": "[",
    "string": '"',
    "integer": "-0123456789",
    "number": "-0123456789",
    "boolean": "tf",
    "null": "n",
}
"""What JSON of a type begins with."""
_ALL = regex.ALL
_READER = Lexemes(lambda node: "")


def goes_on_behind_open_text(form: Form) -> bool:
    """Somewhere in the form a part follows text that has no clear end."""
    if _regular(form) is not None:
        return False
    if isinstance(form, Tag):
        return _row(_opened(form))
    if isinstance(form, Seq):
        return _row(form.parts)
    if isinstance(form, Either):
        return any(map(goes_on_behind_open_text, form.parts))
    if isinstance(form, Tags):
        behind = () if form.only_first else (_ANY_TEXT,)
        return any(_row((*_opened(tag), *behind)) for tag in form.tags)
    if isinstance(form, Repeat):
        again = form.most is None or form.most > 1
        return _row((form.part, Text(form.between), form.part) if again else (form.part,))
    return False


def _row(parts: Iterable[Form]) -> bool:
    known = [part for part in _flat(parts) if not _is_empty(part)]
    run: list[regex.Node] = []
    for at, part in enumerate(known):
        node = _regular(part)
        if node is not None:
            run.append(node)
            continue
        if run and regex.common(_chars(run), _first(part)) and not _READER.is_clear(run):
            return True
        if goes_on_behind_open_text(part) or (_is_open(part) and at + 1 < len(known)):
            return True
        run = []
    return False


def _is_open(form: Form) -> bool:
    """Whether it may end with any text, which could as well go on."""
    if isinstance(form, Tags):
        return not (form.least and form.only_first) or any(map(_is_open, form.tags))
    if isinstance(form, Either):
        return any(map(_is_open, form.parts))
    if isinstance(form, Repeat):
        return form.most != 0 and _is_open(form.part)
    parts = form.parts if isinstance(form, Seq) else _opened(form) if isinstance(form, Tag) else ()
    last = next((part for part in reversed(parts) if not _is_empty(part)), None)
    return last is not None and _is_open(last)


def _first(form: Form) -> regex.Ranges:
    """Characters that its texts may begin with, or more."""
    node = _regular(form)
    if node is not None:
        return regex.ALL
    if isinstance(form, Json):
        return _json_begins(form)
    if isinstance(form, Either):
        return regex.union(*map(_first, form.parts))
    return _ALL


def _json_begins(form: Json) -> regex.Ranges:
    try:
        schema = json.loads(form.schema)
    except (ValueError, RecursionError):
        schema = None  # the compiler says so
    kind = schema.get("type") if isinstance(schema, dict) else None
    chars = _BEGINS.get(kind) if isinstance(kind, str) else None
    chars = "".join(_BEGINS.values()) if chars is None else chars
    return regex.union(tuple((ord(char), ord(char)) for char in chars))


def _chars(nodes: Sequence[regex.Node]) -> regex.Ranges:
    """Characters that stand anywhere in them."""
    found: regex.Ranges = ()
    for node in nodes:
        if isinstance(node, regex.Chars):
            found = regex.union(found, node.ranges)
        elif isinstance(node, regex.Repeat):
            found = regex.union(found, _chars((node.part,)))
        elif isinstance(node, regex.Seq | regex.Alt):
            found = regex.union(found, _chars(node.parts))
    return found


def _regular(form: Form) -> regex.Node | None:
    return regular(form, lambda text: [text] if text else [])


def _flat(parts: Iterable[Form]) -> Iterable[Form]:
    for part in parts:
        if isinstance(part, Seq):
            yield from _flat(part.parts)
        elif isinstance(part, Tag):
            yield from _flat(_opened(part))
        else:
            yield part


def _opened(tag: Tag) -> tuple[Form, Form, Form]:
    return Text(tag.begin), tag.content, Text(tag.end)


def _is_empty(form: Form) -> bool:
    return form == Text("") or (isinstance(form, Seq | Either) and all(map(_is_empty, form.parts)))

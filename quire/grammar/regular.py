"""Forms that are regular, as regular expressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.grammar import regex
from quire.grammar.forms import Choice, Either, Form, Regex, Repeat, Seq, Tag, Text

MOST_POSITIONS = 20_000
"""Characters of one, its counts written out."""

Cut = Callable[[str], Sequence[str | int]]
"""A text in pieces, special tokens as their ids: Names.cut."""


def regular(form: Form, cut: Cut) -> regex.Node | None:
    """The form as a regular expression, where it is one and holds no special token."""
    if isinstance(form, Regex):
        return regex.whole(regex.parse(form.pattern), search=False)
    if isinstance(form, Choice):
        return regex.Alt(tuple(map(regex.literal, form.options)))
    if isinstance(form, Text):
        is_plain = all(isinstance(piece, str) for piece in cut(form.text))
        return regex.literal(form.text) if is_plain else None
    if isinstance(form, Seq | Either):
        parts = [regular(part, cut) for part in form.parts]
        known = tuple(part for part in parts if part is not None)
        if len(known) < len(parts):
            return None
        return regex.Seq(known) if isinstance(form, Seq) else regex.Alt(known)
    if isinstance(form, Repeat):
        return _regular_repeat(form, cut)
    if isinstance(form, Tag):
        return regular(Seq((Text(form.begin), form.content, Text(form.end))), cut)
    return None


def _regular_repeat(form: Repeat, cut: Cut) -> regex.Node | None:
    part, between = regular(form.part, cut), regular(Text(form.between), cut)
    if part is None or between is None:
        return None
    if form.most == 0:
        return regex.EMPTY
    most = None if form.most is None else form.most - 1
    more = regex.Repeat(regex.Seq((between, part)), max(form.least - 1, 0), most)
    some = regex.Seq((part, more))
    made = some if form.least else regex.Repeat(some, 0, 1)
    return made if regex.positions(made) <= MOST_POSITIONS else None

"""Whether more stands behind a part that any text may end.

A reader of lexemes takes such text as far as it goes, and what stands behind it never comes.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.grammar.forms import Either, Form, Repeat, Seq, Tag, Tags, Text


def goes_on_behind_open_text(form: Form) -> bool:
    """Somewhere in the form a part follows text that has no clear end."""
    if isinstance(form, Tag):
        return _row(_opened(form))
    if isinstance(form, Seq):
        return _row(form.parts)
    if isinstance(form, Either):
        return any(map(goes_on_behind_open_text, form.parts))
    if isinstance(form, Tags):
        return any(map(goes_on_behind_open_text, form.tags)) or _tags_go_on(form)
    if isinstance(form, Repeat):
        again = form.most is None or form.most > 1
        return goes_on_behind_open_text(form.part) or (again and _is_open(form.part))
    return False


def _row(parts: Sequence[Form]) -> bool:
    if any(map(goes_on_behind_open_text, parts)):
        return True
    for at, part in enumerate(parts):
        if _is_open(part) and not all(map(_is_empty, parts[at + 1 :])):
            return True
    return False


def _is_open(form: Form) -> bool:
    """Whether it may end with text that could as well go on."""
    if isinstance(form, Tags):
        return not (form.least and form.only_first) or any(map(_is_open, form.tags))
    if isinstance(form, Either):
        return any(map(_is_open, form.parts))
    if isinstance(form, Repeat):
        return form.most != 0 and _is_open(form.part)
    parts = form.parts if isinstance(form, Seq) else _opened(form) if isinstance(form, Tag) else ()
    for part in reversed(parts):
        if not _is_empty(part):
            return _is_open(part)
    return False


def _tags_go_on(form: Tags) -> bool:
    """Behind a tag more text may come, whatever the tag ends with."""
    return not form.only_first and any(map(_is_open, form.tags))


def _opened(tag: Tag) -> tuple[Form, Form, Form]:
    return Text(tag.begin), tag.content, Text(tag.end)


def _is_empty(form: Form) -> bool:
    return form == Text("") or (isinstance(form, Seq | Either) and all(map(_is_empty, form.parts)))

"""Which tags of a form begin with which trigger, and what may not stand in the text between."""

from __future__ import annotations

from quire.errors import RequestError
from quire.grammar.forms import Tag, Tags
from quire.grammar.vocabulary import Names


def tags_by_trigger(form: Tags, names: Names) -> tuple[list[str], dict[str, list[Tag]]]:
    """(what may not stand in free text, trigger -> its tags).

    Of triggers that begin alike the shorter counts. One that ends within a special token's name
    goes on to the end of it: the token comes whole.
    """
    if form.least and not form.tags:
        raise RequestError("tags are asked for, and none is given")
    groups: dict[str, list[Tag]] = {}
    for tag in form.tags:
        fitting = [one for one in form.triggers if one and tag.begin.startswith(one)]
        if not fitting:
            raise RequestError(f"the tag {tag.begin!r:.60} begins with none of the triggers")
        trigger = _stretched(tag.begin, min(fitting, key=len), names)
        groups.setdefault(trigger, []).append(tag)
    every = list(dict.fromkeys([*(one for one in form.triggers if one), *groups]))
    barred = [one for one in every if not any(o != one and o in one for o in every)]
    for trigger in groups:
        within = [o for o in every if o != trigger and o in trigger]
        if any(not trigger.startswith(o) for o in within):
            raise RequestError(f"the trigger {trigger!r:.60} holds another one: {within}")
    return barred, groups


def _stretched(begin: str, trigger: str, names: Names) -> str:
    at = 0
    for piece in names.cut(begin):
        size = len(piece if isinstance(piece, str) else names.of[piece])
        if isinstance(piece, int) and at < len(trigger) < at + size:
            return begin[: at + size]
        at += size
    return trigger

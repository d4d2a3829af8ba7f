"""Groups the tags of a form by trigger, and lists what free text must not contain."""

from __future__ import annotations

from quire.errors import RequestError
from quire.grammar.grammar_ast import TaggedTextNode, TagNode
from quire.grammar.vocabulary import SpecialTokenNames


def tags_by_trigger(
    form: TaggedTextNode, names: SpecialTokenNames
) -> tuple[list[str], dict[str, list[TagNode]]]:
    """(what free text must not contain, trigger -> its tags).

    Of triggers that begin alike the shorter counts. One that ends within a special token's name
    is extended to its end: the token comes whole.
    """
    if form.min_tags and not form.tags:
        raise RequestError("tags are asked for, and none is given")
    groups: dict[str, list[TagNode]] = {}
    for tag in form.tags:
        fitting = [one for one in form.triggers if one and tag.begin.startswith(one)]
        if not fitting:
            raise RequestError(f"the tag {tag.begin!r:.60} begins with none of the triggers")
        trigger = _extend_trigger(tag.begin, min(fitting, key=len), names)
        groups.setdefault(trigger, []).append(tag)
    every = list(dict.fromkeys([*(one for one in form.triggers if one), *groups]))
    barred = [one for one in every if not any(o != one and o in one for o in every)]
    for trigger in groups:
        within = [o for o in every if o != trigger and o in trigger]
        if any(not trigger.startswith(o) for o in within):
            raise RequestError(f"the trigger {trigger!r:.60} holds another one: {within}")
    return barred, groups


def _extend_trigger(begin: str, trigger: str, names: SpecialTokenNames) -> str:
    at = 0
    for piece in names.split(begin):
        size = len(piece if isinstance(piece, str) else names.of[piece])
        if isinstance(piece, int) and at < len(trigger) < at + size:
            return begin[: at + size]
        at += size
    return trigger

"""Arguments that stand one by one between tags.

A closing tag counts only where something of the call follows: until then it is part of the value,
so that a value may speak of the markup that it stands in.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.text.tools._source import Cut, Malformed, Source, Walk
from quire.text.tools._telling import MOST_LONG_NAME, Calls
from quire.text.tools._typed import ANY, TEXT, Value, kinds_of
from quire.text.tools._values import escaped
from quire.text.tools.base import Params

MOST_LONG_ATTRIBUTES = 1024


def params(src: Source, calls: Calls, step: Params) -> Walk[None]:
    """Walk the parameters of a call whose name is known, and what ends them."""
    follow = (step.key_open, *step.close, *step.outer)
    before = "{"
    while True:
        yield from src.space()
        found = yield from src.expect(follow)
        if found != step.key_open:
            break
        key, _ = yield from src.short((step.key_close,), "a key", MOST_LONG_NAME)
        key = key.strip().strip("\"'")
        kinds = yield from _kinds(src, calls, step, key)
        if not calls.open:
            calls.announce()
        calls.tell(f'{before}"{escaped(key)}": ')
        before = ", "
        yield from _value(src, calls, step, kinds, follow)
    if found in step.outer:
        src.pos -= len(found)
    if not calls.open:
        calls.announce()
        calls.tell("{")
    calls.tell("}")
    calls.whole()


def _kinds(src: Source, calls: Calls, step: Params, key: str) -> Walk[frozenset[str]]:
    """What a value may be, by its attributes or by the schema."""
    attributes = ""
    if step.value_open:
        attributes, _ = yield from src.short((step.value_open,), "attributes", MOST_LONG_ATTRIBUTES)
    if step.text_mark and step.text_mark in attributes:
        return TEXT
    if step.json_mark and step.json_mark in attributes:
        return ANY
    if attributes.strip() and not step.text_mark:
        raise Malformed(f"{attributes[:80]!r} between a key and its value")
    return kinds_of(calls.tool, key)


def _value(
    src: Source, calls: Calls, step: Params, kinds: frozenset[str], follow: Sequence[str]
) -> Walk[None]:
    """A value and its closing tag, which counts only where something of the call follows."""
    sink = Value(calls.tell, kinds, trim=step.trim)
    while True:
        try:
            yield from src.until((step.value_close,), sink.push)
            gap = yield from src.space()
            found = yield from src.literal(follow, take=False, or_cut=True)
        except Cut:
            sink.cut()
            raise
        if found:
            sink.end()
            return
        sink.push(step.value_close + gap)

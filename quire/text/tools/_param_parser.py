"""Parses arguments that are written one by one between tags.

A closing tag counts only where another part of the call follows: until then it is part of the
value, so that a value may contain the markup around it.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.text.tools._call_emitter import MAX_NAME_CHARS, CallEmitter
from quire.text.tools._schema_coercion import ANY_JSON, TEXT_TYPES, ValueEmitter, schema_types
from quire.text.tools._text_cursor import (
    MalformedMarkup,
    ParserCoroutine,
    TextCursor,
    UnexpectedEnd,
)
from quire.text.tools._value_parsers import escape_json
from quire.text.tools.base import ParamsStep

MAX_ATTRIBUTE_CHARS = 1024


def parse_params(src: TextCursor, calls: CallEmitter, step: ParamsStep) -> ParserCoroutine[None]:
    """Walk the parameters of a call whose name is known, and what ends them."""
    follow = (step.key_open, *step.close, *step.outer)
    before = "{"
    while True:
        yield from src.skip_space()
        found = yield from src.expect(follow)
        if found != step.key_open:
            break
        key, _ = yield from src.read_bounded((step.key_close,), "a key", MAX_NAME_CHARS)
        key = key.strip().strip("\"'")
        kinds = yield from _value_types(src, calls, step, key)
        if not calls.open:
            calls.begin_call()
        calls.emit_arguments(f'{before}"{escape_json(key)}": ')
        before = ", "
        yield from _parse_param_value(src, calls, step, kinds, follow)
    if found in step.outer:
        src.pos -= len(found)
    if not calls.open:
        calls.begin_call()
        calls.emit_arguments("{")
    calls.emit_arguments("}")
    calls.complete_call()


def _value_types(
    src: TextCursor, calls: CallEmitter, step: ParamsStep, key: str
) -> ParserCoroutine[frozenset[str]]:
    """What a value may be, by its attributes or by the schema."""
    attributes = ""
    if step.value_open:
        attributes, _ = yield from src.read_bounded(
            (step.value_open,), "attributes", MAX_ATTRIBUTE_CHARS
        )
    if step.text_mark and step.text_mark in attributes:
        return TEXT_TYPES
    if step.json_mark and step.json_mark in attributes:
        return ANY_JSON
    if attributes.strip() and not step.text_mark:
        raise MalformedMarkup(f"{attributes[:80]!r} between a key and its value")
    return schema_types(calls.declared_tool, key)


def _parse_param_value(
    src: TextCursor,
    calls: CallEmitter,
    step: ParamsStep,
    kinds: frozenset[str],
    follow: Sequence[str],
) -> ParserCoroutine[None]:
    """A value and its closing tag, which counts only where something of the call follows."""
    sink = ValueEmitter(calls.emit_arguments, kinds, trim=step.trim)
    while True:
        try:
            yield from src.read_until((step.value_close,), sink.push)
            gap = yield from src.skip_space()
            found = yield from src.match_literal(follow, take=False, or_cut=True)
        except UnexpectedEnd:
            sink.truncate()
            raise
        if found:
            sink.end()
            return
        sink.push(step.value_close + gap)

"""Parses arguments that are written one by one between tags.

A closing tag counts only where another part of the call follows: until then it is part of the
value, so that a value may contain the markup around it. A value without a closing tag ends where
the next declared parameter begins, or where the call and what contains it end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.text.tools._call_emitter import MAX_NAME_CHARS, CallEmitter
from quire.text.tools._schema_coercion import (
    ANY_JSON,
    JSON_OR_TEXT,
    TEXT_TYPES,
    ValueEmitter,
    schema_types,
)
from quire.text.tools._text_cursor import (
    MalformedMarkup,
    ParserCoroutine,
    TextCursor,
    UnexpectedEnd,
)
from quire.text.tools._value_parsers import PYTHON, escape_json, to_json
from quire.text.tools.base import ParamsStep, Tool

MAX_ATTRIBUTE_CHARS = 1024
WRAPPER_KEYS = frozenset({"arguments", "input", "parameters", "properties"})
"""Keys of a single parameter that holds all arguments as an object."""


def parse_params(src: TextCursor, calls: CallEmitter, step: ParamsStep) -> ParserCoroutine[None]:
    """Parse the parameters of a call whose name is known, and the literal that ends them."""
    yield from _ParamsParser(src, calls, step).parse()


@dataclass(slots=True)
class _ParamsParser:
    """Parses the parameters of one call."""

    src: TextCursor
    calls: CallEmitter
    step: ParamsStep
    keys: list[str] = field(default_factory=list)
    """Parsed so far."""

    def parse(self) -> ParserCoroutine[None]:
        step = self.step
        openers = (step.key_open, *step.key_variants)
        follow = (*openers, *step.close, *step.outer)
        found = ""
        while True:
            if not found:
                yield from self.src.skip_space()
                found = yield from self.src.expect(follow)
            if found not in openers:
                break
            found = yield from self._parse_param(follow)
        if found in step.outer:
            self.src.pos -= len(found)
        self._begin_call()
        self.calls.emit_arguments("}" if self.keys else "{}")
        self.calls.complete_call()

    def _begin_call(self) -> None:
        if not self.calls.open:
            self.calls.begin_call()

    def _parse_param(self, follow: Sequence[str]) -> ParserCoroutine[str]:
        """One parameter. Returns the literal after it if that was consumed, else ""."""
        src, step = self.src, self.step
        key, _ = yield from src.read_bounded((step.key_close,), "a key", MAX_NAME_CHARS)
        key = key.strip().strip("\"'")
        kinds = yield from self._value_types(key)
        if not self.keys and self._may_wrap(key):
            parts: list[str] = []
            ended = yield from self._parse_value(ValueEmitter(parts.append, TEXT_TYPES), follow)
            if not ended:
                yield from src.skip_space()
                ended = yield from src.expect(follow)
            text = json.loads("".join(parts))
            inner = None if ended == step.key_open else self._unwrapped(text)
            if inner is not None:
                self._begin_call()
                self.calls.emit_arguments(inner[:-1])
                self.keys.append(key)
                return ended
            sink = self._emit_key(key, kinds)
            if text:
                sink.push(text)
            sink.end()
            return ended
        return (yield from self._parse_value(self._emit_key(key, kinds), follow))

    def _emit_key(self, key: str, kinds: frozenset[str]) -> ValueEmitter:
        self._begin_call()
        self.calls.emit_arguments(f'{", " if self.keys else "{"}"{escape_json(key)}": ')
        self.keys.append(key)
        return ValueEmitter(self.calls.emit_arguments, kinds, trim=self.step.trim)

    def _value_types(self, key: str) -> ParserCoroutine[frozenset[str]]:
        """Types that a value may have, by its attributes and by the schema."""
        step, attributes = self.step, ""
        declared = schema_types(self.calls.declared_tool, key)
        if step.value_open:
            attributes, _ = yield from self.src.read_bounded(
                (step.value_open,), "attributes", MAX_ATTRIBUTE_CHARS
            )
        if step.text_mark and step.text_mark in attributes:
            return TEXT_TYPES if "string" in declared else declared
        if step.json_mark and step.json_mark in attributes:
            return JSON_OR_TEXT if declared == TEXT_TYPES else ANY_JSON
        if attributes.strip() and not step.text_mark:
            raise MalformedMarkup(f"{attributes[:80]!r} between a key and its value")
        return declared

    def _parse_value(self, sink: ValueEmitter, follow: Sequence[str]) -> ParserCoroutine[str]:
        """A value and what ends it. Returns the literal after it if that was consumed, else ""."""
        src, step = self.src, self.step
        starts = tuple(
            f"{opener}{key}{step.key_close}"
            for opener in (step.key_open, *step.key_variants)
            for key in _declared_keys(self.calls.declared_tool)
            if key not in self.keys
        )
        closes = step.close if step.outer else ()
        try:
            yield from self._parse_cdata(sink)
            while True:
                found = yield from src.read_until((step.value_close, *starts, *closes), sink.push)
                if found in starts:
                    src.pos -= len(found)
                    sink.end()
                    return ""
                next_ones = step.outer if found in closes else follow
                gap = yield from src.skip_space()
                if (yield from src.match_literal(next_ones, take=False, or_cut=True)):
                    sink.end()
                    return found if found in closes else ""
                sink.push(found + gap)
        except UnexpectedEnd:
            sink.truncate()
            raise

    def _parse_cdata(self, sink: ValueEmitter) -> ParserCoroutine[None]:
        if self.step.cdata and (yield from self.src.match_literal(("<![CDATA[",), or_cut=True)):
            yield from self.src.read_until(("]]>",), sink.push)

    def _may_wrap(self, key: str) -> bool:
        return (
            key in WRAPPER_KEYS
            and key not in (declared := _declared_keys(self.calls.declared_tool))
            and bool(declared)
        )

    def _unwrapped(self, text: str) -> str | None:
        """All arguments, if the text is an object of nothing but declared parameters."""
        found = to_json(text) or to_json(text, PYTHON)
        value = json.loads(found) if found else None
        if not isinstance(value, dict) or not value:
            return None
        return found if value.keys() <= set(_declared_keys(self.calls.declared_tool)) else None


def _declared_keys(tool: Tool | None) -> list[str]:
    properties = tool.parameters.get("properties") if tool is not None else None
    return list(properties) if isinstance(properties, Mapping) else []

"""Parses calls in Python syntax. They are never executed."""

from __future__ import annotations

import re

from quire.text.tools._call_emitter import MAX_NAME_CHARS, CallEmitter
from quire.text.tools._text_cursor import MalformedMarkup, ParserCoroutine, TextCursor
from quire.text.tools._value_parsers import escape_json, parse_value
from quire.text.tools.base import PythonCallsStep

_IDENTIFIER = re.compile(r"[\w.\-]+")


def parse_python_calls(
    src: TextCursor, calls: CallEmitter, step: PythonCallsStep, *, bare: bool
) -> ParserCoroutine[None]:
    """Walk a list of calls, or calls one below the other."""
    if not step.lines:
        yield from src.expect_char("[")
    while True:
        yield from _parse_call(src, calls, step, bare=bare)
        if step.lines:
            char = yield from src.peek_nonspace()
            if not (char.isalpha() or char == "_"):
                return
        elif (yield from src.expect_char(",", "]")) == "]":
            break
        elif (yield from src.peek_nonspace()) == "]":
            src.pos += 1  # after a redundant comma
            break
    src.commit()


def _parse_call(
    src: TextCursor, calls: CallEmitter, step: PythonCallsStep, *, bare: bool
) -> ParserCoroutine[None]:
    name = yield from _read_identifier(src, "a function")
    yield from src.expect_char("(")
    calls.set_name(name, bare=bare)
    before = "{"
    while (yield from src.peek_nonspace()) != ")":
        key = yield from _read_identifier(src, "a parameter")
        yield from src.expect_char("=")
        if not calls.open:
            calls.begin_call()
        calls.emit_arguments(f'{before}"{escape_json(key)}": ')
        before = ", "
        yield from parse_value(src, calls.emit_arguments, step.language)
        if (yield from src.peek_nonspace()) == ")":
            break
        yield from src.expect_char(",")
    src.pos += 1
    if not calls.open:
        calls.begin_call()
        calls.emit_arguments("{")
    calls.emit_arguments("}")
    calls.complete_call()


def _read_identifier(src: TextCursor, what: str) -> ParserCoroutine[str]:
    yield from src.skip_space()
    parts: list[str] = []
    while True:
        yield from src.peek()
        found = _IDENTIFIER.match(src.buf, src.pos)
        if not found:
            break
        src.pos = found.end()
        parts.append(found[0])
        if sum(map(len, parts)) > MAX_NAME_CHARS:
            raise MalformedMarkup(f"the name of {what} is longer than {MAX_NAME_CHARS} characters")
    name = "".join(parts)
    if not name or not (name[0].isalpha() or name[0] == "_"):
        raise MalformedMarkup(f"{name or src.buf[src.pos]!r} where {what} belongs")
    return name

"""Parses calls in Python syntax. They are never executed."""

from __future__ import annotations

import re

from quire.text.tools._call_emitter import MAX_NAME_CHARS, CallEmitter
from quire.text.tools._text_cursor import MalformedMarkup, ParserCoroutine, TextCursor
from quire.text.tools._value_parsers import escape_json, parse_value
from quire.text.tools.base import PythonCallsStep

_IDENTIFIER = re.compile(r"[\w.\-]+")


def parse_python_calls(
    src: TextCursor, calls: CallEmitter, step: PythonCallsStep, *, declared_only: bool
) -> ParserCoroutine[None]:
    """Walk a list of calls, or calls one below the other."""
    if not step.lines:
        yield from src.expect_char("[")
    while True:
        yield from _parse_call(src, calls, step, declared_only=declared_only)
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
    src: TextCursor, calls: CallEmitter, step: PythonCallsStep, *, declared_only: bool
) -> ParserCoroutine[None]:
    name = yield from read_identifier(src, "a function")
    yield from src.expect_char("(")
    calls.set_name(name, declared_only=declared_only)
    before = "{"
    while (yield from src.peek_nonspace()) != ")":
        key = yield from read_identifier(src, "a parameter")
        yield from src.expect_char("=")
        if not calls.open:
            calls.begin_call()
        calls.emit_arguments(f'{before}"{escape_json(key)}": ')
        before = ", "
        yield from parse_value(
            src, calls.emit_arguments, step.language, lambda: _ends_argument(src, lines=step.lines)
        )
        if (yield from src.peek_nonspace()) == ")":
            break
        yield from src.expect_char(",")
    src.pos += 1
    if not calls.open:
        calls.begin_call()
        calls.emit_arguments("{")
    calls.emit_arguments("}")
    calls.complete_call()


def _ends_argument(src: TextCursor, *, lines: bool) -> ParserCoroutine[bool]:
    """Whether the quote at the cursor ends an argument: the call ends after it, or another
    argument follows. Raises UnexpectedEnd if the text is too short to decide."""
    char, i = yield from src.peek_nonspace_after(1)
    if char == ")":
        char, _ = yield from src.peek_nonspace_after(i + 1)
        return char in ",]" or (lines and (char in "_<" or char.isalpha()))
    if char != ",":
        return False
    char, i = yield from src.peek_nonspace_after(i + 1)
    first = i
    while _IDENTIFIER.fullmatch(char) and i - first <= MAX_NAME_CHARS:
        i += 1
        char = yield from src.peek(i)
    if i > first:
        char, i = yield from src.peek_nonspace_after(i)
    return char == "=" if i > first else char == ")"


def read_identifier(src: TextCursor, what: str) -> ParserCoroutine[str]:
    """A name after whitespace: letters, digits, underscores, dots and dashes."""
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

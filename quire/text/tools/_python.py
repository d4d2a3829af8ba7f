"""Calls as Python writes them. They are read, never run."""

from __future__ import annotations

import re

from quire.text.tools._source import Malformed, Source, Walk
from quire.text.tools._telling import MOST_LONG_NAME, Calls
from quire.text.tools._values import escaped, value
from quire.text.tools.base import PythonCalls

_IDENTIFIER = re.compile(r"[\w.\-]+")


def python_calls(src: Source, calls: Calls, step: PythonCalls, *, bare: bool) -> Walk[None]:
    """Walk a list of calls, or calls one below the other."""
    if not step.lines:
        yield from src.char("[")
    while True:
        yield from _call(src, calls, step, bare=bare)
        if step.lines:
            char = yield from src.after_space()
            if not (char.isalpha() or char == "_"):
                return
        elif (yield from src.char(",", "]")) == "]":
            break
        elif (yield from src.after_space()) == "]":
            src.pos += 1  # after a comma that says nothing
            break
    src.settle()


def _call(src: Source, calls: Calls, step: PythonCalls, *, bare: bool) -> Walk[None]:
    name = yield from _identifier(src, "a function")
    yield from src.char("(")
    calls.named(name, bare=bare)
    before = "{"
    while (yield from src.after_space()) != ")":
        key = yield from _identifier(src, "a parameter")
        yield from src.char("=")
        if not calls.open:
            calls.announce()
        calls.tell(f'{before}"{escaped(key)}": ')
        before = ", "
        yield from value(src, calls.tell, step.language)
        if (yield from src.after_space()) == ")":
            break
        yield from src.char(",")
    src.pos += 1
    if not calls.open:
        calls.announce()
        calls.tell("{")
    calls.tell("}")
    calls.whole()


def _identifier(src: Source, what: str) -> Walk[str]:
    yield from src.space()
    parts: list[str] = []
    while True:
        yield from src.ahead()
        found = _IDENTIFIER.match(src.buf, src.pos)
        if not found:
            break
        src.pos = found.end()
        parts.append(found[0])
        if sum(map(len, parts)) > MOST_LONG_NAME:
            raise Malformed(f"the name of {what} is longer than {MOST_LONG_NAME} characters")
    name = "".join(parts)
    if not name or not (name[0].isalpha() or name[0] == "_"):
        raise Malformed(f"{name or src.buf[src.pos]!r} where {what} belongs")
    return name

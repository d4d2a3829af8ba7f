"""Cursor over the text of a model as it streams in, for generator-based parsers.

A parser is a generator that yields when it needs more text than there is, so it is written as a
plain recursive-descent parser. Results do not depend on how the text is cut: a parser decides only
on text it has seen completely (it waits while the next characters could still become another
literal), and consumes only what it has decided on. The unconsumed rest is therefore shorter than
the longest literal, and time is linear whatever the chunks are.

Consumed text is kept until it is settled, so that it can become content again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
ParserCoroutine = Generator[None, None, T]
TextSink = Callable[[str], None]

SPACES = " \t\r\n"
_SPACE_RUN = re.compile(r"[ \t\r\n]*")


class MalformedMarkup(Exception):
    """The markup is invalid here. The first argument is the reason."""


class UnexpectedEnd(Exception):
    """The text ended where more was needed."""


@lru_cache(maxsize=512)
def _excluding_pattern(firsts: str) -> re.Pattern[str]:
    return re.compile(f"[^{re.escape(firsts)}]+")


def text_before_pattern(ends: Sequence[str]) -> re.Pattern[str]:
    """Matches text in which none of `ends` begins."""
    return _excluding_pattern("".join(sorted({end[0] for end in ends})))


class TextCursor:
    """Text pushed and not yet consumed, and what was consumed since the last settling."""

    __slots__ = ("_committed", "_uncommitted", "buf", "last", "pos", "steps")

    def __init__(self) -> None:
        self.buf = ""
        self.pos = 0
        self.last = False
        self.steps = 0
        """Work units: each is bounded by a constant, or by the characters that it consumes."""
        self._committed = 0  # of what is consumed, buf[_mark:pos] and _held are not settled
        self._uncommitted: list[str] = []

    def push(self, text: str, last: bool) -> None:
        """Add text. last: nothing follows."""
        if self._committed < self.pos:
            self._uncommitted.append(self.buf[self._committed : self.pos])
        self.steps += len(self.buf) - self.pos + 1
        self.buf = self.buf[self.pos :] + text
        self.pos = self._committed = 0
        self.last = last

    def commit(self) -> None:
        """Settle the consumed text: it was emitted and will not become content again."""
        self._committed = self.pos
        if self._uncommitted:
            self._uncommitted = []

    def uncommitted(self) -> str:
        """The text that was consumed since the last commit."""
        return "".join((*self._uncommitted, self.buf[self._committed : self.pos]))

    def take_uncommitted(self) -> str:
        """Return the text that was consumed since the last commit, and commit it."""
        text = self.uncommitted()
        self.commit()
        return text

    def take_rest(self) -> str:
        """As take_uncommitted(), with all that was not consumed."""
        self.pos = len(self.buf)
        return self.take_uncommitted()

    @property
    def at_end(self) -> bool:
        """Everything is consumed and nothing follows."""
        return self.last and self.pos == len(self.buf)

    def peek(self, i: int = 0) -> ParserCoroutine[str]:
        """The character i places from here, not consumed. Raises UnexpectedEnd."""
        self.steps += 1
        while self.pos + i >= len(self.buf):
            if self.last:
                raise UnexpectedEnd
            yield
        return self.buf[self.pos + i]

    def skip_space(self) -> ParserCoroutine[str]:
        """Consume whitespace. Waits for another character, or the end of the text."""
        if self.pos < len(self.buf) and self.buf[self.pos] not in SPACES:
            return ""
        parts = []
        while True:
            self.steps += 1
            found = _SPACE_RUN.match(self.buf, self.pos)
            assert found is not None
            self.pos = found.end()
            parts.append(found[0])
            if self.pos < len(self.buf) or self.last:
                return "".join(parts)
            yield

    def match_literal(
        self, texts: Sequence[str], *, take: bool = True, or_cut: bool = False
    ) -> ParserCoroutine[str]:
        """The longest of `texts` that comes next, consumed if `take`; "" if none does.

        or_cut: raises UnexpectedEnd if the text ends in the beginning of one, or has ended.
        """
        longest = max(map(len, texts))
        while True:
            self.steps += 1
            take_rest = self.buf[self.pos : self.pos + longest]
            found, begun = "", False
            for text in texts:
                if take_rest.startswith(text):
                    found = text if len(text) > len(found) else found
                elif text.startswith(take_rest):
                    begun = True
            if not begun or self.last:
                break
            yield
        if begun and or_cut and not found:
            raise UnexpectedEnd
        if take:
            self.pos += len(found)
        return found

    def expect(self, texts: Sequence[str]) -> ParserCoroutine[str]:
        """Consume the one of `texts` that is next. Raises MalformedMarkup, UnexpectedEnd."""
        found = yield from self.match_literal(texts, or_cut=True)
        if not found:
            raise self.unexpected(texts[0])
        return found

    def unexpected(self, wanted: str) -> MalformedMarkup:
        """Return the error that the next text is not one of `wanted`."""
        return MalformedMarkup(f"{self.buf[self.pos]!r} where {wanted!r} belongs")

    def expect_char(self, *wanted: str) -> ParserCoroutine[str]:
        """Consume one of these characters, after whitespace. Raises MalformedMarkup."""
        char = yield from self.peek_nonspace()
        if char not in wanted:
            raise MalformedMarkup(f"{char!r} where {' or '.join(map(repr, wanted))} belongs")
        self.pos += 1
        return char

    def peek_nonspace(self) -> ParserCoroutine[str]:
        """The next character that is not whitespace, not consumed. Raises UnexpectedEnd."""
        yield from self.skip_space()
        return (yield from self.peek())

    def peek_nonspace_after(self, i: int) -> ParserCoroutine[tuple[str, int]]:
        """The next character that is not whitespace from i places on, and its place."""
        while (char := (yield from self.peek(i))) in SPACES:
            i += 1
        return char, i

    def read_until(self, ends: Sequence[str], emit: TextSink) -> ParserCoroutine[str]:
        """Emit text up to the first of `ends`, consume that one and return it.

        Raises UnexpectedEnd; a partial literal at the end of the text is not emitted.
        """
        plain = text_before_pattern(ends)
        while True:
            yield from self.peek()
            if found := plain.match(self.buf, self.pos):
                self.pos = found.end()
                emit(found[0])
                continue
            end = yield from self.match_literal(ends, or_cut=True)
            if end:
                return end
            char = self.buf[self.pos]
            self.pos += 1
            emit(char)

    def read_bounded(
        self, ends: Sequence[str], what: str, max_chars: int
    ) -> ParserCoroutine[tuple[str, str]]:
        """Text up to the first of `ends`, and which. Raises MalformedMarkup if it is longer."""
        parts: list[str] = []
        length = 0

        def emit(text: str) -> None:
            nonlocal length
            length += len(text)
            parts.append(text)
            if length > max_chars:
                raise MalformedMarkup(f"{what} is longer than {max_chars} characters")

        end = yield from self.read_until(ends, emit)
        return "".join(parts), end

"""The text of a model as it comes, read by walks.

A walk is a generator that yields when it needs more text than there is, so it reads like a plain
recursive-descent parser and yet streams. The idea that keeps any cut of the text harmless: a walk
decides only on what it has seen whole (it waits while what follows could still become another
thing), and consumes only what it has decided on. What is left unconsumed while a walk waits is
therefore shorter than the longest literal, and time is linear whatever the pushes are.

Consumed text is kept until it is settled, so that it can come back as content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Walk = Generator[None, None, T]
Tell = Callable[[str], None]

SPACES = " \t\r\n"
_SPACE = re.compile(r"[ \t\r\n]*")


class Malformed(Exception):
    """The markup makes no sense here. The first argument says why."""


class Cut(Exception):
    """The text ended where more was needed."""


@lru_cache(maxsize=512)
def _other_than(firsts: str) -> re.Pattern[str]:
    return re.compile(f"[^{re.escape(firsts)}]+")


def plain_before(ends: Sequence[str]) -> re.Pattern[str]:
    """Matches text in which none of `ends` begins."""
    return _other_than("".join(sorted({end[0] for end in ends})))


class Source:
    """Text pushed and not yet consumed, and what was consumed since the last settling."""

    __slots__ = ("_held", "_mark", "buf", "last", "pos", "steps")

    def __init__(self) -> None:
        self.buf = ""
        self.pos = 0
        self.last = False
        self.steps = 0
        """Of work done: each is bounded by a constant, or by the characters that it consumes."""
        self._mark = 0  # of what is consumed, buf[_mark:pos] and _held are not settled
        self._held: list[str] = []

    def push(self, text: str, last: bool) -> None:
        """Add text. last: nothing follows."""
        if self._mark < self.pos:
            self._held.append(self.buf[self._mark : self.pos])
        self.steps += len(self.buf) - self.pos + 1
        self.buf = self.buf[self.pos :] + text
        self.pos = self._mark = 0
        self.last = last

    def settle(self) -> None:
        """What was consumed has been told; it will not come back."""
        self._mark = self.pos
        if self._held:
            self._held = []

    def release(self) -> str:
        """What was consumed since the last settling, settled now."""
        self._held.append(self.buf[self._mark : self.pos])
        text = "".join(self._held)
        self.settle()
        return text

    def rest(self) -> str:
        """As release(), with all that was not consumed."""
        self.pos = len(self.buf)
        return self.release()

    @property
    def over(self) -> bool:
        """Everything is consumed and nothing follows."""
        return self.last and self.pos == len(self.buf)

    def ahead(self, i: int = 0) -> Walk[str]:
        """The character i places from here, not consumed. Cut if the text ends before."""
        self.steps += 1
        while self.pos + i >= len(self.buf):
            if self.last:
                raise Cut
            yield
        return self.buf[self.pos + i]

    def space(self) -> Walk[str]:
        """Whitespace, consumed. Waits until something else, or the end, is seen."""
        if self.pos < len(self.buf) and self.buf[self.pos] not in SPACES:
            return ""
        parts = []
        while True:
            self.steps += 1
            found = _SPACE.match(self.buf, self.pos)
            assert found is not None
            self.pos = found.end()
            parts.append(found[0])
            if self.pos < len(self.buf) or self.last:
                return "".join(parts)
            yield

    def literal(
        self, texts: Sequence[str], *, take: bool = True, or_cut: bool = False
    ) -> Walk[str]:
        """The longest of `texts` that comes next, consumed if `take`; "" if none does.

        or_cut: raises Cut if the text ends in the beginning of one, or has ended.
        """
        longest = max(map(len, texts))
        while True:
            self.steps += 1
            rest = self.buf[self.pos : self.pos + longest]
            found, begun = "", False
            for text in texts:
                if rest.startswith(text):
                    found = text if len(text) > len(found) else found
                elif text.startswith(rest):
                    begun = True
            if not begun or self.last:
                break
            yield
        if begun and or_cut and not found:
            raise Cut
        if take:
            self.pos += len(found)
        return found

    def expect(self, texts: Sequence[str]) -> Walk[str]:
        """Consume the one of `texts` that comes next. Malformed if none does, Cut at the end."""
        found = yield from self.literal(texts, or_cut=True)
        if not found:
            raise Malformed(f"{self.buf[self.pos]!r} where {texts[0]!r} belongs")
        return found

    def char(self, *wanted: str) -> Walk[str]:
        """Consume one of these characters, after whitespace. Malformed if another comes."""
        char = yield from self.after_space()
        if char not in wanted:
            raise Malformed(f"{char!r} where {' or '.join(map(repr, wanted))} belongs")
        self.pos += 1
        return char

    def after_space(self) -> Walk[str]:
        """The next character that is not whitespace, not consumed. Cut if there is none."""
        yield from self.space()
        return (yield from self.ahead())

    def until(self, ends: Sequence[str], tell: Tell) -> Walk[str]:
        """Tell text up to the first of `ends`, consume that one and return it.

        Cut if there is none; the beginning of one that the text ends in is not told.
        """
        plain = plain_before(ends)
        while True:
            yield from self.ahead()
            if found := plain.match(self.buf, self.pos):
                self.pos = found.end()
                tell(found[0])
                continue
            end = yield from self.literal(ends, or_cut=True)
            if end:
                return end
            char = self.buf[self.pos]
            self.pos += 1
            tell(char)

    def short(self, ends: Sequence[str], what: str, most: int) -> Walk[tuple[str, str]]:
        """Text up to the first of `ends`, and which; Malformed if it is longer than `most`."""
        parts: list[str] = []
        length = 0

        def tell(text: str) -> None:
            nonlocal length
            length += len(text)
            parts.append(text)
            if length > most:
                raise Malformed(f"{what} is longer than {most} characters")

        end = yield from self.until(ends, tell)
        return "".join(parts), end

"""Finds fixed strings in a text that arrives in pieces, also where a string spans two pieces.

Time is linear: one pass of an alternation of literals, which cannot backtrack. No string may be
the beginning of another, so the first match is the only one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

_NO_END = sys.maxsize // 2


class SpecialStrings:
    """A set of strings, compiled. Never changes."""

    def __init__(self, marks: Iterable[str]) -> None:
        self.strings = tuple(sorted(set(marks)))
        for one, after in zip(self.strings, self.strings[1:]):
            assert one, "an empty mark is everywhere"
            assert not after.startswith(one), f"{one!r} is the beginning of {after!r}"
        self._search = (
            re.compile("|".join(map(re.escape, self.strings))).search if self.strings else None
        )
        self._prefixes = {one[:n] for one in self.strings for n in range(1, len(one))}
        self._first_chars = frozenset(one[0] for one in self.strings)
        self._max_overhang = max(map(len, self.strings), default=1) - 1

    def find(self, text: str, at: int = 0, end: int = _NO_END) -> tuple[str, int] | None:
        """The first mark that begins in text[at:end], and where."""
        found = (
            self._search(text, at, end + self._max_overhang) if self._search is not None else None
        )
        return (found[0], found.start()) if found is not None and found.start() < end else None

    def match_at(self, text: str, place: int) -> str | None:
        """The mark that begins at this place."""
        return next((one for one in self.strings if text.startswith(one, place)), None)

    def partial_match_start(self, text: str, at: int = 0) -> int:
        """Where the end of text[at:] may turn out to begin a mark; len(text) if it cannot."""
        for place in range(max(len(text) - self._max_overhang, at), len(text)):
            if text[place] in self._first_chars and text[place:] in self._prefixes:
                return place
        return len(text)


class SpecialStringStripper:
    """Removes special strings from a streamed text."""

    def __init__(self, marks: SpecialStrings) -> None:
        self._strings = marks
        self._held = ""

    def push(self, text: str, *, last: bool = False) -> str:
        """The text without marks, as far as it is certain; `last`: give out what was held back."""
        data = self._held + text
        kept, at = [], 0
        while (found := self._strings.find(data, at)) is not None:
            kept.append(data[at : found[1]])
            at = found[1] + len(found[0])
        end = len(data) if last else self._strings.partial_match_start(data, at)
        self._held = data[end:]
        kept.append(data[at:end])
        return "".join(kept)

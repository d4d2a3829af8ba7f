"""Stop strings over a moving window.

Only the last max(len) - 1 characters of the text can begin a stop string that is not complete yet,
so only they are kept for searching and held back. The match that ends earliest wins; of two that
end together the longer one, so that no other stop string is left in the text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class StopWindowResult(NamedTuple):
    """Text that may be given out, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopWindow:
    """Feed it text piece by piece; it gives the same text back, cut at the first stop string.

    After a piece with `stop` it takes no more.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops_by_last_char: defaultdict[str, list[str]] = defaultdict(list)
        for stop in sorted(set(stops), key=len, reverse=True):
            self._stops_by_last_char[stop[-1]].append(stop)
        self._last_chars = frozenset(self._stops_by_last_char)
        self._include = include
        self._tail_chars = (
            max(map(len, stops), default=1) - 1
        )  # characters kept to search across pieces
        self._tail = ""  # the last `_reach` characters pushed
        self._held = ""  # pushed and not given out: an end of _tail
        self._stopped = False

    def push(self, text: str, search: bool = True) -> StopWindowResult:
        """Add text. search=False: no stop string may end in it (it is within min_tokens)."""
        assert not self._stopped, "text after a stop string"
        if search and not self._last_chars.isdisjoint(text):
            found = self._find_match(text)
            if found is not None:
                return self._stop(text, *found)
        whole = self._tail + text
        self._tail = whole[max(len(whole) - self._tail_chars, 0) :]
        ready = self._held + text
        hold = 0 if self._include else min(self._tail_chars, len(ready))
        self._held = ready[len(ready) - hold :]
        return StopWindowResult(ready[: len(ready) - hold])

    def finish(self) -> str:
        """Return the text that was held back: no stop string can end in it any more."""
        held, self._held = self._held, ""
        return held

    def _find_match(self, text: str) -> tuple[int, str] | None:
        """(characters of text up to the end of the match, the stop string)."""
        whole, before = self._tail + text, len(self._tail)
        for i, char in enumerate(text):
            if char in self._last_chars:
                for stop in self._stops_by_last_char[char]:
                    if whole.endswith(stop, 0, before + i + 1):
                        return i + 1, stop
        return None

    def _stop(self, text: str, end: int, stop: str) -> StopWindowResult:
        self._stopped = True
        ready = self._held + text[:end]
        self._held = ""
        return StopWindowResult(
            ready if self._include else ready[: max(len(ready) - len(stop), 0)], stop
        )

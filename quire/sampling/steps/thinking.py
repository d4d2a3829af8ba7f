"""A budget of thinking: when it is used up, the mark that ends the thought is forced.

Tokens of thought stand behind the mark that begins one (or the prompt ends within one) and before
the mark that ends it; marks do not count. What the model wrote of an end mark by itself is made
whole. Not here: how a token is forced (quire.sampling.bound), and when tokens become known.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.types import Thinking

Mark = tuple[int, ...]


@dataclass(slots=True)
class Thought:
    """How far one sequence has come with its thinking."""

    asked: Thinking
    inside: bool
    over: bool = False  # there will be no thought any more
    _seen: int = 0  # outputs taken in
    _spent: int = 0  # tokens of thought among them
    _matched: int = 0  # tokens of the next mark that the outputs end with

    @classmethod
    def of(cls, asked: Thinking) -> Thought:
        """Before the first output."""
        return cls(asked, inside=asked.begin is None)

    def accept(self, token: int) -> None:
        """Take in the next output."""
        self._seen += 1
        if self.over:
            return
        mark = self._mark
        self._matched = matched(mark, self._matched, token)
        self._spent += self.inside
        if self._matched < len(mark):
            return
        self._matched = 0
        if self.inside:
            self._spent -= len(mark)
            self.over = self.asked.begin is None
        self.inside = not self.inside

    def due(self, outputs: int) -> bool:
        """Whether a token may have to be forced behind so many outputs, some perhaps not seen."""
        if self.over:
            return False
        unseen = outputs - self._seen
        if not self.inside:
            unseen -= len(self._mark) - self._matched
        return unseen >= 0 and self._spent + unseen >= self.asked.budget

    @property
    def forced(self) -> int | None:
        """The token that must come next, all outputs having been taken in; None: any may."""
        if self.over or not self.inside or self._spent < self.asked.budget:
            return None
        return self.asked.end[self._matched]

    @property
    def _mark(self) -> Mark:
        """The one to come."""
        return self.asked.end if self.inside else self.asked.begin or ()


def matched(mark: Mark, before: int, token: int) -> int:
    """How much of the mark the outputs end with, one more token after `before` of it."""
    if not before:
        return int(mark[0] == token)
    tail = (*mark[:before], token)
    while tail and tail != mark[: len(tail)]:
        tail = tail[1:]
    return len(tail)

"""Length-aware closing: constrained text is whole at any budget from an announced least upwards.

    plan(form, compiler, vocabulary) -> Least   slow, in the pool's worker; plain data
    closer(least, vocabulary) -> Closer         once for each grammar, in the engine's process
    Guide(matcher, closer)                      one for each sequence, in place of its matcher

A token that was drawn cannot be taken back, so the mask before must leave only such tokens as the
text can still be closed after in what is left. `left` counts the tokens that may still be drawn,
the one that the mask is for included; the end token is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.grammar.base import Matcher, Words


@dataclass(frozen=True, slots=True)
class Least:
    """What closing needs to know of a form. Plain: as_dict goes over a pipe."""

    least: int | None = None
    """Fewest tokens that a whole text takes; None: nobody closes this form."""


class Closer:
    """What the guides of one grammar share."""


class Guide:
    """A matcher with a budget. Without a closer it lets everything through."""

    def __init__(self, matcher: Matcher, closer: Closer | None = None) -> None:
        self.matcher = matcher
        self._closer = closer

    def fill(self, words: Words, left: int | None = None) -> None:
        """Write the mask of the next token. left: tokens that may be drawn, this one included."""
        self.matcher.fill(words)

    def accept(self, token: int) -> bool:
        """Take the next token. False, and nothing changed: not allowed."""
        return self.matcher.accept(token)

    def rollback(self, tokens: int) -> None:
        """Take back the last so many tokens."""
        self.matcher.rollback(tokens)

    def copy(self) -> Guide:
        """Another one in the same state."""
        return Guide(self.matcher.copy(), self._closer)

    @property
    def complete(self) -> bool:
        """The text so far is whole."""
        return self.matcher.complete

    @property
    def over(self) -> bool:
        """Only the end can follow, or has."""
        return self.matcher.over

    @property
    def forced(self) -> bool:
        """The budget, not the model, chose the end."""
        return False


def closer(least: Least, vocabulary: Any) -> Closer | None:
    """What guides of that form share; None: it cannot be closed."""
    return None

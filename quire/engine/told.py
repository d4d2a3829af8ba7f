"""What was told of requests under way: with it another engine goes on where one has died.

The one idea: a token that was told is said. The engine that takes over gets it as part of what the
sequence has said already; what the old one said and did not tell is said again, and is the same,
because a draw depends on nothing but seed and position. Written by the event loop of its client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.core.timing import Timing
from quire.core.types import Request

DEATHS = 2
"""A request that was aboard so many engines when they died, the last one alone, is to blame."""
MOST_DEATHS = 3
"""So many are too often in any company."""


class Told:
    """Of one sequence that has not ended."""

    __slots__ = ("timing", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.timing: Timing | None = None
        """The latest, in full: what went before in other engines is in it."""

    def leave(self, accepted_at: float, lost_at: float) -> Timing:
        """Its engine died, last heard of at that moment: how its time was spent till then."""
        self.timing = (self.timing or Timing.at(accepted_at)).until(lost_at)
        return self.timing


def is_culprit(deaths: int, *, alone: bool) -> bool:
    """Whether a request that was aboard so many deaths is tried no more. alone: in the last."""
    return deaths >= (DEATHS if alone else MOST_DEATHS)


def again(request: Request, live: Mapping[tuple[str, int], Told], deaths: int) -> Request:
    """The request as another engine is to have it. live: its sequences that have not ended.

    deaths: of engines that it was aboard.
    Of a larger search's requests the KV that they were to share is gone: they compute it anew.
    """
    places = [live.get((request.id, index)) for index in range(request.n)]
    spoken = tuple(None if told is None else tuple(told.tokens) for told in places)
    return replace(request, spoken=spoken, parent=None, suspect=deaths)

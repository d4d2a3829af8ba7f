"""What was told of requests under way: with it another engine goes on where one has died.

The one idea: a token that was told is said. The engine that takes over gets it as part of what the
sequence has said already; what the old one said and did not tell is said again, and is the same,
because a draw depends on nothing but seed and position. Written by the event loop of its client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.core.sequence_timing import SequenceTiming
from quire.core.types import Request

MAX_CRASHES_ALONE = 2
"""A request that was aboard so many engines when they died, the last one alone, is to blame."""
MAX_CRASHES = 3
"""So many are too often in any company."""


class DeliveredTokens:
    """Of one sequence that has not ended."""

    __slots__ = ("timing", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.timing: SequenceTiming | None = None
        """The latest, in full: what went before in other engines is in it."""

    def close_timing(self, accepted_at: float, lost_at: float) -> SequenceTiming:
        """Its engine died, last heard of at that moment: how its time was spent till then."""
        self.timing = (self.timing or SequenceTiming.starting_at(accepted_at)).extended_to(lost_at)
        return self.timing


def exceeds_crash_limit(deaths: int, *, alone: bool) -> bool:
    """Whether a request that was aboard so many deaths is tried no more. alone: in the last."""
    return deaths >= (MAX_CRASHES_ALONE if alone else MAX_CRASHES)


def resumed_request(
    request: Request, live: Mapping[tuple[str, int], DeliveredTokens], deaths: int
) -> Request:
    """The request as another engine is to have it. live: its sequences that have not ended.

    deaths: of engines that it was aboard.
    Of a larger search's requests the KV that they were to share is gone: they compute it anew.
    """
    places = [live.get((request.id, index)) for index in range(request.n)]
    spoken = tuple(None if told is None else tuple(told.tokens) for told in places)
    return replace(request, resumed_tokens=spoken, parent=None, engine_crashes=deaths)

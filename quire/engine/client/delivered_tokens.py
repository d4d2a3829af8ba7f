"""Delivered tokens of unfinished sequences: another engine resumes from them after a crash.

The new engine gets delivered tokens as already generated. Tokens that the old one generated and did
not deliver are sampled again, with the same result, as a draw depends on seed and position alone.
Written by the event loop of the client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from quire.core.sequence_timing import SequenceTiming
from quire.core.types import Request, Update

MAX_CRASHES_ALONE = 2
"""A request is faulty after so many engines died while they ran it, the last one running it
alone."""
MAX_CRASHES = 3
"""A request is faulty after so many engine deaths in any case."""


class DeliveredTokens:
    """Tokens and timing of one sequence that has not ended."""

    __slots__ = ("timing", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.timing: SequenceTiming | None = None
        """The latest timing; it includes the time in earlier engines."""

    def close_timing(self, accepted_at: float, lost_at: float) -> None:
        """End the timing at the engine's death. lost_at: when its last message arrived."""
        self.timing = (self.timing or SequenceTiming.starting_at(accepted_at)).extended_to(lost_at)


def exceeds_crash_limit(deaths: int, *, alone: bool) -> bool:
    """Whether a request is not retried. deaths: of engines that ran it; alone: the last ran only
    it."""
    return deaths >= (MAX_CRASHES_ALONE if alone else MAX_CRASHES)


def resumed_request(
    request: Request, live: Mapping[tuple[str, int], DeliveredTokens], deaths: int
) -> Request:
    """The request for another engine. live: its sequences that have not ended.

    deaths: of engines that ran it. It has no parent: the KV to share is gone and computed again.
    """
    sequences = [live.get((request.id, index)) for index in range(request.n)]
    resumed = tuple(None if one is None else tuple(one.tokens) for one in sequences)
    return replace(request, resumed_tokens=resumed, parent=None, engine_crashes=deaths)


class MovedSequences:
    """Sequences that another engine continues: of this one, which still aborts them, no update
    is delivered.
    """

    def __init__(self) -> None:
        self._places: set[tuple[str, int]] = set()

    def add(self, places: Iterable[tuple[str, int]]) -> None:
        self._places.update(places)

    def clear(self) -> None:
        self._places.clear()

    def drop(self, updates: list[Update]) -> list[Update]:
        """Return the updates without theirs, up to the last update of each."""
        if not self._places:
            return updates
        kept = []
        for update in updates:
            place = (update.request_id, update.index)
            if place not in self._places:
                kept.append(update)
            elif update.finish is not None:
                self._places.discard(place)
        return kept


class PriorTimings:
    """The time that sequences have spent in earlier engines."""

    def __init__(self) -> None:
        self._timings: dict[tuple[str, int], SequenceTiming] = {}  # by (request id, index)

    def __len__(self) -> int:
        return len(self._timings)

    def add(self, unfinished: Mapping[tuple[str, int], DeliveredTokens]) -> None:
        """Record the timing of each, if it has one."""
        for place, delivered in unfinished.items():
            if delivered.timing is not None:
                self._timings[place] = delivered.timing

    def remove(self, requests: Iterable[Request]) -> None:
        if self._timings:
            for one in requests:
                for index in range(one.n):
                    self._timings.pop((one.id, index), None)

    def apply(self, updates: list[Update]) -> list[Update]:
        """Return the updates of this engine, with the time in earlier ones added to theirs."""
        return [self._with_prior(one) for one in updates] if self._timings else updates

    def _with_prior(self, update: Update) -> Update:
        before = self._timings.get((update.request_id, update.index))
        if before is None or update.timing is None:
            return update
        return update._replace(timing=before.followed_by(update.timing))

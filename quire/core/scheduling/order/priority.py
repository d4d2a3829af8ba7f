"""Priority queue: lower priority numbers first, then earlier arrivals; the last is preempted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from quire.core.types import Sequence

Rank = tuple[int, float, str, int]


def rank(seq: Sequence) -> Rank:
    """Return the sort key; keys are unique, as request ids and indices within them are."""
    request = seq.request
    return request.priority, request.arrived_at, request.id, seq.index


class Priority:
    """Keeps a list sorted by rank, last first, so that taking the next is cheap."""

    def __init__(self) -> None:
        self._queue: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return reversed(self._queue)

    def push(self, seq: Sequence) -> None:
        insort(self._queue, seq, key=_reverse_rank)

    def requeue(self, seq: Sequence) -> None:
        self.push(seq)

    def pop(self) -> Sequence:
        return self._queue.pop()

    def remove(self, seq: Sequence) -> None:
        at = bisect_left(self._queue, _reverse_rank(seq), key=_reverse_rank)
        assert self._queue[at] is seq, f"{seq.request.id} is not in the queue"
        del self._queue[at]

    def choose_victim(self, running: dict[Sequence, None]) -> Sequence:
        return max(running, key=rank)


class _ReverseRank:
    """A rank that sorts backwards."""

    __slots__ = ("rank",)

    def __init__(self, of: Rank) -> None:
        self.rank = of

    def __lt__(self, other: _ReverseRank) -> bool:
        return other.rank < self.rank


def _reverse_rank(seq: Sequence) -> _ReverseRank:
    return _ReverseRank(rank(seq))

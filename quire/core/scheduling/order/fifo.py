"""FIFO queue: orders sequences first come, first served; the youngest is preempted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from quire.core.types import Sequence


class Fifo:
    def __init__(self) -> None:
        self._queue: OrderedDict[Sequence, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def push(self, seq: Sequence) -> None:
        self._queue[seq] = None

    def requeue(self, seq: Sequence) -> None:
        self._queue[seq] = None
        self._queue.move_to_end(seq, last=False)

    def pop(self) -> Sequence:
        return self._queue.popitem(last=False)[0]

    def remove(self, seq: Sequence) -> None:
        del self._queue[seq]

    def choose_victim(self, running: dict[Sequence, None]) -> Sequence:
        return next(reversed(running))

"""Waiting queue: the order of waiting sequences, and the choice of preemption victims.

An order depends on neither blocks nor tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from quire.core.types import Sequence


class WaitingQueue(Protocol):
    """A queue that also chooses victims. The order is total: two sequences never tie."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]:
        """Waiting sequences, next first."""

    def push(self, seq: Sequence) -> None:
        """Add a new sequence."""

    def requeue(self, seq: Sequence) -> None:
        """Add a sequence that was preempted or could not continue; before equals that never ran."""

    def pop(self) -> Sequence:
        """Remove and return the next one. The queue must not be empty."""

    def remove(self, seq: Sequence) -> None:
        """Remove this sequence, which is in the queue."""

    def choose_victim(self, running: dict[Sequence, None]) -> Sequence:
        """The sequence to preempt. running: in the order of admission, not empty."""

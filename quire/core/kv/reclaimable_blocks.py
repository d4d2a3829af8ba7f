"""Reclaimable blocks: sequences whose blocks can be freed without preempting a running one.

Finished sequences of held requests, and waiting ones that share blocks through a fork, hold blocks
only to save work: their KV is found in the prefix cache, or computed again.
"""

from __future__ import annotations

from quire.core.types import Sequence


class ReclaimableBlocks:
    """Sequences that can lose their blocks."""

    def __init__(self) -> None:
        self.held: dict[Sequence, None] = {}  # finished, until release()
        self.sharing: dict[Sequence, None] = {}  # waiting

    def pop(self, sparing: Sequence | None = None) -> Sequence | None:
        """Remove and return the next sequence: the one held longest, then the latest to share."""
        seq = next(iter(self.held), None)
        if seq is None:
            seq = next((s for s in reversed(self.sharing) if s is not sparing), None)
        if seq is not None:
            self.discard(seq)
        return seq

    def discard(self, seq: Sequence) -> bool:
        """Remove a sequence. Returns False if it was not one of them."""
        present = seq in self.held or seq in self.sharing
        self.held.pop(seq, None)
        self.sharing.pop(seq, None)
        return present

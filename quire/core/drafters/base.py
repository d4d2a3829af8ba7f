"""Contract of a host drafter: proposes tokens that probably follow those of a sequence.

A drafter is a module with build(section) -> HostDrafter. Proposals are verified by the model, so a
wrong one costs time only. quire.core.scheduling.drafting chooses when it is called, and for how
many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from quire.core.types import Sequence


class HostDrafter:
    """Keeps what it needs of each sequence from its first call for it until remove()."""

    def propose(self, seq: Sequence, known: int, most: int) -> Seq[int]:
        """Return up to `most` tokens that probably follow seq.tokens[:known]; () if none do.

        known: never falls from one call for a sequence to the next, except after a preemption.
        Confirmed tokens do not change.
        """
        raise NotImplementedError

    def remove(self, seq: Sequence) -> None:
        """A sequence has ended. It may be unknown here."""

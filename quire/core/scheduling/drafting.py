"""Drafting: chooses the drafts of the next row of each sequence, and counts which are accepted.

A sequence for which no drafts are found is not looked at again for some tokens, so its rows take
the scheduler's fast path: Sequence.plain_len is the length from which it is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from quire.core.drafters.base import HostDrafter
from quire.core.drafters.prediction import PredictionDrafter
from quire.core.types import UNKNOWN, DraftCounts, Request, Sequence

FIRST_WAIT, LAST_WAIT = 2, 64
"""Tokens after which a sequence without drafts is looked at again: the first time, and at most."""


class DraftTally:
    """Counts of verified drafts that only grow, for DraftCounts."""

    __slots__ = ("accepted", "rows", "tokens")

    def __init__(self) -> None:
        self.rows = self.tokens = 0
        self.accepted: list[int] = []

    def add(self, drafts: int, accepted: int) -> None:
        """Count a row."""
        self.rows += 1
        self.tokens += drafts
        if accepted > len(self.accepted):
            self.accepted += [0] * (accepted - len(self.accepted))
        for i in range(accepted):
            self.accepted[i] += 1

    def to_counts(self) -> DraftCounts:
        return DraftCounts(self.rows, self.tokens, tuple(self.accepted))


class _DraftState:
    """State of a sequence that may have drafts. wait: tokens until it is looked at again."""

    __slots__ = ("sources", "tally", "wait")

    def __init__(self, sources: Seq[HostDrafter]) -> None:
        self.sources = sources
        self.tally = DraftTally()
        self.wait = FIRST_WAIT


class Drafting:
    """Helper of the scheduler. It writes `drafts` and `plain_len` of sequences."""

    def __init__(
        self, drafter: HostDrafter | None = None, *, max_drafts: int = 0, adaptive: bool = True
    ) -> None:
        """drafter: of sequences whose results have no proposals; None: there is none. max_drafts:
        of a row; 0: none are verified. adaptive: False: every row has as many as are proposed."""
        self._adaptive = adaptive
        self._max_drafts = max_drafts
        self._prediction = PredictionDrafter()
        self._sources = () if drafter is None else (drafter,)
        self._states: dict[Sequence, _DraftState] = {}
        self._total = DraftTally()

    def add(self, request: Request, sequences: Iterable[Sequence]) -> None:
        """Follow the sequences of a new request, if they may have drafts."""
        excluded = request.pooling is not None or request.hold or request.num_beams > 1
        if not self._max_drafts or not request.speculates or excluded:
            return
        sources = (self._prediction, *self._sources) if request.prediction else self._sources
        for seq in sequences:
            self._states[seq] = _DraftState(sources)
            seq.plain_len = 0

    def remove(self, seq: Sequence) -> None:
        """A sequence has ended."""
        state = self._states.pop(seq, None)
        for source in state.sources if state is not None else ():
            source.remove(seq)

    def choose(self, seq: Sequence) -> int:
        """Return the number of drafts for the next row of a sequence with one pending token.

        The sequence has them. Its last tokens may still be UNKNOWN: it is then assumed that they
        will be what is proposed for them.
        """
        state = self._states.get(seq)
        if state is None:
            seq.plain_len = seq.max_len
            return 0
        length, known = len(seq.tokens), _known(seq)
        most = min(self._max_drafts, seq.max_len - length - 1)
        drafts = seq.drafts
        if not drafts and most > 0:
            for source in state.sources:
                drafts = tuple(source.propose(seq, known, most + length - known)[length - known :])
                if drafts:
                    break
        seq.drafts = drafts[: max(most, 0)]
        if seq.drafts:
            seq.plain_len = 0
        else:
            state.wait = min(2 * state.wait, LAST_WAIT) if self._adaptive else 1
            seq.plain_len = min(length + state.wait, seq.max_len)
        return len(seq.drafts)

    def set_proposals(self, seq: Sequence, drafts: tuple[int, ...]) -> None:
        """A result of the sequence has proposals. Tokens that later steps in flight will yield are
        assumed to be the first of them."""
        if seq in self._states and not seq.row_drafts:
            seq.drafts = drafts[len(seq.tokens) - _known(seq) :]
            seq.plain_len = 0

    def record(self, seq: Sequence, drafts: int, accepted: int) -> None:
        """Count a row that had drafts."""
        self._total.add(drafts, accepted)
        state = self._states.get(seq)
        if state is not None:
            state.tally.add(drafts, accepted)
            if accepted:
                state.wait = FIRST_WAIT

    def counts(self, seq: Sequence) -> DraftCounts | None:
        """Return the counts of a sequence that has not been removed; None: it had no drafts."""
        state = self._states.get(seq)
        return state.tally.to_counts() if state is not None and state.tally.rows else None

    @property
    def total(self) -> DraftCounts:
        """Counts since the start."""
        return self._total.to_counts()


def _known(seq: Sequence) -> int:
    """Number of leading tokens that no step in flight has yet to yield."""
    known = len(seq.tokens)
    while seq.tokens[known - 1] == UNKNOWN:
        known -= 1
    return known

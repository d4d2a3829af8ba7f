"""State checkpoint budget: ends rows of a step where a checkpoint of a recurrent state is due.

What the step must start and save is its part of the plan, which quire.runner.parts.states sends.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.core.kv.kv_cache import KVCache
from quire.core.scheduling.limits.base import NO_BOUND, StepBudget
from quire.core.types import DraftStates, Row, Sequence, StateMoves


class StateCheckpointLimit(StepBudget):
    """divides: whether a prompt may be computed over several steps."""

    def __init__(self, kv: KVCache, *, divides: bool) -> None:
        assert kv.states is not None, "the model keeps no states"
        self._kv = kv
        self._states = kv.states
        self._divides = divides
        self._ends: dict[Sequence, int] = {}  # of rows of this step after which states are saved
        self._drafts: dict[Sequence, list[int]] = {}  # of rows of this step

    def begin_step(self, sequences: int) -> None:
        self._ends.clear()
        self._drafts.clear()
        self._states.begin_step()

    def allow(self, seq: Sequence, want: int) -> int:
        if want <= 1:
            return want
        if seq.pending == 1:
            return min(want, 1 + self._states.available_drafts)
        return self._states.tokens_before_next(seq, want) if self._divides else want

    def take(self, seq: Sequence, n: int) -> None:
        pending = seq.pending
        if n > pending:
            self._drafts[seq] = self._states.hold_drafts(seq, n - pending)
        end = seq.planned + min(n, pending)
        if self._states.is_due(seq, end):
            self._ends[seq] = end

    def undo(self, seq: Sequence, n: int) -> None:
        self._ends.pop(seq, None)
        if self._drafts.pop(seq, None):
            self._states.drop_drafts(seq)

    def free_decode_rows(self) -> int:
        return NO_BOUND

    def take_each_decode_row(self, rows: Iterable[Row]) -> None:
        for row in rows:
            end = row.start + 1
            if not end % self._kv.block_size and self._states.is_due(row.seq, end):
                self._ends[row.seq] = end

    def plan_part(self) -> StateMoves:
        saves = [self._kv.save_state(seq, end) for seq, end in self._ends.items()]
        return StateMoves(
            tuple([one for one in saves if one is not None]),
            self._kv.take_accepted_states(),
            tuple([DraftStates(seq.slot, rows) for seq, rows in self._drafts.items()]),
        )

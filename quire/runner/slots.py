"""What the device keeps of every running sequence: one row ("slot") for its whole life.

Not the batch: a step gathers its inputs from here, so nothing is reordered when sequences come and
go. The runner is the only writer. On the CPU the rows are numpy arrays that torch tensors share.

Axes: slots in the batch's order, W blocks of the longest sequence, one table per layer group.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.core.types import NO_BLOCK, Sequence, StepPlan

Ints = npt.NDArray[np.int32]


class Slots:
    """Block tables by slot, and how much of each the runner has copied already."""

    def __init__(self, max_seqs: int, max_blocks: int, groups: int) -> None:
        self.tables: list[Ints] = [
            np.full((max_seqs, max_blocks), NO_BLOCK, dtype=np.int32) for _ in range(groups)
        ]
        self._known = [[0] * groups for _ in range(max_seqs)]  # leading entries already copied
        self._joined: list[Sequence | None] = [None] * max_seqs

    def update(self, plan: StepPlan) -> None:
        """Bring the rows up to the plan: joins and moved ones whole, others by what was added."""
        for slot in plan.leaves:
            self._joined[slot] = None
        for seq in plan.joins:
            self._joined[seq.slot] = seq
            self._known[seq.slot] = [0] * len(self.tables)
        for seq in plan.moved:
            if seq.slot >= 0:
                self._known[seq.slot] = [0] * len(self.tables)
        for row in plan.rows:
            self._append(row.seq)

    def _append(self, seq: Sequence) -> None:
        slot = seq.slot
        assert self._joined[slot] is seq, f"slot {slot} is not {seq.request.id}'s"
        known = self._known[slot]
        for g, table in enumerate(seq.tables):
            have, want = known[g], len(table)
            if want != have:
                self.tables[g][slot, have:want] = table[have:]
                known[g] = want

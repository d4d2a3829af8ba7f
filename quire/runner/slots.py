"""Slot tables: find the block table entries that a step adds to the device's rows ("slots").

A running sequence keeps one slot for its whole life, so nothing is reordered when sequences come
and go. The tables themselves are on the device; SlotTables counts how much of each was sent.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.core.media.sources import sources_of
from quire.core.types import Sequence, StepPlan


class BlockTableUpdate(NamedTuple):
    """tables[group][slot, at : at + len(blocks)] = blocks."""

    group: int
    slot: int
    start: int
    blocks: list[int]


class TableShape(NamedTuple):
    """Sizes of the block tables of a device."""

    max_seqs: int
    width: int  # blocks of the longest sequence, or source
    groups: int  # whose tables grow with the sequence
    block_size: int
    has_cross: bool = False
    has_rotary: bool = False  # sequences may have rotary positions of their own
    drafts: int = 0  # that a model proposes for a row at most; 0: none does
    synthetic: tuple[float, ...] | None = None  # of a benchmark: acceptance of drafts by position
    shares_prefixes: bool = False  # attention reads leading blocks of several rows once
    divides_keys: bool = False  # attention divides the keys of decoding rows evenly

    @property
    def tables(self) -> int:
        """Tables of a slot: one per group, then blocks of the last source, and its length alone."""
        return self.groups + 2 * self.has_cross


class SlotTables:
    """How much of each sequence's tables was sent to the workers."""

    def __init__(self, shape: TableShape) -> None:
        self._groups, self._block_size = shape.groups, shape.block_size
        self._has_cross = shape.has_cross
        self._drafts = shape.drafts  # rows may have blocks for tokens behind them
        self._sent_entries = [[0] * shape.groups for _ in range(shape.max_seqs)]  # leading ones
        self._sequences: list[Sequence | None] = [None] * shape.max_seqs

    def collect_updates(self, plan: StepPlan) -> list[BlockTableUpdate]:
        """Return the entries that the plan adds: joined and changed tables whole, else the new
        ends."""
        for slot in plan.leaves:
            self._sequences[slot] = None
        for seq in plan.joins:
            self._sequences[seq.slot] = seq
            self._sent_entries[seq.slot] = [0] * self._groups
        changes: list[BlockTableUpdate] = []
        if self._has_cross:
            for seq in plan.joins:
                sources = sources_of(seq.request)
                cross = seq.cross_tables[-1] if sources else []
                length = sources[-1].length if sources else 0
                changes.append(BlockTableUpdate(self._groups, seq.slot, 0, cross))
                changes.append(BlockTableUpdate(self._groups + 1, seq.slot, 0, [length]))
        for seq in plan.changed_tables:
            if seq.slot >= 0:
                self._sent_entries[seq.slot] = [0] * self._groups
                self._append(seq, changes)
        if not self._groups:
            return changes
        size = self._block_size
        for seq, start, count, _, _ in plan.rows:
            # a row of one token inside a block has had no new block, unless it has just joined
            if count > 1 or not start % size or not self._sent_entries[seq.slot][0] or self._drafts:
                self._append(seq, changes)
        return changes

    def _append(self, seq: Sequence, changes: list[BlockTableUpdate]) -> None:
        slot = seq.slot
        assert self._sequences[slot] is seq, f"slot {slot} is not {seq.request.id}'s"
        known = self._sent_entries[slot]
        for g, table in enumerate(seq.tables):
            have, want = known[g], len(table)
            if want != have:
                changes.append(BlockTableUpdate(g, slot, have, table[have:]))
                known[g] = want

"""GPU penalties: a table of the tokens that each slot has seen, which captured graphs update too.

The factors are in the slots' rows (quire.sampling.slot_param_table), and the arithmetic is in
quire.kernels.penalties. The CPU uses quire.sampling.steps.cpu_penalties.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from quire.kernels.penalties import MAX_COUNT, apply_penalties, update_token_counts
from quire.sampling.h2d import to_device
from quire.sampling.slot_join import SlotJoin
from quire.sampling.slot_param_table import SlotParamTable
from quire.sampling.steps.base import LogitsEdit, SlotBatch


class GpuPenalties:
    """`token_counts[slot]` is valid for the slots that have penalties only."""

    reads_outputs: ClassVar = True

    def __init__(self, table: SlotParamTable, vocab: int, max_seqs: int) -> None:
        device = table.rows.device
        self.token_counts = torch.zeros((max_seqs, vocab), dtype=torch.int16, device=device)
        self.table = table
        self._vocab = vocab
        self._slots: set[int] = set()

    def join(self, joined: SlotJoin) -> None:
        slot, p = joined.slot, joined.params
        self._slots.discard(slot)
        if (p.repetition_penalty, p.frequency_penalty, p.presence_penalty) == (1.0, 0.0, 0.0):
            return
        self._slots.add(slot)
        known = np.array(joined.tokens, np.int64)
        # Prompts may hold ids the model reads but never makes (placeholders of media).
        prompt = known[: joined.prompt_len][known[: joined.prompt_len] < self._vocab]
        ids, times = np.unique(known[joined.prompt_len :], return_counts=True)
        row = self.token_counts[slot].zero_()
        if len(prompt):
            row.index_fill_(0, to_device(prompt, row.device), ~MAX_COUNT)
        if len(ids):
            prompted = np.isin(ids, prompt)
            codes = np.minimum(times, MAX_COUNT) | np.where(prompted, ~MAX_COUNT, 0)
            row.index_copy_(
                0, to_device(ids, row.device), to_device(codes.astype(np.int16), row.device)
            )

    def leave(self, slot: int) -> None:
        self._slots.discard(slot)

    def applies_to(self, slot: int) -> bool:
        return slot in self._slots

    def build_edit(self, batch: SlotBatch) -> LogitsEdit | None:
        if self._slots.isdisjoint(batch.slots):
            return None
        slots = [slot if slot in self._slots else -1 for slot in batch.slots]
        return _GpuPenaltyEdit(self, to_device(np.array(slots, np.int32), batch.device))


class _GpuPenaltyEdit(LogitsEdit):
    def __init__(self, step: GpuPenalties, slots: Tensor) -> None:
        self._step, self._slots = step, slots

    def apply(self, logits: Tensor, positions: Sequence[int], errors: dict[int, str]) -> None:
        apply_penalties(logits, self._slots, self._step.table.rows, self._step.token_counts)

    def on_sampled(self, token_ids: Tensor) -> None:
        update_token_counts(token_ids, self._slots, self._step.token_counts)

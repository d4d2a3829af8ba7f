"""Penalties where nobody may wait: a table of what each slot has seen, which graphs learn in too.

The factors lie in the slots' lines (quire.sampling.table). Not here: the arithmetic, which is
quire.kernels.punish. The host's way is quire.sampling.steps.penalties.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.core.types import Sequence as Seq
from quire.kernels.punish import TIMES, punish, tally
from quire.sampling.steps.base import Batch, Edit
from quire.sampling.table import Table
from quire.sampling.transfer import sent


class Counts:
    """`seen[slot]` is right for the slots that have penalties; other rows mean nothing."""

    def __init__(self, table: Table, vocab: int, max_seqs: int) -> None:
        device = table.lines.device
        self.seen = torch.zeros((max_seqs, vocab), dtype=torch.int16, device=device)
        self.table = table
        self._vocab = vocab
        self._slots: set[int] = set()

    def join(self, slot: int, seq: Seq, tokens: list[int]) -> None:
        self._slots.discard(slot)
        p = seq.request.params
        if (p.repetition_penalty, p.frequency_penalty, p.presence_penalty) == (1.0, 0.0, 0.0):
            return
        self._slots.add(slot)
        known = np.array(tokens, np.int64)
        # Prompts may hold ids the model reads but never makes (placeholders of media).
        prompt = known[: seq.prompt_len][known[: seq.prompt_len] < self._vocab]
        ids, times = np.unique(known[seq.prompt_len :], return_counts=True)
        row = self.seen[slot].zero_()
        if len(prompt):
            row.index_fill_(0, sent(prompt, row.device), ~TIMES)
        if len(ids):
            prompted = np.isin(ids, prompt)
            codes = np.minimum(times, TIMES) | np.where(prompted, ~TIMES, 0)
            row.index_copy_(0, sent(ids, row.device), sent(codes.astype(np.int16), row.device))

    def leave(self, slot: int) -> None:
        self._slots.discard(slot)

    def holds(self, slot: int) -> bool:
        return slot in self._slots

    def edit(self, batch: Batch) -> Edit | None:
        if self._slots.isdisjoint(batch.slots):
            return None
        slots = [slot if slot in self._slots else -1 for slot in batch.slots]
        return _Punish(self, sent(np.array(slots, np.int32), batch.device))


class _Punish(Edit):
    def __init__(self, step: Counts, slots: Tensor) -> None:
        self._step, self._slots = step, slots

    def apply(self, logits: Tensor, positions: Sequence[int], errors: dict[int, str]) -> None:
        punish(logits, self._slots, self._step.table.lines, self._step.seen)

    def drawn(self, token_ids: Tensor) -> None:
        tally(token_ids, self._slots, self._step.seen)

"""Slot parameter table: each slot's sampling parameters on the device, for kernels and captured
graphs.

The host keeps the same rows and sends only those that changed, all in one copy: a slot that goes
from one greedy sequence to the next sends nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.core.params import SamplingParams
from quire.kernels.formats.sampling_table_layout import ROW_WORDS, pack_row
from quire.sampling.h2d import to_device


class SlotParamTable:
    """`rows` is the device's copy; it is up to date after `flush`."""

    def __init__(self, vocab: int, max_seqs: int, device: torch.device) -> None:
        self.rows: Tensor = torch.zeros((max_seqs, ROW_WORDS), dtype=torch.int64, device=device)
        self._host_rows = np.zeros((max_seqs, ROW_WORDS), np.int64)
        self._dirty_slots: set[int] = set()
        self._vocab = vocab
        self._host_rows[:] = pack_row()
        self._dirty_slots.update(range(max_seqs))

    def write(self, slot: int, params: SamplingParams, seed: int) -> None:
        """Set the slot's parameters."""
        made = _encode_params(params, seed, self._vocab)
        if (self._host_rows[slot] != made).any():
            self._host_rows[slot] = made
            self._dirty_slots.add(slot)

    def flush(self) -> None:
        """Start the copy of the rows that changed."""
        if not self._dirty_slots:
            return
        slots = np.array(sorted(self._dirty_slots), np.int64)
        self._dirty_slots.clear()
        packed = to_device(
            np.concatenate([slots[:, None], self._host_rows[slots]], 1), self.rows.device
        )
        self.rows.index_copy_(0, packed[:, 0], packed[:, 1:])


def _encode_params(p: SamplingParams, seed: int, vocab: int) -> np.ndarray:
    repetition, frequency, presence = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
    if p.greedy:
        return pack_row(repetition=repetition, frequency=frequency, presence=presence)
    return pack_row(
        temperature=p.temperature,
        top_k=0 if p.top_k >= vocab else max(0, p.top_k),
        top_p=p.top_p,
        min_p=p.min_p,
        seed=seed,
        repetition=repetition,
        frequency=frequency,
        presence=presence,
    )

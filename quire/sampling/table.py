"""What each slot's row asks, in a table on the device that kernels and captured graphs read.

The host keeps the same lines and sends only those that changed, all in one copy: a slot that goes
from one greedy sequence to the next sends nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.core.params import SamplingParams
from quire.kernels.lines import WORDS, line
from quire.sampling.transfer import sent


class Table:
    """`lines` is the device's copy; it is up to date after `flush`."""

    def __init__(self, vocab: int, max_seqs: int, device: torch.device) -> None:
        self.lines: Tensor = torch.zeros((max_seqs, WORDS), dtype=torch.int64, device=device)
        self._host = np.zeros((max_seqs, WORDS), np.int64)
        self._changed: set[int] = set()
        self._vocab = vocab
        self._host[:] = line()
        self._changed.update(range(max_seqs))

    def write(self, slot: int, params: SamplingParams, seed: int) -> None:
        """The slot now asks this."""
        made = _line_of(params, seed, self._vocab)
        if (self._host[slot] != made).any():
            self._host[slot] = made
            self._changed.add(slot)

    def flush(self) -> None:
        """Start the copy of what changed."""
        if not self._changed:
            return
        slots = np.array(sorted(self._changed), np.int64)
        self._changed.clear()
        packed = sent(np.concatenate([slots[:, None], self._host[slots]], 1), self.lines.device)
        self.lines.index_copy_(0, packed[:, 0], packed[:, 1:])


def _line_of(p: SamplingParams, seed: int, vocab: int) -> np.ndarray:
    repetition, frequency, presence = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
    if p.greedy:
        return line(repetition=repetition, frequency=frequency, presence=presence)
    return line(
        temperature=p.temperature,
        top_k=0 if p.top_k >= vocab else max(0, p.top_k),
        top_p=p.top_p,
        min_p=p.min_p,
        seed=seed,
        repetition=repetition,
        frequency=frequency,
        presence=presence,
    )

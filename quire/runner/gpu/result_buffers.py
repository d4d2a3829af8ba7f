"""Result buffers: bring the tokens of steps that are sampled outside graphs to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.gpu.runtime import step_io as kernels
from quire.runner.gpu.staging_buffer import align_words, pinned_words
from quire.runner.step_batch import Ints


class ResultBuffers:
    """One device buffer of ids and tops, and pinned ones of the host that are used in turn."""

    def __init__(self, last_token: Tensor, rows: int, depth: int) -> None:
        """last_token: [M] of the slots. depth: more than steps that may be in flight."""
        self._last_token, device = last_token, last_token.device
        stride = align_words(rows)
        self._sent = torch.empty((2, stride), dtype=torch.int32, device=device)
        self._ring = [pinned_words(2 * stride).view(2, -1) for _ in range(depth)]
        self._index = 0

    @property
    def ids(self) -> Tensor:
        """[R or more] int32: what was stored last."""
        return self._sent[0]

    def store(self, ids: Tensor, tops: Tensor, row_slots: Tensor) -> None:
        """Keep each row's token as its slot's last, and its number for copy_to_host().

        Of a slot with several rows, which have drafts, any of their tokens stays: the host has the
        last one before the slot's next row.
        """
        kernels.store_results(ids, tops, row_slots, self._last_token, self._sent)

    def copy_to_host(self) -> Ints:
        """Start the copy, and return where it arrives: [2, R or more]."""
        self._index = (self._index + 1) % len(self._ring)
        copy = self._ring[self._index]
        copy.copy_(self._sent, non_blocking=True)
        return copy.numpy()

"""GPU chooser: chooses tokens with two ops over a table of the slots' parameters, without waiting.

Everything here starts work and returns. Any mix of greedy and random rows is one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.core.params import SamplingParams
from quire.kernels.argmax import argmax
from quire.kernels.sample import SampledTokens, sample
from quire.sampling.h2d import to_device
from quire.sampling.row_ops import ScratchBuffers
from quire.sampling.slot_param_table import SlotParamTable
from quire.sampling.steps.base import SlotBatch
from quire.sampling.steps.gpu_penalties import GpuPenalties


@dataclass(slots=True)
class GpuChooserRows:
    """A batch's slots on the device."""

    slots: Tensor  # [R] int32
    random: bool
    scaled: bool
    divisor: Tensor | None  # [R, 1] temperatures that processed logits are divided by


class GpuChooser:
    """The TokenChooser of tensors on a GPU. Captured graphs read `table` too."""

    scratch: ScratchBuffers | None = None

    def __init__(self, vocab: int, max_seqs: int, device: torch.device) -> None:
        self.table = SlotParamTable(vocab, max_seqs, device)
        self.penalties = GpuPenalties(self.table, vocab, max_seqs)
        self._device = device

    def join(self, slot: int, params: SamplingParams, seed: int) -> None:
        """A sequence takes the slot."""
        self.table.write(slot, params, seed)

    def prepare_rows(
        self, batch: SlotBatch, params: list[SamplingParams], scaled: bool
    ) -> GpuChooserRows:
        """Prepare a batch."""
        self.table.flush()
        divisor = None
        if not scaled and any(p.temperature != 1.0 and not p.greedy for p in params):
            divisor = batch.tensor([1.0 if p.greedy else p.temperature for p in params])[:, None]
        return GpuChooserRows(
            slots=to_device(np.array(batch.slots, np.int32), self._device),
            random=not all(p.greedy for p in params),
            scaled=scaled,
            divisor=divisor,
        )

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Every row takes its greatest logit."""
        return argmax(logits)

    def choose(
        self, logits: Tensor, rows: GpuChooserRows, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor, SampledTokens | None]:
        """All rows in one launch."""
        if not rows.random:
            return *argmax(logits), None
        outputs = to_device(np.array(positions, np.int32), self._device)
        drawn = sample(logits, rows.slots, outputs, self.table.rows, rows.scaled)
        return drawn.ids, drawn.max_logits, drawn

    def processed(
        self, logits: Tensor, rows: GpuChooserRows, choice: SampledTokens | None
    ) -> Tensor:
        """Filter as the draw did."""
        x = logits.float()
        if choice is None:
            return x
        least, last = choice.min_kept_logits[:, None], choice.last_kept_ids[:, None]
        columns = torch.arange(x.shape[1], device=x.device)
        kept = (x > least) | ((x == least) & (columns <= last))
        return torch.where(kept, x if rows.divisor is None else x / rows.divisor, -torch.inf)

"""Choosing tokens where nobody may wait for them: two ops over a table of what the slots ask.

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
from quire.kernels.sample import Drawn, sample
from quire.sampling.rows import Scratch
from quire.sampling.steps.base import Batch
from quire.sampling.steps.counts import Counts
from quire.sampling.table import Table
from quire.sampling.transfer import sent


@dataclass(slots=True)
class DeviceRows:
    """A batch's slots on the device."""

    slots: Tensor  # [R] int32
    random: bool
    scaled: bool
    divisor: Tensor | None  # [R, 1] temperatures that processed logits are divided by


class DeviceLane:
    """The `Lane` of tensors on a GPU. `table` is read by captured graphs too."""

    scratch: Scratch | None = None

    def __init__(self, vocab: int, max_seqs: int, device: torch.device) -> None:
        self.table = Table(vocab, max_seqs, device)
        self.counts = Counts(self.table, vocab, max_seqs)
        self._device = device

    def join(self, slot: int, params: SamplingParams, seed: int) -> None:
        """A sequence takes the slot."""
        self.table.write(slot, params, seed)

    def rows(self, batch: Batch, params: list[SamplingParams], scaled: bool) -> DeviceRows:
        """Make ready for a batch."""
        self.table.flush()
        divisor = None
        if not scaled and any(p.temperature != 1.0 and not p.greedy for p in params):
            divisor = batch.tensor([1.0 if p.greedy else p.temperature for p in params])[:, None]
        return DeviceRows(
            slots=sent(np.array(batch.slots, np.int32), self._device),
            random=not all(p.greedy for p in params),
            scaled=scaled,
            divisor=divisor,
        )

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Every row takes its greatest."""
        return argmax(logits)

    def choose(
        self, logits: Tensor, rows: DeviceRows, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor, Drawn | None]:
        """All rows in one launch."""
        if not rows.random:
            return *argmax(logits), None
        outputs = sent(np.array(positions, np.int32), self._device)
        drawn = sample(logits, rows.slots, outputs, self.table.lines, rows.scaled)
        return drawn.ids, drawn.tops, drawn

    def processed(self, logits: Tensor, rows: DeviceRows, choice: Drawn | None) -> Tensor:
        """The same cut that the draw found."""
        x = logits.float()
        if choice is None:
            return x
        least, last = choice.least[:, None], choice.last[:, None]
        columns = torch.arange(x.shape[1], device=x.device)
        kept = (x > least) | ((x == least) & (columns <= last))
        return torch.where(kept, x if rows.divisor is None else x / rows.divisor, -torch.inf)

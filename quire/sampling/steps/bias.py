"""Logit bias: adds a number per token id to its logit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from quire.sampling.slot_join import SlotJoin
from quire.sampling.steps.base import LogitsEdit, SlotBatch


@dataclass(slots=True)
class LogitBias:
    """params.logit_bias."""

    reads_outputs: ClassVar = False

    _bias: dict[int, dict[int, float]] = field(default_factory=dict)

    def join(self, joined: SlotJoin) -> None:
        slot = joined.slot
        self._bias.pop(slot, None)
        bias = {i: float(b) for i, b in (joined.params.logit_bias or {}).items() if b}
        if bias:
            self._bias[slot] = bias

    def leave(self, slot: int) -> None:
        self._bias.pop(slot, None)

    def applies_to(self, slot: int) -> bool:
        return slot in self._bias

    def build_edit(self, batch: SlotBatch) -> LogitsEdit | None:
        pairs = [
            (row * batch.vocab + int(i), b)
            for row, slot in batch.rows_in(self._bias)
            for i, b in self._bias[slot].items()
            if int(i) < batch.vocab
        ]
        if not pairs:
            return None
        return _LogitBiasEdit(
            batch.tensor([p for p, _ in pairs]), batch.tensor([b for _, b in pairs])
        )


@dataclass(slots=True)
class _LogitBiasEdit(LogitsEdit):
    flat_indices: Tensor  # in the flattened logits, each once
    values: Tensor

    def apply(self, logits: Tensor, positions: Sequence[int], errors: dict[int, str]) -> None:
        flat = logits.view(-1)
        flat[self.flat_indices] = flat[self.flat_indices] + self.values

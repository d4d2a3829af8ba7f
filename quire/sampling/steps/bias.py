"""Logit bias: a number per token id, added to its logit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from quire.core.types import Sequence as Seq
from quire.sampling.steps.base import Batch, Edit


@dataclass(slots=True)
class LogitBias:
    """params.logit_bias."""

    _bias: dict[int, dict[int, float]] = field(default_factory=dict)

    def join(self, slot: int, seq: Seq, tokens: list[int]) -> None:
        self._bias.pop(slot, None)
        bias = {i: float(b) for i, b in (seq.request.params.logit_bias or {}).items() if b}
        if bias:
            self._bias[slot] = bias

    def leave(self, slot: int) -> None:
        self._bias.pop(slot, None)

    def holds(self, slot: int) -> bool:
        return slot in self._bias

    def edit(self, batch: Batch) -> Edit | None:
        pairs = [
            (row * batch.vocab + int(i), b)
            for row, slot in batch.of(self._bias)
            for i, b in self._bias[slot].items()
            if int(i) < batch.vocab
        ]
        if not pairs:
            return None
        return _Add(batch.tensor([p for p, _ in pairs]), batch.tensor([b for _, b in pairs]))


@dataclass(slots=True)
class _Add(Edit):
    places: Tensor  # in the flattened logits, each once
    values: Tensor

    def apply(self, logits: Tensor, positions: Sequence[int], errors: dict[int, str]) -> None:
        flat = logits.view(-1)
        flat[self.places] = flat[self.places] + self.values

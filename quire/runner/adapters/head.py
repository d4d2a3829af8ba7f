"""Output heads with adapters: they multiply the rows of which logits are computed."""

from __future__ import annotations

from quire.kernels.formats.lora_bank import LoraRows
from quire.runner.adapters.linear import AdaptedLinear, LoraWeight


class LoraHead(LoraWeight):
    """The weight of an output head with a bank of deltas."""

    __slots__ = ()

    def _rows(self) -> LoraRows | None:
        return self.step.sampled


class AdaptedHead(AdaptedLinear):
    """The output head of one rank, and its bank. A tied one has the embedding's weight inside."""

    weight_class = LoraHead

"""Token embeddings with adapters.

The table is wrapped: rows of adapters get their delta added to the vector that was looked up. Ranks
cut the vocabulary: each adds the deltas of its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from quire.kernels.formats.lora_bank import LoraPart, SlotCopy
from quire.kernels.lora import lora_embedding
from quire.layers import Embedding
from quire.runner.adapters.adapted_layer import AdaptedLayer, SlotSizes, StepRows
from quire.runner.adapters.linear import LoraWeight
from quire.weights.adapters.adapter import Delta, EmbeddingDelta, is_scaled


class LoraTable(LoraWeight):
    """A table with a bank of deltas. As the weight of an output head it is the inner one."""

    __slots__ = ()

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.inner.product(x, bias)

    def rows(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        y = self.inner.rows(ids, scale)
        if self.step.rows is None:
            return y
        bank = self.scaled if self.step.is_scaled else self.bank
        return lora_embedding(y, ids, bank, self.step.rows)


class AdaptedEmbedding(AdaptedLayer):
    """The token embedding of one rank, and its bank."""

    def __init__(self, layer: Embedding, sizes: SlotSizes, step: StepRows) -> None:
        tokens, columns = layer.weight_layout("weight")[0].ranges
        self._tokens = slice(tokens.start, tokens.stop)
        bank = sizes.bank(len(tokens), (len(columns),), scaled=True)
        self._weight = LoraTable(layer.weight, bank, step, bank.rank)
        layer.set_param("weight", self._weight)

    @property
    def numel(self) -> int:
        return self._weight.bank.numel

    @property
    def scales(self) -> int:
        return 2 * sum(self._weight.bank.parts)

    def copies(self, parts: Mapping[int, Delta]) -> Iterator[SlotCopy]:
        delta = parts.get(0)
        if delta is None:
            return self._weight.bank.copies([None])
        assert isinstance(delta, EmbeddingDelta), "an embedding takes deltas of embeddings"
        bank = self._weight.scaled if is_scaled(delta) else self._weight.bank
        return bank.copies([LoraPart(delta.a[:, self._tokens], delta.b, delta.factor)])

    def reset_scale(self, slot: int) -> None:
        self._weight.reset_scale(slot)

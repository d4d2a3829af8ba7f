"""Banks of experts with adapters.

The bank of gate and up is wrapped: rows of adapters are computed again, with the deltas before and
after the activation. Ranks cut the width of each expert: B of gate and up by outputs, A of down by
inputs. With expert parallelism they have the adapters of their own experts, whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quire.kernels.formats.lora_bank import LoraPart, SlotCopy
from quire.kernels.formats.weight import StoredExperts
from quire.kernels.lora_experts import ExpertsLora, lora_experts
from quire.layers import Experts
from quire.runner.adapters.adapted_layer import AdaptedLayer, SlotSizes, StepRows
from quire.weights.adapters.adapter import Delta, ExpertsDelta

DOWN = 2
"""Its part; 0 and 1 are gate and up."""


class LoraExperts(StoredExperts):
    """A bank of gate and up with deltas of both products. All else about it is the inner bank's."""

    __slots__ = ("_step", "inner", "lora")
    kind = "lora"

    def __init__(self, inner: StoredExperts, lora: ExpertsLora, step: StepRows) -> None:
        self.inner, self.lora, self._step = inner, lora, step

    def mlp(self, x: Tensor, ids: Tensor, weights: Tensor, down: Any, *further: Any) -> Tensor:
        y = self.inner.mlp(x, ids, weights, down, *further)
        if self._step.rows is None:
            return y
        gate, *biases = further
        given = x, ids, weights, self.inner, down, gate
        return lora_experts(y, *given, self.lora, self._step.rows, *biases)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.inner.dequantize(dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class AdaptedExperts(AdaptedLayer):
    """The experts of one layer, as one rank has them, and their banks."""

    def __init__(self, layer: Experts, sizes: SlotSizes, step: StepRows) -> None:
        (rows, _), width = layer.weight_layout("down_proj")[0].ranges, _width(layer)
        inner, experts = len(width), len(layer.local)
        self._layer = layer
        self.lora = ExpertsLora(
            sizes.bank(layer.hidden, (inner, inner), experts),
            sizes.bank(inner, (len(rows),), experts),
        )
        layer.set_param("gate_up_proj", LoraExperts(layer.gate_up_proj, self.lora, step))

    @property
    def numel(self) -> int:
        return sum(bank.numel for bank in self.lora)

    def copies(self, parts: Mapping[int, Delta]) -> Iterator[SlotCopy]:
        width = _width(self._layer)
        mine, own = slice(width.start, width.stop), list(self._layer.local)
        found: dict[int, LoraPart] = {}
        for part, delta in parts.items():
            assert isinstance(delta, ExpertsDelta), "a bank of experts takes deltas of experts"
            a, b = delta.a[own], delta.b[own]
            cut = (a[..., mine], b) if part == DOWN else (a, b[..., mine])
            found[part] = LoraPart(*cut)
        yield from self.lora.gate_up.copies([found.get(0), found.get(1)])
        yield from self.lora.down.copies([found.get(DOWN)])


def _width(layer: Experts) -> range:
    """The part of each expert's width that this rank has."""
    return layer.weight_layout("down_proj")[0].ranges[1]

"""Linear layers with adapters.

The weight of the layer is wrapped: the product is that of the inner weight, of whatever form, and
rows of adapters get their delta added. A step without such rows multiplies as if there were no
banks. Ranks cut a delta as they cut the weight: B by outputs, or A by inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from quire.kernels.formats.lora_bank import LoraBank, LoraPart, LoraRows, SlotCopy
from quire.kernels.formats.weight import StoredWeight
from quire.kernels.lora import lora_linear
from quire.layers import Linear
from quire.runner.adapters.adapted_layer import SlotSizes, StepRows, WrappedWeight
from quire.weights.adapters.adapter import Delta, LinearDelta, dora_factor

ROWS_AT_ONCE = 1024
"""Of a weight, in float32."""


class LoraWeight(WrappedWeight):
    """A weight with a bank of deltas."""

    __slots__ = ("bank",)

    def __init__(self, inner: StoredWeight, bank: LoraBank, step: StepRows) -> None:
        super().__init__(inner, step)
        self.bank = bank

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y, rows = self.inner.product(x, bias), self._rows()
        return y if rows is None else lora_linear(y, x, self.bank, rows)

    def _rows(self) -> LoraRows | None:
        """The rows that the next product multiplies."""
        return self.step.rows


class AdaptedLinear:
    """A linear layer of one rank, and its bank."""

    weight_class: ClassVar[type[LoraWeight]] = LoraWeight

    def __init__(self, layer: Linear, sizes: SlotSizes, step: StepRows) -> None:
        cut = layer.weight_layout("weight")
        parts = tuple(len(part.ranges[0]) for part in cut)
        bank = sizes.bank(len(cut[0].ranges[1]), parts)
        self._layer = layer
        self._weight = self.weight_class(layer.weight, bank, step)
        layer.set_param("weight", self._weight)

    @property
    def numel(self) -> int:
        return self._weight.bank.numel

    def copies(self, parts: Mapping[int, Delta]) -> Iterator[SlotCopy]:
        found = {part: one for part, one in parts.items() if isinstance(one, LinearDelta)}
        assert len(found) == len(parts), "a linear layer takes linear deltas"
        if any(one.bias is not None or one.magnitude is not None for one in found.values()):
            return _scaled_copies(self._layer, self._weight, found)
        return self._weight.bank.copies(_cut(self._layer, found))


def _cut(layer: Linear, deltas: Mapping[int, LinearDelta]) -> list[LoraPart | None]:
    """Return what this rank has of the deltas of a layer, one of each part."""
    found: list[LoraPart | None] = []
    for part, place in enumerate(layer.weight_layout("weight")):
        rows, columns = place.ranges
        if part in deltas:
            a, b = deltas[part].a, deltas[part].b
            a, b = a[:, columns.start : columns.stop], b[:, rows.start : rows.stop]
            found.append(LoraPart(a, b))
        else:
            found.append(None)
    return found


def _scaled_copies(
    layer: Linear, weight: LoraWeight, deltas: Mapping[int, LinearDelta]
) -> Iterator[SlotCopy]:
    """Copies of biases of B, or of DoRA's y = f * (x W^T + x a^T b) + bias.

    f is magnitude / norm of each row of W + b^T a. A layer gets memory for f at its first adapter
    that needs it. Of one rank.
    """
    bank = weight.bank
    if bank.factor is None:
        factors = torch.ones((bank.slots, sum(bank.parts)), device=bank.b.device)
        shifts = torch.zeros_like(factors)
        bank = weight.bank = replace(bank, factor=factors, shift=shifts)
        weight.step.revision += 1
    outputs = sum(bank.parts)
    factor, shift = torch.ones(outputs), torch.zeros(outputs)
    parts: list[LoraPart | None] = []
    for part, columns in enumerate(bank.columns()):
        if part not in deltas:
            parts.append(None)
            continue
        delta = deltas[part]
        b = delta.b
        if delta.bias is not None:
            shift[columns] += delta.bias.float()
        if delta.magnitude is not None:
            rows = weight.dequantize()[columns].cpu().split(ROWS_AT_ONCE)
            own = dora_factor(delta, rows)
            factor[columns] = own
            if layer.bias is not None:
                shift[columns] += layer.bias[columns].cpu().float() * (1 - own)
            b = (b.float() * own).to(b.dtype)
        parts.append(LoraPart(delta.a, b))
    return bank.copies(parts, factor, shift)

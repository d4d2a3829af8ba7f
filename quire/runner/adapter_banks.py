"""Adapter banks: what a worker has of adapters, and the weights that add them to a model's.

Each layer that adapters can change has a bank with a place for each slot. Its weight is wrapped:
the product is that of the inner weight, of whatever form, and rows of adapters get their delta
added. A step without such rows multiplies as if there were no banks.

Ranks cut a delta as they cut the weight: B by outputs, or A by inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from quire.kernels.formats.lora_bank import LoraBank, LoraPart, LoraRows
from quire.kernels.formats.weight import StoredWeight
from quire.kernels.lora import lora_linear, sort_rows
from quire.layers import Linear
from quire.weights.adapters.adapter import LinearDelta, dora_factor

PartDelta = tuple[Tensor, Tensor, "Tensor | None", "Tensor | None"]
"""a [r, I], b [r, O], bias [O], and magnitude [O] of DoRA, whole: not cut over ranks."""
LayerDeltas = dict[int, PartDelta]
"""Of one layer, by part."""


ROWS_AT_ONCE = 1024
"""Of a weight, in float32."""


class _StepRows:
    """The rows of adapters in the current step; None: it has none."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: LoraRows | None = None


class LoraWeight(StoredWeight):
    """A weight with a bank of deltas. Everything else about it is the inner weight's."""

    __slots__ = ("_step", "bank", "inner")
    kind = "lora"

    def __init__(self, inner: StoredWeight, bank: LoraBank, step: _StepRows) -> None:
        self.inner, self.bank, self._step = inner, bank, step

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.inner.product(x, bias)
        if self._step.rows is None:
            return y
        return lora_linear(y, x, self.bank, self._step.rows)

    def rows(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        return self.inner.rows(ids, scale)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.inner.dequantize(dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class AdapterBanks:
    """The banks of one rank's model."""

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[str],
        *,
        slots: int,
        max_rank: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """layers: names of those that adapters can change. max_tokens: of the largest step."""
        self._step = _StepRows()
        self._rows = LoraRows.allocate(max_tokens, slots, device)
        self._layers: dict[str, Linear] = {}
        modules = dict(model.named_modules())
        for name in layers:
            layer = modules[name]
            assert isinstance(layer, Linear), name
            cut = layer.weight_layout("weight")
            parts = tuple(len(part.ranges[0]) for part in cut)
            inputs = len(cut[0].ranges[1])
            bank = LoraBank.allocate(slots, max_rank, inputs, parts, dtype, device)
            layer.set_param("weight", LoraWeight(layer.weight, bank, self._step))
            self._layers[name] = layer
        model.register_forward_hook(self._end_forward, always_call=True)
        model.adapter_banks = self  # type: ignore[assignment]  # for the step's part

    def load(self, slot: int, deltas: Mapping[str, LayerDeltas]) -> None:
        """Fill a slot, on the current stream. What the adapter does not change has rank 0."""
        for name, layer in self._layers.items():
            weight = cast(LoraWeight, layer.weight)
            parts = deltas.get(name, {})
            if any(bias is not None or scale is not None for _, _, bias, scale in parts.values()):
                _write_scaled(layer, weight, slot, parts)
            else:
                weight.bank.write(slot, _cut(layer, parts))

    def begin_forward(self, slots: Tensor) -> None:
        """slots [T] int32 of the tokens of the next forward pass, -1: of no adapter."""
        rows = self._rows.first(len(slots))
        rows.slots.copy_(slots, non_blocking=True)
        sort_rows(rows)
        self._step.rows = rows

    def _end_forward(self, *_: Any) -> None:
        self._step.rows = None


def _cut(layer: Linear, deltas: LayerDeltas) -> list[LoraPart | None]:
    """Return what this rank has of the deltas of a layer, one of each part."""
    found: list[LoraPart | None] = []
    for part, place in enumerate(layer.weight_layout("weight")):
        rows, columns = place.ranges
        if part in deltas:
            a, b, _, _ = deltas[part]
            a, b = a[:, columns.start : columns.stop], b[:, rows.start : rows.stop]
            found.append(LoraPart(a, b))
        else:
            found.append(None)
    return found


def _write_scaled(layer: Linear, weight: LoraWeight, slot: int, deltas: LayerDeltas) -> None:
    """Fill a slot with biases of B, or with DoRA's y = f * (x W^T + x a^T b^T) + bias.

    f is magnitude / norm of each row of W + b a. A layer gets memory for f at its first adapter
    that needs it. Of one rank.
    """
    bank = weight.bank
    if bank.factor is None:
        factors = torch.ones((bank.slots, sum(bank.parts)), device=bank.b.device)
        shifts = torch.zeros_like(factors)
        bank = weight.bank = replace(bank, factor=factors, shift=shifts)
    outputs = sum(bank.parts)
    factor, shift = torch.ones(outputs), torch.zeros(outputs)
    parts: list[LoraPart | None] = []
    for part, columns in enumerate(bank.columns()):
        if part not in deltas:
            parts.append(None)
            continue
        a, b, bias, magnitude = deltas[part]
        if bias is not None:
            shift[columns] += bias.float()
        if magnitude is not None:
            rows = weight.dequantize()[columns].cpu().split(ROWS_AT_ONCE)
            own = dora_factor(LinearDelta(a, b.t(), None, magnitude), rows)
            factor[columns] = own
            if layer.bias is not None:
                shift[columns] += layer.bias[columns].cpu().float() * (1 - own)
            b = (b.float() * own).to(b.dtype)
        parts.append(LoraPart(a, b))
    bank.write(slot, parts, factor, shift)


def banks_of(model: object) -> AdapterBanks:
    """Return the banks of a model that has some."""
    found = getattr(model, "adapter_banks", None)
    assert isinstance(found, AdapterBanks), "a step with adapters, of a model without banks"
    return found

"""Adapter banks: what a worker has of adapters, and the weights that add them to a model's.

Each layer that adapters can change has a bank with a place for each slot. Its weight is wrapped:
the product is that of the inner weight, of whatever form, and rows of adapters get their delta
added. A step without such rows multiplies as if there were no banks.

Ranks cut a delta as they cut the weight: B by outputs, or A by inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.formats.lora_bank import LoraBank, LoraPart, LoraRows
from quire.kernels.formats.weight import StoredWeight
from quire.kernels.lora import lora_linear, sort_rows
from quire.layers import Linear

LayerDeltas = dict[int, tuple[Tensor, Tensor]]
"""Of one layer: part -> (a [r, I], b [r, O]), whole: not cut over ranks."""


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
        self._banks: dict[str, LoraBank] = {}
        modules = dict(model.named_modules())
        for name in layers:
            layer = modules[name]
            assert isinstance(layer, Linear), name
            cut = layer.weight_layout("weight")
            parts = tuple(len(part.ranges[0]) for part in cut)
            inputs = len(cut[0].ranges[1])
            bank = LoraBank.allocate(slots, max_rank, inputs, parts, dtype, device)
            layer.set_param("weight", LoraWeight(layer.weight, bank, self._step))
            self._layers[name], self._banks[name] = layer, bank
        model.register_forward_hook(self._end_forward, always_call=True)
        model.adapter_banks = self  # type: ignore[assignment]  # for the step's part

    def load(self, slot: int, deltas: Mapping[str, LayerDeltas]) -> None:
        """Fill a slot, on the current stream. What the adapter does not change has rank 0."""
        for name, bank in self._banks.items():
            bank.write(slot, _cut(self._layers[name], deltas.get(name, {})))

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
            a, b = deltas[part]
            a, b = a[:, columns.start : columns.stop], b[:, rows.start : rows.stop]
            found.append(LoraPart(a, b))
        else:
            found.append(None)
    return found


def banks_of(model: object) -> AdapterBanks:
    """Return the banks of a model that has some."""
    found = getattr(model, "adapter_banks", None)
    assert isinstance(found, AdapterBanks), "a step with adapters, of a model without banks"
    return found

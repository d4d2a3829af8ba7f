"""Adapter banks: what one rank of a model has of adapters."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.formats.lora_bank import LoraRows, SlotCopy
from quire.kernels.lora import sort_rows
from quire.layers import Experts, Linear
from quire.runner.adapters.adapted_layer import AdaptedLayer, SlotLoad, StepRows
from quire.runner.adapters.experts import AdaptedExperts
from quire.runner.adapters.linear import AdaptedLinear
from quire.weights.adapters.adapter import Deltas

KINDS: tuple[tuple[type[nn.Module], Any], ...] = (
    (Experts, AdaptedExperts),
    (Linear, AdaptedLinear),
)
"""Class of layers -> class that adds adapters to them. The first that fits."""


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
        self._step = StepRows()
        self._rows = LoraRows.allocate(max_tokens, slots, device)
        self._layers: dict[str, AdaptedLayer] = {}
        self._device = device
        modules = dict(model.named_modules())
        for name in layers:
            layer = modules[name]
            adapted = next(made for kind, made in KINDS if isinstance(layer, kind))
            self._layers[name] = adapted(layer, slots, max_rank, dtype, device, self._step)
        model.register_forward_hook(self._end_forward, always_call=True)
        model.adapter_banks = self  # type: ignore[assignment]  # for the step's part

    @property
    def numel(self) -> int:
        """Numbers of all banks."""
        return sum(layer.numel for layer in self._layers.values())

    def load(self, slots: Collection[int], loads: Iterable[SlotLoad]) -> None:
        """Fill slots for the step that is launched next, whose tokens have `slots`."""
        loads = tuple(loads)
        if self._device.type == "cpu":
            for one in loads:
                for place, source in self._copies(one.deltas):
                    place[one.slot].copy_(source)
            return
        self._loader.begin_step(slots, [one.slot for one in loads])
        for one in loads:
            self._loader.load(one.slot, partial(self._copies, one.deltas), one.packed)

    @cached_property
    def _loader(self) -> Any:
        """Of a GPU."""
        module = importlib.import_module("quire.runner.gpu.slot_loader")
        return module.SlotLoader(self._device)

    def _copies(self, deltas: Deltas) -> Iterator[SlotCopy]:
        for name, layer in self._layers.items():
            yield from layer.copies(deltas.get(name, {}))

    def begin_forward(self, slots: Tensor) -> None:
        """slots [T] int32 of the tokens of the next forward pass, -1: of no adapter."""
        rows = self._rows.first(len(slots))
        rows.slots.copy_(slots, non_blocking=True)
        sort_rows(rows)
        self._step.rows = rows

    def _end_forward(self, *_: Any) -> None:
        self._step.rows = None


def banks_of(model: object) -> AdapterBanks:
    """Return the banks of a model that has some."""
    found = getattr(model, "adapter_banks", None)
    assert isinstance(found, AdapterBanks), "a step with adapters, of a model without banks"
    return found

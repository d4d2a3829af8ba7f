"""Adapter banks: what one rank of a model has of adapters."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quire.kernels.formats.lora_bank import LoraRows, SlotCopy
from quire.kernels.lora import assign_rows
from quire.layers import Experts, Linear
from quire.runner.adapters.adapted_layer import AdaptedLayer, SlotLoad, StepRows
from quire.runner.adapters.experts import AdaptedExperts
from quire.runner.adapters.linear import AdaptedLinear
from quire.sampling.h2d import to_device
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
        max_seqs: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """layers: names of those that adapters can change. max_tokens: of the largest step, padding
        included. max_seqs: slots of sequences."""
        self._step = StepRows()
        self._rows, self._sampled = (LoraRows.allocate(max_tokens, slots, device) for _ in range(2))
        self._slots = np.full(max_seqs, -1, np.int32)  # by slot of the sequence
        self._device_slots = torch.full((max_seqs,), -1, dtype=torch.int32, device=device)
        self._layers: dict[str, AdaptedLayer] = {}
        self._device = device
        modules = dict(model.named_modules())
        for name in layers:
            layer = modules[name]
            adapted = next(made for kind, made in KINDS if isinstance(layer, kind))
            self._layers[name] = adapted(layer, slots, max_rank, dtype, device, self._step)
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

    def assign(self, sequences: np.ndarray, slots: np.ndarray) -> None:
        """Set the adapters of sequences, both int32 slots; -1: none. On the current stream."""
        if np.array_equal(self._slots[sequences], slots):
            return
        assigned = self._slots.copy()
        assigned[sequences] = slots
        self._device_slots.copy_(to_device(assigned, self._device_slots.device))
        self._slots = assigned

    @property
    def name(self) -> str:
        """Tapes and graphs are of one revision of the banks: they hold their addresses."""
        return f"adapters {self._step.revision}"

    @property
    def changes_logits(self) -> bool:
        return False

    @contextmanager
    def forward(self, token_slots: Tensor) -> Iterator[None]:
        """Set the rows of a forward pass. token_slots: of each token's sequence, -1: padding."""
        step = self._step
        step.rows = self._rows.first(len(token_slots))
        assign_rows(step.rows, self._device_slots, token_slots)
        try:
            yield
        finally:
            step.rows = None

    @contextmanager
    def logits(self, row_slots: Tensor) -> Iterator[None]:
        """Set the rows of logits, if a layer of them is adapted."""
        step = self._step
        if self.changes_logits:
            step.sampled = self._sampled.first(len(row_slots))
            assign_rows(step.sampled, self._device_slots, row_slots)
        try:
            yield
        finally:
            step.sampled = None


def find_banks(model: object) -> AdapterBanks | None:
    """Return the banks of a model; None: it has none."""
    found = getattr(model, "adapter_banks", None)
    assert found is None or isinstance(found, AdapterBanks)
    return found

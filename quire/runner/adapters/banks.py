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
from quire.layers import ClassifierLinear, Embedding, Experts, Linear, LMHead
from quire.models.base import StepInputs
from quire.runner.adapters.adapted_layer import AdaptedLayer, SlotLoad, SlotSizes, StepRows
from quire.runner.adapters.embedding import AdaptedEmbedding
from quire.runner.adapters.experts import AdaptedExperts
from quire.runner.adapters.head import AdaptedHead
from quire.runner.adapters.linear import AdaptedLinear
from quire.runner.adapters.replaced import AdaptedClassifier, ReplacedEmbedding, ReplacedHead
from quire.runner.adapters.row_norms import NormsRequest, RankNorms, rank_norms
from quire.runner.parts.base import NoOwnGraphs, StepVariant
from quire.sampling.h2d import to_device
from quire.weights.adapters.adapter import Deltas, LinearDelta, is_scaled


def _adapted_class(layer: nn.Module, replaced: bool) -> Any:
    """Return the class that adds adapters to a layer. replaced: whether rows of a vocabulary are
    replaced too."""
    if isinstance(layer, Experts):
        return AdaptedExperts
    if isinstance(layer, Embedding):
        return ReplacedEmbedding if replaced else AdaptedEmbedding
    if isinstance(layer, LMHead):
        return ReplacedHead if replaced else AdaptedHead
    return AdaptedClassifier if isinstance(layer, ClassifierLinear) else AdaptedLinear


class AdapterBanks(NoOwnGraphs):
    """The banks of one rank's model."""

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[str],
        *,
        sizes: SlotSizes,
        max_tokens: int,
        max_seqs: int,
    ) -> None:
        """layers: names of those that adapters can change. max_tokens: of the largest step, padding
        included. max_seqs: slots of sequences."""
        self.step = StepRows()
        self._rows, self._sampled = (
            LoraRows.allocate(max_tokens, sizes.slots, sizes.device) for _ in range(2)
        )
        self._slots = np.full(max_seqs, -1, np.int32)  # by slot of the sequence
        self._device_slots = torch.full((max_seqs,), -1, dtype=torch.int32, device=sizes.device)
        self.layers: dict[str, AdaptedLayer] = {}
        self._changes_logits = False
        self._device = sizes.device
        self.dtype = sizes.dtype
        self._scaled: set[int] = set()  # slots whose adapters have factors or biases
        self._narrow_rank = sizes.narrow_rank
        self._max_rank = sizes.max_rank
        self._wide: set[int] = set()  # slots whose adapters have more ranks
        modules = dict(model.named_modules())
        self._modules = {name: modules[name] for name in layers}  # not the model: it has the banks
        for name, layer in self._modules.items():
            adapted = _adapted_class(layer, sizes.replaced_rows > 0)
            self.layers[name] = adapted(layer, sizes, self.step)
            self._changes_logits |= isinstance(layer, (LMHead, ClassifierLinear))
        model.adapter_banks = self  # type: ignore[assignment]  # for the step's part

    @property
    def numel(self) -> int:
        """Numbers of all banks."""
        return sum(layer.numel for layer in self.layers.values())

    @property
    def scales(self) -> int:
        """Numbers of factors and shifts of a slot, in float32."""
        return sum(layer.scales for layer in self.layers.values())

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of adapters that have kernels of their own."""
        return (1, self._max_rank) if self._narrow_rank < self._max_rank else (1,)

    def load(self, slots: Collection[int], loads: Iterable[SlotLoad]) -> None:
        """Fill slots for the step that is launched next, whose tokens have `slots`."""
        loads = tuple(loads)
        on_gpu = self._device.type != "cpu"
        if on_gpu:
            self._loader.begin_step(slots, [one.slot for one in loads])
        for one in loads:
            copies = partial(self._copies, one.deltas)
            reset = self._reset_scale if one.slot in self._scaled else None
            if scaled := any(is_scaled(d) for parts in one.deltas.values() for d in parts.values()):
                self._scaled.add(one.slot)  # also if the load fails halfway
            if wide := _linear_rank(one.deltas) > self._narrow_rank:
                self._wide.add(one.slot)
            if on_gpu:
                self._loader.load(one.slot, copies, one.packed, reset)
            else:
                if reset is not None:
                    reset(one.slot)
                for place, source in copies():
                    place[one.slot].copy_(source)
            if not scaled:
                self._scaled.discard(one.slot)
            if not wide:
                self._wide.discard(one.slot)
        self.step.is_scaled = not self._scaled.isdisjoint(slots)
        self.step.is_wide = not self._wide.isdisjoint(slots)

    def norms(self, request: NormsRequest) -> dict[int, RankNorms]:
        """Return what this rank has of the norms of a layer's rows; nothing of a layer of another
        pipeline stage."""
        if request.layer not in self.layers:
            return {}
        layer = self._modules[request.layer]
        assert isinstance(layer, (Linear, Embedding)), request.layer
        return rank_norms(layer, request.deltas)

    def _reset_scale(self, slot: int) -> None:
        for layer in self.layers.values():
            layer.reset_scale(slot)

    @cached_property
    def _loader(self) -> Any:
        """Of a GPU."""
        module = importlib.import_module("quire.runner.gpu.slot_loader")
        return module.SlotLoader(self._device)

    def _copies(self, deltas: Deltas) -> Iterator[SlotCopy]:
        for name, layer in self.layers.items():
            for copy in layer.copies(deltas.get(name, {})):
                assert copy.place.dtype == copy.source.dtype, f"{name}: a copy does not convert"
                yield copy

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
        name = "scaled adapters" if self.step.is_scaled else "adapters"
        return f"{name} of any rank" if self.step.is_wide else name

    def forms(self) -> tuple[StepVariant, ...]:
        """Those with graphs: of steps of few ranks, and of any if adapters may have more."""
        return (self, WideAdapters(self)) if self._narrow_rank < self._max_rank else (self,)

    decodes = True
    least_rows = 1
    most_rows = None
    has_prompts = True
    rotary_axes = 1

    def reset(self) -> None:
        self.step.is_scaled = self.step.is_wide = False

    def inputs(self, step: StepInputs) -> StepInputs:
        return step

    @property
    def changes_logits(self) -> bool:
        return self._changes_logits

    @contextmanager
    def forward(self, token_slots: Tensor) -> Iterator[None]:
        """Set the rows of a forward pass. token_slots: of each token's sequence, -1: padding."""
        step = self.step
        step.rows = self._rows.first(len(token_slots))
        assign_rows(step.rows, self._device_slots, token_slots)
        try:
            yield
        finally:
            step.rows = None

    @contextmanager
    def logits(self, row_slots: Tensor) -> Iterator[None]:
        """Set the rows of logits, if a layer of them is adapted."""
        step = self.step
        if self.changes_logits:
            step.sampled = self._sampled.first(len(row_slots))
            assign_rows(step.sampled, self._device_slots, row_slots)
        try:
            yield
        finally:
            step.sampled = None


class WideAdapters(NoOwnGraphs):
    """Steps with an adapter of any rank, while their graphs are captured."""

    decodes = True
    least_rows = 1
    most_rows = None
    has_prompts = True
    rotary_axes = 1

    def __init__(self, banks: AdapterBanks) -> None:
        self._banks = banks

    @property
    def name(self) -> str:
        with self._wide():
            return self._banks.name

    @property
    def changes_logits(self) -> bool:
        return self._banks.changes_logits

    def reset(self) -> None:
        self._banks.reset()

    def inputs(self, step: StepInputs) -> StepInputs:
        return step

    @contextmanager
    def forward(self, token_slots: Tensor) -> Iterator[None]:
        with self._wide(), self._banks.forward(token_slots):
            yield

    @contextmanager
    def logits(self, row_slots: Tensor) -> Iterator[None]:
        with self._wide(), self._banks.logits(row_slots):
            yield

    @contextmanager
    def _wide(self) -> Iterator[None]:
        step = self._banks.step
        before, step.is_wide = step.is_wide, True
        try:
            yield
        finally:
            step.is_wide = before


def _linear_rank(deltas: Deltas) -> int:
    """The largest rank of all linear layers."""
    found = (delta for parts in deltas.values() for delta in parts.values())
    return max((len(one.a) for one in found if isinstance(one, LinearDelta)), default=0)


def find_banks(model: object) -> AdapterBanks | None:
    """Return the banks of a model; None: it has none."""
    found = getattr(model, "adapter_banks", None)
    assert found is None or isinstance(found, AdapterBanks)
    return found

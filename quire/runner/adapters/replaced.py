"""Layers with weights that adapters replace: embeddings, output heads, heads that classify.

A slot has room for some rows of a weight: for all of a head that classifies, elsewhere for as many
as the memory plan counts. Ranks cut a vocabulary as they cut the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from quire.kernels.formats.lora_bank import SlotCopy
from quire.kernels.formats.weight import StoredWeight
from quire.kernels.replaced_rows import ReplacedRows, replace_outputs, replace_vectors
from quire.layers import Embedding, Linear
from quire.runner.adapters.adapted_layer import AdaptedLayer, SlotSizes, StepRows, WrappedWeight
from quire.runner.adapters.embedding import AdaptedEmbedding
from quire.runner.adapters.head import AdaptedHead
from quire.weights.adapters.adapter import Delta, TokenRows, WholeWeight


class ReplacedWeight(WrappedWeight):
    """The weight of an output layer, and outputs in place of its own."""

    __slots__ = ("replaced",)

    def __init__(self, inner: StoredWeight, replaced: ReplacedRows, step: StepRows) -> None:
        super().__init__(inner, step)
        self.replaced = replaced

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y, rows = self.inner.product(x, bias), self.step.sampled
        return y if rows is None else replace_outputs(y, x, self.replaced, rows.slots, bias)


class ReplacedTable(WrappedWeight):
    """The weight of an embedding, and vectors in place of its own."""

    __slots__ = ("places", "replaced")

    def __init__(
        self, inner: StoredWeight, replaced: ReplacedRows, places: Tensor, step: StepRows
    ) -> None:
        super().__init__(inner, step)
        self.replaced, self.places = replaced, places

    def rows(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        y, rows = self.inner.rows(ids, scale), self.step.rows
        if rows is None:
            return y
        return replace_vectors(y, ids, self.replaced.rows, self.places, rows.slots, scale)


class AdaptedClassifier(AdaptedLayer):
    """A layer of a head that classifies."""

    def __init__(self, layer: Linear, sizes: SlotSizes, step: StepRows) -> None:
        self._tokens, self._replaced = _replace_outputs_of(layer, sum(_rows_of(layer)), sizes, step)

    @property
    def numel(self) -> int:
        return self._replaced.numel

    def copies(self, parts: Mapping[int, Delta]) -> Iterator[SlotCopy]:
        return _output_copies(self._replaced, self._tokens, parts.get(0))


class _ReplacedLayer(AdaptedLayer):
    """A layer of a vocabulary, with deltas and with rows in place of its own."""

    _adapted: AdaptedLayer
    _replaced: ReplacedRows

    @property
    def numel(self) -> int:
        return self._adapted.numel + self._replaced.numel

    @property
    def scales(self) -> int:
        return self._adapted.scales

    def reset_scale(self, slot: int) -> None:
        self._adapted.reset_scale(slot)


class ReplacedHead(_ReplacedLayer):
    """The output head of one rank."""

    def __init__(self, layer: Linear, sizes: SlotSizes, step: StepRows) -> None:
        self._adapted = AdaptedHead(layer, sizes, step)
        self._tokens, self._replaced = _replace_outputs_of(layer, sizes.replaced_rows, sizes, step)

    def copies(self, parts: Mapping[int, Delta]) -> Iterator[SlotCopy]:
        yield from self._adapted.copies(_deltas_only(parts))
        yield from _output_copies(self._replaced, self._tokens, parts.get(0))


class ReplacedEmbedding(_ReplacedLayer):
    """The token embedding of one rank."""

    def __init__(self, layer: Embedding, sizes: SlotSizes, step: StepRows) -> None:
        self._adapted = AdaptedEmbedding(layer, sizes, step)
        tokens, columns = layer.weight_layout("weight")[0].ranges
        self._tokens = slice(tokens.start, tokens.stop)
        self._replaced = ReplacedRows.allocate(
            sizes.slots,
            min(sizes.replaced_rows, layer.vocab),
            len(columns),
            sizes.dtype,
            sizes.device,
        )
        self._places = torch.full(
            (sizes.slots, len(tokens)), -1, dtype=torch.int32, device=sizes.device
        )
        layer.set_param("weight", ReplacedTable(layer.weight, self._replaced, self._places, step))

    def copies(self, parts: Mapping[int, Delta]) -> Iterator[SlotCopy]:
        yield from self._adapted.copies(_deltas_only(parts))
        delta, count = parts.get(0), self._places.shape[1]
        places = torch.full((count,), -1, dtype=torch.int32)
        if isinstance(delta, WholeWeight):
            own, places = delta.weight[self._tokens], torch.arange(count, dtype=torch.int32)
            yield SlotCopy(self._replaced.rows[:, :count], own)
        elif isinstance(delta, TokenRows):
            places = delta.places[self._tokens]
            yield SlotCopy(self._replaced.rows[:, : len(delta.rows)], delta.rows)
        yield SlotCopy(self._places, places)


def _rows_of(layer: Linear) -> list[int]:
    return [out.rows for out in layer.outputs]


def _deltas_only(parts: Mapping[int, Delta]) -> dict[int, Delta]:
    return {k: v for k, v in parts.items() if not isinstance(v, (WholeWeight, TokenRows))}


def _replace_outputs_of(
    layer: Linear, count: int, sizes: SlotSizes, step: StepRows
) -> tuple[range, ReplacedRows]:
    """Wrap the weight of a layer. Returns the outputs that this rank has, and the rows."""
    outputs, inputs = layer.weight_layout("weight")[0].ranges
    made = ReplacedRows.allocate(
        sizes.slots,
        min(count, sum(_rows_of(layer))),
        len(inputs),
        sizes.dtype,
        sizes.device,
        bias="bias" in layer.param_names(),
    )
    layer.set_param("weight", ReplacedWeight(layer.weight, made, step))
    return outputs, made


def _output_copies(replaced: ReplacedRows, mine: range, delta: Delta | None) -> Iterator[SlotCopy]:
    count = 0
    if isinstance(delta, WholeWeight):
        count, own = len(mine), slice(mine.start, mine.stop)
        yield SlotCopy(replaced.rows[:, :count], delta.weight[own])
        yield SlotCopy(replaced.outputs[:, :count], torch.arange(count, dtype=torch.int32))
        if replaced.bias is not None and delta.bias is not None:
            yield SlotCopy(replaced.bias[:, :count], delta.bias[own])
    elif isinstance(delta, TokenRows):
        count, at = len(delta.rows), delta.indices
        if mine.start or int(delta.places.shape[0]) > mine.stop:  # of several ranks
            at = torch.where((at >= mine.start) & (at < mine.stop), at - mine.start, -1)
        yield SlotCopy(replaced.rows[:, :count], delta.rows)
        yield SlotCopy(replaced.outputs[:, :count], at)
    rest = replaced.outputs.shape[1] - count
    if rest:
        yield SlotCopy(replaced.outputs[:, count:], torch.full((rest,), -1, dtype=torch.int32))

"""Contract of a quantization method: it owns the parameters of its layers.

    params(layer, matrix)             the parameters of a checkpoint, in place of a plain weight
    process_after_load(layer, dtype)  turns values into weight objects, which multiply themselves

A method is one file of quire.quant, or an entry point of the group "quire.quant"; its kernels are
in quire.kernels. Which method a layer has is chosen by the checkpoint's config.json or the user
(quire.config.quant). A method may wrap another: it calls the inner one first, then replaces
the weight by one that multiplies through the inner weight.

Axes: O outputs, I inputs of a weight [O, I].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.weights.headers import TensorHeader
from quire.weights.mapping import InitSpec, WeightShard

Step = int | Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One stored parameter of a weight [O, I]: a tensor with an axis of outputs and one of inputs.

    A step along such an axis covers so many outputs or inputs: 8 for 4-bit codes in int32, 128 for
    the scale of a group, 32/3 for 3-bit codes in int32. None: the tensor has no such axis. Ranks
    cut the axis as they cut the weight, between steps: see `widened`.
    """

    dtype: torch.dtype | None = None  # None: the model's
    outputs_per: Step | None = 1
    inputs_per: Step | None = 1
    trailing: tuple[int, ...] = ()  # further axes, which nothing cuts
    transposed: bool = False  # the checkpoint has the axes in the opposite order
    broadcastable: bool = False  # one number may stand for all
    init: InitSpec | None = None  # of dummy values; None: those of an unquantized weight
    of_activations: bool = False  # it is of the inputs: the experts of a layer use one for all
    parts: tuple[int, ...] | None = None
    """The parts of the weight that it is of, for parts in different formats. None: all."""

    def layout(self, weight: tuple[WeightShard, ...]) -> tuple[WeightShard, ...]:
        """Return how checkpoint tensors fill the parameter of a weight with this layout."""
        if self.parts is not None:
            weight = _closed_up(weight[number] for number in self.parts)
        cuts = [self._axes(part) for part in weight]
        if self.outputs_per and any(part.start % self.outputs_per for part in weight):
            sizes = [part.shard_shape[0] for part in weight]
            raise ConfigError(
                f"parts of {sizes} outputs share one matrix, but not blocks of {self.outputs_per}: "
                "this model cannot be quantized in such blocks"
            )
        starts = accumulate((len(axes[0][1]) for axes in cuts), initial=0)
        return tuple(
            WeightShard(
                tuple(size for size, _ in axes),
                tuple(cut for _, cut in axes),
                start,
                broadcastable=self.broadcastable,
                transposed=self.transposed,
            )
            for axes, start in zip(cuts, starts)
        )

    def _axes(self, part: WeightShard) -> list[tuple[int, range]]:
        """Return (size, kept range) of every axis, for one part."""
        steps = (self.outputs_per, self.inputs_per)
        axes = [
            (_steps_in(size, step), _step_range(cut, step))
            for size, cut, step in zip(part.shape, part.ranges, steps)
            if step is not None
        ]
        return [*axes, *((n, range(n)) for n in self.trailing)] or [(1, range(1))]


class QuantizableLayer(Protocol):
    """A layer as a method uses it: one or more weight matrices, and their values."""

    role: str  # "linear", "head", "embedding", "experts", or "router": plain once it is loaded
    matrices: tuple[str, ...]  # ("weight",), or the names in a bank of experts
    multiplied: bool  # False: rows of the weight are only looked up

    def weight_layout(self, matrix: str) -> tuple[WeightShard, ...]:
        """Return the parts of a matrix, each [O, I], whole and as this rank has them."""
        ...

    def stored_layout(self, matrix: str) -> tuple[WeightShard, ...]:
        """Return the same in whole blocks of the format: what the values are of."""
        ...

    def take_params(self, matrix: str) -> dict[str, Tensor]:
        """Return the loaded values of a matrix, by the names in `params`. The layer drops them."""
        ...

    def set_param(self, param: str, value: object) -> None:
        """Set a matrix to the weight object that multiplies."""
        ...


class Method(Protocol):
    """One format of weights."""

    name: str
    is_stored: bool
    """Whether checkpoints have its parameters. False: it quantizes an unquantized weight."""

    def accepts(self, layer: QuantizableLayer) -> bool:
        """Whether the layer is quantized, by its kind and size."""
        ...

    def params(self, layer: QuantizableLayer, matrix: str) -> Mapping[str, ParamSpec]:
        """Return the parameters that a checkpoint must fill for one matrix, by their names
        there."""
        ...

    def process_after_load(self, layer: QuantizableLayer, dtype: torch.dtype) -> None:
        """Replace the loaded values of every matrix by a weight object; frees the old form.

        dtype: of the activations that it multiplies.
        """
        ...


@runtime_checkable
class AdaptsToCheckpoint(Protocol):
    """A method whose parameters depend on which tensors a checkpoint has for a layer."""

    def adapted(
        self, layer: QuantizableLayer, stored: Mapping[str, Sequence[TensorHeader]]
    ) -> Method:
        """Return the method for a layer with these tensors, by the layer's parameter names.

        Raises WeightError if they are those of no variant.
        """
        ...


def outputs_of(layer: QuantizableLayer) -> int:
    """Return the outputs of the layer's first matrix, over all ranks."""
    return sum(part.shape[0] for part in layer.weight_layout(layer.matrices[0]))


def inputs_of(layer: QuantizableLayer, matrix: str) -> int:
    """Return the inputs of a matrix, over all ranks."""
    return layer.weight_layout(matrix)[0].shape[1]


def common_step(steps: Iterable[Step | None]) -> int:
    """Return the least number of outputs or inputs that is whole steps of each."""
    whole = [Fraction(step) for step in steps if step is not None]
    return math.lcm(1, *(step.numerator for step in whole))


def widened(parts: Sequence[WeightShard], block: tuple[int, int]) -> tuple[WeightShard, ...]:
    """Return parts of a rank [O, I] with their ranges widened to whole blocks."""
    if block == (1, 1):
        return tuple(parts)
    return _closed_up(
        replace(part, ranges=tuple(map(_whole_blocks, part.ranges, part.shape, block)))
        for part in parts
    )


def _whole_blocks(cut: range, size: int, block: int) -> range:
    return range(cut.start // block * block, min(-(-cut.stop // block) * block, size))


def _closed_up(parts: Iterable[WeightShard]) -> tuple[WeightShard, ...]:
    """Return parts that follow one another from row 0."""
    parts = tuple(parts)
    starts = accumulate((part.shard_shape[0] for part in parts), initial=0)
    return tuple(replace(part, start=start) for part, start in zip(parts, starts))


def _steps_in(size: int, step: Step) -> int:
    return -(-size // step)


def _step_range(cut: range, step: Step) -> range:
    """Return the steps that a cut covers; it starts and ends between two of them."""
    assert cut.start % step == 0, f"a cut through a block of {step}: the layout is not widened"
    return range(int(cut.start // step), _steps_in(cut.stop, step))

"""Layers whose matrices, or parts of a fused matrix, have different formats.

PartsMethod gives each group of parts to a method of its own, which handles it like a layer. The
parameters of several groups of a matrix have a number: `qweight_0`, `qweight_1`. A
checkpoint names a part and the parameter as usual; `ParamSpec.parts` maps it to its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.formats.parts_weight import PartsExperts, PartsWeight
from quire.kernels.formats.weight import (
    ExpertBank,
    PlainExperts,
    PlainWeight,
    StoredExperts,
    StoredWeight,
)
from quire.quant.base import Method, ParamSpec, QuantizableLayer
from quire.weights.mapping import WeightShard


@dataclass(frozen=True, slots=True)
class PartGroup:
    """Parts of a matrix that share a method, by their numbers in its layout."""

    method: Method
    parts: tuple[int, ...]


def group_parts(methods: Sequence[Method], *, experts: bool) -> tuple[PartGroup, ...]:
    """Group the parts of a matrix, given the method of each.

    experts: parts are those of all experts in turn, and may be grouped wherever they are; else
    neighbours are, so that products of groups lie in the order of parts.
    """
    groups: list[tuple[Method, list[int]]] = []
    for number, method in enumerate(methods):
        among = groups if experts else groups[-1:]
        found = next((parts for one, parts in among if one is method), None)
        if found is None:
            groups.append((method, [number]))
        else:
            found.append(number)
    return tuple(PartGroup(method, tuple(parts)) for method, parts in groups)


class PartsMethod:
    """Groups of parts per matrix."""

    name = "parts"

    def __init__(self, groups: Mapping[str, tuple[PartGroup, ...]]) -> None:
        """groups: of each matrix, in the order of their outputs."""
        self._groups = groups
        self.is_stored = any(one.method.is_stored for own in groups.values() for one in own)

    def accepts(self, layer: QuantizableLayer) -> bool:
        """Whether the layer has these matrices."""
        return layer.matrices == tuple(self._groups)

    def params(self, layer: QuantizableLayer, matrix: str) -> Mapping[str, ParamSpec]:
        """Return the parameters of all groups."""
        groups = self._groups[matrix]
        if len(groups) == 1:
            return groups[0].method.params(layer, matrix)
        return {
            f"{name}_{number}": replace(spec, parts=group.parts)
            for number, group in enumerate(groups)
            for name, spec in group.method.params(layer, matrix).items()
        }

    def method_of(self, param: str, part: int | None) -> Method:
        """Return the method of a part, given a parameter of its matrix as checkpoints name it."""
        matrix = next((one for one in self._groups if param.startswith(f"{one}_")), "weight")
        groups = self._groups.get(matrix, ())
        return next((one.method for one in groups if part in one.parts), self)

    def process_after_load(self, layer: QuantizableLayer, dtype: torch.dtype) -> None:
        """Let each method process its parts, one after another, and join what they make."""
        for matrix in layer.matrices:
            values, groups = layer.take_params(matrix), self._groups[matrix]
            made, sizes = [], []
            for number, group in enumerate(groups):
                own = values
                if len(groups) > 1:
                    end = f"_{number}"
                    own = {
                        name.removesuffix(end): value
                        for name, value in values.items()
                        if name.endswith(end)
                    }
                view = _LayerParts(layer, matrix, group.parts, own)
                group.method.process_after_load(view, dtype)
                made.append(view.weight(dtype))
                sizes.append(view.outputs)
                own.clear()
            layer.set_param(matrix, _join(made, sizes))


def _join(made: list[StoredWeight | StoredExperts], sizes: list[int]) -> object:
    if len(made) == 1:
        return made[0]
    weights = tuple(one for one in made if isinstance(one, StoredWeight))
    if weights:
        return PartsWeight(weights, tuple(sizes))
    banks = tuple(one for one in made if isinstance(one, (ExpertBank, PlainExperts)))
    return PartsExperts(banks, tuple(sizes))


class _LayerParts:
    """Some parts of one matrix of a layer, as a method processes them."""

    def __init__(
        self,
        layer: QuantizableLayer,
        matrix: str,
        parts: tuple[int, ...],
        values: dict[str, Tensor],
    ) -> None:
        self.role, self.multiplied = layer.role, layer.multiplied
        self.matrices: tuple[str, ...] = (matrix,)
        self._layout = tuple(layer.stored_layout(matrix)[number] for number in parts)
        self._values = values
        self._made: object = None

    @property
    def outputs(self) -> int:
        """Rows of the parts on this rank: of one expert, in a bank."""
        if self.role == "experts":
            return self._layout[0].shard_shape[0]
        return sum(part.shard_shape[0] for part in self._layout)

    def weight_layout(self, matrix: str) -> tuple[WeightShard, ...]:
        return self._layout

    stored_layout = weight_layout

    def take_params(self, matrix: str) -> dict[str, Tensor]:
        return dict(self._values)

    def set_param(self, param: str, value: object) -> None:
        self._made = value

    def weight(self, dtype: torch.dtype) -> StoredWeight | StoredExperts:
        """What the method has made; a method that has made nothing leaves the plain weight."""
        made = self._values["weight"] if self._made is None else self._made
        kinds = (StoredExperts, StoredWeight)
        if isinstance(made, Tensor) and not isinstance(made, kinds):
            plain = PlainExperts if self.role == "experts" else PlainWeight
            made = plain(made.detach().to(dtype), requires_grad=False)
        assert isinstance(made, kinds)
        return made

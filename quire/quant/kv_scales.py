"""Scales of cached keys and values: read from a checkpoint and set on the attention layers.

They are numbers of the layer, not parameters: a cache in the model's dtype needs none. Each tool
that writes checkpoints has its own names for them. A checkpoint may have them for some layers only;
the default is 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from quire.errors import WeightError
from quire.weights.mapping import Weights

SCALE_NAME = re.compile(
    r"(?P<at>.+?)\.(?:(?:attn\.)?(?P<which>k|v|kv|q|prob)_scale"
    r"|(?P<proj>q|k|v)_proj\.(?:(?P=proj)_scale|output_scale))"
)
"""Their names in checkpoints, after the name of the attention block."""


class HasKvScales(Protocol):
    """An attention layer."""

    k_scale: float
    v_scale: float


class KvScaleLoader:
    """Finds the attention layer that a scale belongs to, by the name of the block around it."""

    def __init__(self, layers: Mapping[str, HasKvScales], weights: Weights) -> None:
        self._layers = {name.rpartition(".")[0]: layer for name, layer in layers.items()}
        self._weights = weights

    def without_scales(
        self, shapes: Iterable[tuple[str, Sequence[int]]]
    ) -> list[tuple[str, Sequence[int]]]:
        """Return the (name, shape) pairs that are not such scales."""
        return [(name, shape) for name, shape in shapes if self._find(name) is None]

    def extract_scales(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Remove the scales from a stream of tensors, and pass the others on."""
        for name, tensor in tensors:
            found = self._find(name)
            if found is None:
                yield name, tensor
            else:
                _set_scale(*found, name, tensor)

    def _find(self, name: str) -> tuple[HasKvScales, str] | None:
        match = SCALE_NAME.fullmatch(name)
        if match is None:
            return None
        layer = self._layers.get(self._weights.module_path(match["at"]))
        return None if layer is None else (layer, match["which"] or match["proj"])


def _set_scale(layer: HasKvScales, which: str, name: str, tensor: Tensor) -> None:
    """q and prob scales belong to an 8-bit attention product, which ours is not."""
    if which in ("q", "prob"):
        return
    if tensor.numel() != 1:
        raise WeightError(f"{name} is {list(tensor.shape)}; one scale per layer is supported")
    value = float(tensor)
    if not 0 < value < float("inf"):
        raise WeightError(f"{name} is {value}; a scale is a positive number")
    if "k" in which:
        layer.k_scale = value
    if "v" in which:
        layer.v_scale = value

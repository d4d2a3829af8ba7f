"""Scales of cached keys and values: read from a checkpoint and set on the attention layers.

They are numbers of the layer, or of its heads, not parameters: a cache in the model's dtype needs
none. Each tool that writes checkpoints has its own names for them. A checkpoint may have them for
some layers only; the default is 1. A cache of integers has no default: all layers must have them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
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
    head_scales: Tensor | None  # [2, K] float32, K the heads of this rank
    kv_shard: range  # this rank's heads
    total_kv_heads: int  # of all ranks


class KvScaleLoader:
    """Finds the attention layer that a scale belongs to, by the name of the block around it."""

    def __init__(
        self, layers: Mapping[str, HasKvScales], weights: Weights, device: torch.device
    ) -> None:
        self._layers = {name.rpartition(".")[0]: layer for name, layer in layers.items()}
        self._weights = weights
        self._device = device
        self._loaded: set[tuple[str, str]] = set()

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
                self._set(*found, name, tensor)

    def require_all(self) -> None:
        """Raise WeightError unless every layer has got both scales."""
        lacking = [
            f"{at}.{which}_scale"
            for at in self._layers
            for which in "kv"
            if (at, which) not in self._loaded
        ]
        if lacking:
            raise WeightError(
                f"the checkpoint states scales of the KV cache, and has none for {len(lacking)}: "
                f"{', '.join(lacking[:4])}; set kv_cache_dtype=int8_per_token_head"
            )

    def _find(self, name: str) -> tuple[str, str] | None:
        match = SCALE_NAME.fullmatch(name)
        if match is None:
            return None
        at = self._weights.module_path(match["at"])
        return (at, match["which"] or match["proj"]) if at in self._layers else None

    def _set(self, at: str, which: str, name: str, tensor: Tensor) -> None:
        """q and prob scales belong to an 8-bit attention product, which ours is not."""
        if which in ("q", "prob"):
            return
        layer, values = self._layers[at], tensor.flatten().float()
        heads = layer.total_kv_heads
        if len(values) not in (1, heads):
            raise WeightError(
                f"{name} is {list(tensor.shape)}; one scale per layer or per KV head ({heads})"
            )
        if not bool(((values > 0) & values.isfinite()).all()):
            wrong = values[~((values > 0) & values.isfinite())]
            raise WeightError(f"{name} is {float(wrong[0])}; a scale is a positive number")
        for side in which:
            self._loaded.add((at, side))
            if len(values) == 1:
                setattr(layer, f"{side}_scale", float(values))
            if len(values) > 1 or layer.head_scales is not None:
                _set_head_scales(layer, "kv".index(side), values, self._device)


def _set_head_scales(layer: HasKvScales, side: int, values: Tensor, device: torch.device) -> None:
    """Set those of keys (side 0) or values; the others are those of the layer until they come."""
    shard = layer.kv_shard
    if layer.head_scales is None:
        both = torch.tensor([layer.k_scale, layer.v_scale])
        layer.head_scales = both[:, None].repeat(1, len(shard)).to(device)
    own = values if len(values) == 1 else values[shard.start : shard.stop]
    layer.head_scales[side] = own.to(device)

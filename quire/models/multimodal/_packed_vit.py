"""SigLIP's tower for images of any size: a patch has the position of its place, as a fraction.

Source: model_type "idefics2", transformers modeling_idefics2.py
Axes:   P patches of all images, E hidden
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quire.kernels.framework import lazy_fusion
from quire.layers import LayerNorm, PatchLinear, add
from quire.models.multimodal._base import Hf, Weights
from quire.models.multimodal._towers import QKV, SIGLIP, TOWER_NAMES
from quire.models.multimodal._vit import (
    Learned,
    Packing,
    VitConfig,
    VitLayer,
    fractional_positions,
    vit_sizes,
)

Grid = tuple[int, int]
"""Rows and columns of patches."""


class PackedVit(nn.Module):
    def __init__(self, c: VitConfig) -> None:
        super().__init__()
        self.config = c
        self.embeddings = _Embeddings(c)
        self.layers = nn.ModuleList(VitLayer(c) for _ in range(c.layers))
        self.post_layernorm = LayerNorm(c.hidden, c.eps)

    @classmethod
    def of(cls, hf: Hf, **more: int) -> PackedVit:
        """Build the tower of a vision section. more: fields of VitConfig that are other ones."""
        return cls(VitConfig(**{**vit_sizes(hf, **SIGLIP), **more}))

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Patches [P, C * patch * patch] of images with these grids -> states [P, E]."""
        x = self.embeddings(patches, grids)
        packing, res = Packing.of([rows * columns for rows, columns in grids], x.device), None
        for layer in self.layers:
            x, res = layer(x, res, packing)
        if res is not None:
            x = add(x, res)
        x = self.post_layernorm(x)
        lazy_fusion.flush()
        return x


class _Embeddings(nn.Module):
    def __init__(self, c: VitConfig) -> None:
        super().__init__()
        self.side = c.grid[0]
        self.patch_embedding = PatchLinear(c.channels, (c.patch, c.patch), c.hidden, c.patch_bias)
        self.position_embedding = Learned(self.side**2, c.hidden)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        x = self.patch_embedding(patches)
        lazy_fusion.flush()
        places = torch.cat([_places(*grid, self.side) for grid in grids])
        return x + self.position_embedding.weight[places.to(x.device, non_blocking=True)]


@functools.lru_cache(64)
def _places(rows: int, columns: int, side: int) -> Tensor:
    return fractional_positions(rows, columns, side)


def packed_weights(paths: dict[str, str], **more: dict[str, str]) -> Weights:
    """Return the names in the checkpoint of a wrapper with such a `tower`.

    paths: of the wrapper, in addition. more: `alias`, whose names are without "model.".
    """
    alias = more.get("alias", {})
    return Weights(
        strip=("model.",),
        paths=paths | TOWER_NAMES,
        alias={f"{outer}{one}": to for outer in ("", "model.") for one, to in alias.items()},
        fuse={**QKV, "gate_up_proj": ("gate_proj", "up_proj")},
        ignore=("*.position_ids",),
    )

"""The tower of SigLIP 2: images of any shape, and positions resized to the patches of each.

Axes:   T patches of all images, E hidden, S side of the table of positions
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import LayerNorm, Linear, add
from quire.models.base import Hf, field_of
from quire.models.multimodal._towers import SIGLIP
from quire.models.multimodal._vit import Learned, Packing, VitConfig, VitLayer, vit_sizes

TOWER_PATHS = {
    "vision_model.embeddings.patch_embedding": "patch_embedding",
    "vision_model.embeddings.position_embedding": "position_embedding",
    "vision_model.encoder.layers": "layers",
    "vision_model.post_layernorm": "post_layernorm",
}
"""Paths in checkpoints -> ours."""


class NaflexTower(nn.Module):
    def __init__(self, vision: Hf) -> None:
        super().__init__()
        count = field_of(vision, "num_patches", int, default=256)
        self.side = math.isqrt(count)
        if self.side**2 != count:
            raise ConfigError(f"config.json: num_patches is {count}; it must be a square")
        sizes = vit_sizes({**vision, "image_size": 1 << 16}, **SIGLIP)
        self.config = c = VitConfig(**sizes)
        self.patch_embedding = Linear(c.channels * c.patch**2, c.hidden, bias=True)
        self.position_embedding = Learned(count, c.hidden)
        self.layers = nn.ModuleList(VitLayer(c) for _ in range(c.layers))
        self.post_layernorm = LayerNorm(c.hidden, c.eps)

    def forward(self, images: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[torch.Size]]:
        """Return the states [T, E] of all images, and the (rows, columns) of each one's patches.

        images: pixels uint8 [H, W, C], whose sides are multiples of a patch; scale_shift [2, C].
        """
        cut = [self._patches(*one) for one in images]
        shapes = [one.shape[:2] for one in cut]
        x = self.patch_embedding(torch.cat([one.flatten(0, 1) for one in cut]))
        lazy_fusion.flush()
        x = add(x, torch.cat([self._positions(*shape) for shape in shapes]))
        packing, res = Packing.of([rows * columns for rows, columns in shapes], x.device), None
        for layer in self.layers:
            x, res = layer(x, res, packing)
        if res is not None:
            x = add(x, res)
        return self.post_layernorm(x), shapes

    def _patches(self, pixels: Tensor, scale_shift: Tensor) -> Tensor:
        """Return normalized patches [rows, columns, patch * patch * C], channels last."""
        size, (scale, shift) = self.config.patch, scale_shift
        height, width, channels = pixels.shape
        cut = (pixels * scale + shift).view(height // size, size, width // size, size, channels)
        flat = cut.transpose(1, 2).flatten(2)
        return flat.to(self.position_embedding.weight.dtype)

    def _positions(self, rows: int, columns: int) -> Tensor:
        """Return the table of positions [rows * columns, E], resized."""
        table = self.position_embedding.weight
        square = table.float().view(1, self.side, self.side, -1).permute(0, 3, 1, 2)
        made = interpolate(square, (rows, columns), mode="bilinear", antialias=True)
        return made[0].flatten(1).t().to(table.dtype).contiguous()

"""Images of Phi-4-multimodal: SigLIP over tiles of 448 pixels, states pooled in squares of 2 x 2.

Tiles at the right and at the bottom may be padded: their padded patches are attended to by none.

    rows of an image: each line of its tiles with a mark, a mark, each line of the whole image with
    a mark; then an MLP

Source: transformers modeling_phi4_multimodal.py
Axes:   N tiles, P patches of one, S patches along a side, E hidden of the tower
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import PatchLinear, add
from quire.models.multimodal._base import EncoderInput, Hf, field_of, normalized_patches
from quire.models.multimodal._towers import SIGLIP, MLPProjector
from quire.models.multimodal._vit import (
    Learned,
    Packing,
    VitConfig,
    VitLayer,
    fractional_positions,
    vit_sizes,
)

DEFAULTS = SIGLIP | {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
}
"""What a vision section leaves out."""
MOST_TILES = 36
Valid = tuple[int, int]
"""Rows and columns of a tile's patches that are not padded."""


class ImageTower(nn.Module):
    """The states of all patches of tiles, before the layers that are left out."""

    def __init__(self, c: VitConfig, layers: int) -> None:
        super().__init__()
        self.config, self.side = c, c.grid[0]
        self.patch_embedding = PatchLinear(c.channels, (c.patch, c.patch), c.hidden, c.patch_bias)
        self.position_embedding = Learned(self.side**2, c.hidden)
        self.layers = nn.ModuleList(VitLayer(c) for _ in range(layers))

    def forward(self, patches: Tensor, valid: Sequence[Valid]) -> Tensor:
        """patches [N * P, C * patch * patch] -> [N, S, S, E]."""
        count = self.side**2
        orders = [_valid_first(*one, self.side) for one in valid]
        offsets = range(0, len(valid) * count, count)
        order = torch.cat([one + at for (one, _), at in zip(orders, offsets, strict=True)])
        places = torch.cat([one for _, one in orders])
        order, places = (one.to(patches.device, non_blocking=True) for one in (order, places))
        x = self.patch_embedding(patches)
        lazy_fusion.flush()
        x, res = x[order] + self.position_embedding.weight[places], None
        counts = torch.tensor([rows * columns for rows, columns in valid], dtype=torch.int32)
        packing = Packing.of([count] * len(valid), x.device)
        packing = Packing(packing.starts, packing.longest, counts.to(x.device, non_blocking=True))
        for layer in self.layers:
            x, res = layer(x, res, packing)
        x = x if res is None else add(x, res)
        lazy_fusion.flush()
        found = torch.empty_like(x)
        found[order] = x
        return found.view(len(valid), self.side, self.side, -1)


@functools.lru_cache(64)
def _valid_first(rows: int, columns: int, side: int) -> tuple[Tensor, Tensor]:
    """(numbers of a tile's patches, those that are not padded first; their positions): [P] each."""
    with torch.device("cpu"):
        seen = torch.zeros(side, side, dtype=torch.bool)
        seen[:rows, :columns] = True
        numbers = torch.arange(side**2)
        order = torch.cat((numbers[seen.flatten()], numbers[~seen.flatten()]))
        places = torch.zeros(side**2, dtype=torch.int64)
        places[: rows * columns] = fractional_positions(rows, columns, side)
        return order, places


class ImagePart(nn.Module):
    """An item has the tensors

    pixels       uint8 [y * side, x * side, C]: the resized image, padded to whole tiles
    scale_shift  float32 [2, C], of normalization
    valid        uint8 [rows, columns], of its patches that are not padded: the shape says it
    """

    def __init__(self, hf: Hf, width: int, layer: int) -> None:
        """hf: the vision section. width: of rows. layer: whose states are read."""
        super().__init__()
        sizes = vit_sizes(
            {key: value for key, value in hf.items() if value is not None}, **DEFAULTS
        )
        c = VitConfig(**sizes)
        self.tile = field_of(hf, "crop_size", int, default=c.image[0])
        if c.grid[0] % 2 or c.image != (self.tile, self.tile):
            raise ConfigError(
                f"config.json: the vision tower reads {c.image[0]} x {c.image[1]} pixels in "
                f"patches of {c.patch}, and crop_size is {self.tile}; tiles must be squares of an "
                "even number of patches"
            )
        self.tower = ImageTower(c, c.layers + 1 + layer if layer < 0 else layer)
        self.sub_mark, self.global_mark = Learned(c.hidden), Learned(c.hidden)
        self.projector = MLPProjector(c.hidden, width, width)

    @property
    def max_rows(self) -> int:
        """Rows of the largest image."""
        cells = self.tower.side // 2
        return (MOST_TILES + 1) * cells * (cells + 1) + 1

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        cut, valid, grids = [], [], []
        for one in items:
            pixels, seen = one.tensors["pixels"], one.tensors["valid"].shape
            grid = pixels.shape[0] // self.tile, pixels.shape[1] // self.tile
            cut.append(self._patches(pixels, one.tensors["scale_shift"], grid))
            valid += [(self.tower.side, self.tower.side), *self._valid_parts(grid, seen)]
            grids.append((grid, seen))
        states = self.tower(torch.cat(cut), valid).permute(0, 3, 1, 2)
        cells = F.avg_pool2d(states, 2).permute(0, 2, 3, 1)  # [N, S / 2, S / 2, E]
        images = cells.split([1 + y * x for (y, x), _ in grids])
        lines = [
            self._lines(own, grid, seen) for own, (grid, seen) in zip(images, grids, strict=True)
        ]
        rows = self.projector(torch.cat(lines))
        lazy_fusion.flush()
        return list(rows.split([len(one) for one in lines]))

    def _valid_parts(self, grid: Valid, seen: Sequence[int]) -> list[Valid]:
        side = self.tower.side
        tall, wide = (
            [min(max(size - i * side, 1), side) for i in range(count)]
            for size, count in zip(seen, grid, strict=True)
        )
        return [(rows, columns) for rows in tall for columns in wide]

    def _patches(self, pixels: Tensor, scale_shift: Tensor, grid: Valid) -> Tensor:
        """Patches of the whole image, shrunk to a tile, and of each tile."""
        c, (y, x) = self.tower.config, grid
        dtype = self.tower.position_embedding.weight.dtype
        lazy_fusion.flush()
        scale, shift = scale_shift
        image = (pixels * scale + shift).permute(2, 0, 1)[None]  # float32 [1, C, H, W]
        whole = F.interpolate(image, c.image, mode="bicubic")
        squares = whole.view(c.channels, c.grid[0], c.patch, c.grid[1], c.patch)
        first = squares.permute(1, 3, 0, 2, 4).flatten(0, 1).flatten(1).to(dtype)
        tiles = pixels.view(y, self.tile, x, self.tile, -1).transpose(1, 2).flatten(0, 1)
        return torch.cat((first, normalized_patches(tiles, scale_shift, c.patch, dtype)))

    def _lines(self, cells: Tensor, grid: Valid, seen: Sequence[int]) -> Tensor:
        """Cells [1 + y * x, s, s, E] of an image in the order of the prompt, with marks."""
        (y, x), s = grid, cells.shape[1]
        tiles = cells[1:].reshape(y, x, s, s, -1).transpose(1, 2).reshape(y * s, x * s, -1)
        tiles = tiles[: -(-seen[0] // 2), : -(-seen[1] // 2)]
        return torch.cat((self._ended(tiles), self.global_mark.weight[None], self._ended(cells[0])))

    def _ended(self, lines: Tensor) -> Tensor:
        mark = self.sub_mark.weight.expand(len(lines), 1, -1)
        return torch.cat((lines, mark), dim=1).flatten(0, 1)

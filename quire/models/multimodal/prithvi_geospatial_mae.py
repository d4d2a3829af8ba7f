"""Prithvi-EO: what its layers read of a series of satellite images: a class token and patches.

    row 0        class token
    the others   frame by frame, row by row: patch W + b + position + scale * time + scale * place

Positions, times and places are sines and cosines. A position has 6/16 of its numbers for the
column, 6/16 for the row and 4/16 for the frame. Positions of images of another size than
config.json's are those of its grid, stretched by bicubic interpolation.

Source: https://huggingface.co/ibm-nasa-geospatial/Prithvi-EO-2.0-300M, prithvi_mae.py
Axes: C bands, T frames, P patches, E hidden size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config.geospatial import SECTION
from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import PatchLinear
from quire.models.multimodal._base import EncoderInput, Hf, MediaEncoder, Weights, field_of
from quire.models.multimodal._vit import Learned
from quire.sampling.h2d import move_tensor

COORDINATES = ("time", "location")


class Encoder(MediaEncoder):
    """An item has the tensors

    pixels     float32 [C, T, H, W], normalized
    time       float32 [T, 2]: year and day of the year of each frame; may be absent
    location   float32 [2]: latitude and longitude; may be absent
    """

    modalities = ("image",)
    patches_per_row = 1
    weights = Weights(
        strip=("model.encoder.", "encoder."),
        paths={"patch_embed.proj": "patch_embedding"},
        ignore=("*pos_embed",),  # computed
    )

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        sizes, text = hf[SECTION], hf["text_config"]
        self.width = field_of(text, "hidden_size", int)
        self.longest = field_of(text, "max_position_embeddings", int)
        self.patch = tuple(sizes["patch_size"])
        side = sizes["img_size"] // self.patch[1]
        self.grid = (sizes["num_frames"] // self.patch[0], side)  # frames, and patches of a side
        self.patch_embedding = PatchLinear(sizes["in_chans"], self.patch, self.width, bias=True)
        self.class_token = Learned(self.width)
        coordinates = sizes["coords_encoding"]
        if not set(coordinates) <= set(COORDINATES) or (
            "time" in coordinates and self.patch[0] > 1
        ):
            raise ConfigError(
                f"config.json: coords_encoding is {coordinates!r:.60}; supported are time, with "
                "patches of one frame, and location"
            )
        self.time_scale = Learned(1) if "time" in coordinates else None
        self.location_scale = Learned(1) if "location" in coordinates else None
        names = {
            "cls_token": "class_token.weight",
            "temporal_embed_enc.scale": "time_scale.weight",
            "location_embed_enc.scale": "location_scale.weight",
        }
        prefixes = ("", *self.weights.strip)
        alias = {f"{one}{theirs}": ours for one in prefixes for theirs, ours in names.items()}
        kinds = {"time": "temporal_embed_enc", "location": "location_embed_enc"}
        unused = tuple(f"*{name}.*" for kind, name in kinds.items() if kind not in coordinates)
        self.weights = replace(self.weights, alias=alias, ignore=(*self.weights.ignore, *unused))
        self._positions: dict[int, Tensor] = {}

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return self.longest - 1

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        return [self._rows(one) for one in items]

    def _rows(self, item: EncoderInput) -> Tensor:
        pixels = item.tensors["pixels"]
        first: Tensor = self.class_token.weight
        patches, side = cut_patches(pixels, self.patch)
        x = self.patch_embedding(patches.to(first.dtype))
        lazy_fusion.flush()
        x = x.float() + self._places(side, x.device)  # [P, E]
        time, place = item.tensors.get("time"), item.tensors.get("location")
        if self.time_scale is not None and time is not None:
            frames = self.time_scale.weight.float() * waves_of_pairs(time, self.width)
            x = x + frames.repeat_interleave(len(x) // len(frames), dim=0)
        if self.location_scale is not None and place is not None:
            x = x + self.location_scale.weight.float() * waves_of_pairs(place[None], self.width)
        return torch.cat((first[None], x.to(first.dtype)))

    def _places(self, side: int, device: torch.device) -> Tensor:
        """Positions of the patches of images with `side` of them in a row: float32 [P, E]."""
        if side not in self._positions:
            with torch.device("cpu"):
                self._positions[side] = position_table(self.width, self.grid, side)
        self._positions[side] = move_tensor(self._positions[side], device)  # once
        return self._positions[side]


def cut_patches(pixels: Tensor, patch: tuple[int, ...]) -> tuple[Tensor, int]:
    """Cut [C, T, H, W] into flat patches [P, C * t * p * p], and return how many a row has."""
    channels, frames, height, width = pixels.shape
    t, p, _ = patch
    rows, columns = height // p, width // p
    cut = pixels.reshape(channels, frames // t, t, rows, p, columns, p)
    cut = cut.permute(1, 3, 5, 0, 2, 4, 6)  # [T, rows, columns, C, t, p, p]
    return cut.reshape(-1, channels * t * p * p), columns


def waves(values: Tensor, size: int) -> Tensor:
    """Sines, then cosines, of values [n]: [n, size], in the type of the values."""
    steps = torch.arange(size // 2, dtype=values.dtype, device=values.device)
    angles = values[:, None] / 10000 ** (steps / (size / 2))
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def waves_of_pairs(values: Tensor, size: int) -> Tensor:
    """Waves of both numbers of pairs [n, 2], side by side: [n, size]."""
    return torch.cat((waves(values[:, 0], size // 2), waves(values[:, 1], size // 2)), dim=1)


def position_table(size: int, grid: tuple[int, int], side: int) -> Tensor:
    """Positions [T * side * side, size] float32. grid: frames, and patches of a side trained on."""
    frames, trained = grid
    unit = size // 16
    places = torch.arange(trained, dtype=torch.float64)
    line = waves(places, 6 * unit)
    time = waves(torch.arange(frames, dtype=torch.float64), 4 * unit)
    shape = frames, trained, trained
    parts = (
        line[None, None].expand(*shape, -1),  # of the column
        line[None, :, None].expand(*shape, -1),
        time[:, None, None].expand(*shape, -1),
    )
    table = torch.cat(parts, dim=-1).float()
    if side != trained:
        images = table.permute(0, 3, 1, 2)
        images = F.interpolate(images, size=(side, side), mode="bicubic", align_corners=True)
        table = images.permute(0, 2, 3, 1)
    return table.reshape(-1, size)

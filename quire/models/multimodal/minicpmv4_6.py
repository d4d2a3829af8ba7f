"""MiniCPM-V 4.6: SigLIP over tiles of any shape, whose patches are merged by four halfway.

After one of its layers, windows of 2 x 2 patches attend to themselves and become one. At the end
2 x 2 of these make a row. With `downsample_mode` "4x" the first of the two is left out. Patches
come in the order of the windows, and windows in that of the rows: merging is a change of shape.

Source: model_type "minicpmv4_6", https://huggingface.co/openbmb/MiniCPM-V-4_6; transformers
        modeling_minicpmv4_6.py
Axes:   F frames (one of an image), S tiles of a frame beside the whole, P patches of a part of the
        tiles, E hidden size of the tower, n rows
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import Activation, LayerNorm, Linear, PatchLinear, add
from quire.models.base import run_to_end
from quire.models.multimodal._base import EncoderInput, Hf, MediaEncoder, Weights, field_of
from quire.models.multimodal._towers import text_hidden
from quire.models.multimodal._vit import (
    Learned,
    Packing,
    VitAttention,
    VitConfig,
    VitLayer,
    vit_sizes,
)
from quire.sampling.h2d import to_device

MAX_ROWS = {"image": 4096, "video": 16384}
"""Of an item; quire.media.processors.minicpmv4_6 makes no more."""
PATCHES_AT_ONCE = 16384
"""Of tiles that a layer reads together."""
MERGED = 4
"""Patches, or windows of them, that become one."""
USUAL = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""What vision_config leaves out."""


class TileEmbeddings(nn.Module):
    def __init__(self, c: VitConfig) -> None:
        super().__init__()
        self.patch_embedding = PatchLinear(c.channels, (c.patch, c.patch), c.hidden, bias=True)
        self.position_embedding = Learned(c.grid[0] ** 2, c.hidden)

    def forward(self, patches: Tensor, places: Tensor) -> Tensor:
        """Normalized patches [P, C * patch * patch], their places in the table [P] -> [P, E]."""
        x = self.patch_embedding(patches)
        lazy_fusion.flush()
        found: Tensor = x + self.position_embedding.weight[places]
        return found


class WindowMerger(nn.Module):
    """Windows of four neighbours attend to themselves, and become one: an MLP and their mean."""

    def __init__(self, c: VitConfig) -> None:
        super().__init__()
        self.self_attn = VitAttention(c)
        self.layer_norm1 = LayerNorm(c.hidden, c.eps)
        wide = MERGED * c.hidden
        self.pre_norm = LayerNorm(wide, c.eps)
        self.linear_1 = Linear(wide, MERGED * c.mlp, bias=True)
        self.act = Activation("gelu_pytorch_tanh")
        self.linear_2 = Linear(MERGED * c.mlp, c.hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[P, E] -> [P / 4, E]."""
        starts = to_device(np.arange(0, len(x) + 1, MERGED, dtype=np.int32), x.device)
        x = add(self.self_attn(self.layer_norm1(x), Packing(starts, MERGED)), x)
        lazy_fusion.flush()
        windows = x.view(len(x) // MERGED, MERGED, -1)
        y = self.linear_2(self.act(self.linear_1(self.pre_norm(windows.flatten(1)))))
        return add(y, windows.mean(1))


class MergedVit(nn.Module):
    """insert: the layer after which windows are merged; None: they are not."""

    def __init__(self, c: VitConfig, insert: int | None) -> None:
        super().__init__()
        self.insert = insert
        self.embeddings = TileEmbeddings(c)
        self.encoder = nn.ModuleDict(
            {"layers": nn.ModuleList(VitLayer(c) for _ in range(c.layers))}
        )
        self.vit_merger = WindowMerger(c)
        self.post_layernorm = LayerNorm(c.hidden, c.eps)

    @property
    def dtype(self) -> torch.dtype:
        return self.embeddings.position_embedding.weight.dtype

    def in_slices(
        self, parts: Sequence[tuple[Tensor, Tensor, Sequence[int]]]
    ) -> Generator[None, None, list[Tensor]]:
        """States of the tiles of each part: [P / 4, E], or [P, E] if windows are not merged.

        parts: patches, places, and patches of each tile. A layer runs part by part, so that what is
        between its matrices is in memory of one only. It stops behind each layer.
        """
        states: list[tuple[Tensor, Tensor | None]] = [
            (self.embeddings(patches, places), None) for patches, places, _ in parts
        ]
        device = states[0][0].device
        packings = [Packing.of(lengths, device) for *_, lengths in parts]
        layers = cast(nn.ModuleList, self.encoder["layers"])
        for i, layer in enumerate(layers):
            for j, (x, res) in enumerate(states):
                y, added = layer(x, res, packings[j])
                states[j] = (
                    (y, added) if i != self.insert else (self.vit_merger(add(y, added)), None)
                )
                lazy_fusion.flush()
            if i == self.insert:
                packings = [
                    Packing.of([one // MERGED for one in lengths], device) for *_, lengths in parts
                ]
            yield
        return [self.post_layernorm(x if res is None else add(x, res)) for x, res in states]


class RowMLP(nn.Module):
    """Rows of the text model, each of four neighbours."""

    def __init__(self, hidden: int, outputs: int) -> None:
        super().__init__()
        wide = MERGED * hidden
        self.pre_norm = LayerNorm(wide, 1e-6)
        self.linear_1 = Linear(wide, wide, bias=True)
        self.act = Activation("gelu")
        self.linear_2 = Linear(wide, outputs, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[4 n, E] -> [n, outputs]."""
        x = self.pre_norm(x.view(-1, self.linear_1.inputs))
        found: Tensor = self.linear_2(self.act(self.linear_1(x)))
        return found


class Encoder(MediaEncoder):
    """An item has the tensors scale_shift float32 [2, 3]; whole uint8 [F, p, 3 * patch * patch],
    and whole_places int32 [p]; and, if it is cut, tiles [F, S, q, ...] and tile_places [q]."""

    modalities: tuple[str, ...] = ("image", "video")
    patches_per_row = 1  # that are in memory at once, of a large item
    weights = Weights(strip=("model.",), fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")})

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        vision = field_of(hf, "vision_config", dict, default={})
        c = self.config = VitConfig(**vit_sizes(vision, **USUAL))
        mode = field_of(hf, "downsample_mode", str, default="16x", one_of={"4x", "16x"})
        insert = field_of(hf, "insert_layer_id", int, default=6)
        field_of(hf, "merger_times", int, default=1, one_of={1})
        for section, name in ((vision, "window_kernel_size"), (hf, "merge_kernel_size")):
            if list(field_of(section, name, list, default=[2, 2])) != [2, 2]:
                raise ConfigError(f"config.json: {name} must be [2, 2]")
        if mode == "16x" and not 0 <= insert < c.layers:
            raise ConfigError(
                f"config.json: insert_layer_id is {insert}; the vision tower has {c.layers} layers"
            )
        merges = mode == "16x"
        self.width, self.merged = text_hidden(hf), MERGED**2 if merges else MERGED
        self.vision_tower = MergedVit(c, insert if merges else None)
        self.merger = nn.ModuleDict({"mlp": nn.ModuleList([RowMLP(c.hidden, self.width)])})

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return MAX_ROWS[modality]

    @property
    def slices(self) -> int:
        return self.config.layers

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        return run_to_end(self.encode_in_slices(items))

    def encode_in_slices(
        self, items: Sequence[EncoderInput]
    ) -> Generator[None, None, list[Tensor]]:
        lazy_fusion.flush()
        tiles, counts = [], []
        for one in items:
            own = _tiles_of(one)
            tiles += own
            counts.append(sum(len(tile.places) for tile in own) // self.merged)
        states = yield from self.vision_tower.in_slices(
            [_joined(some, self.vision_tower.dtype) for some in _parts(tiles)]
        )
        mlp = cast(nn.ModuleList, self.merger["mlp"])[0]
        rows = torch.cat([mlp(one) for one in states])
        lazy_fusion.flush()
        return list(rows.split(counts))


class Tile(NamedTuple):
    pixels: Tensor  # uint8 [p, 3 * patch * patch]
    places: Tensor  # int64 [p], in the table of positions
    scale_shift: Tensor


def _tiles_of(item: EncoderInput) -> list[Tile]:
    """Tiles of an item, frame by frame."""
    factors = item.tensors["scale_shift"]
    whole, places = item.tensors["whole"], item.tensors["whole_places"].long()
    tiles, own = item.tensors.get("tiles"), item.tensors.get("tile_places")
    found = []
    for i, frame in enumerate(whole):
        found.append(Tile(frame, places, factors))
        if tiles is not None and own is not None:
            found += [Tile(tile, own.long(), factors) for tile in tiles[i]]
    return found


def _parts(tiles: Sequence[Tile]) -> Iterator[Sequence[Tile]]:
    """Yield neighbouring tiles that have no more patches than may be in memory at once."""
    first = count = 0
    for i, tile in enumerate(tiles):
        if count and count + len(tile.places) > PATCHES_AT_ONCE:
            yield tiles[first:i]
            first, count = i, 0
        count += len(tile.places)
    yield tiles[first:]


def _joined(tiles: Sequence[Tile], dtype: torch.dtype) -> tuple[Tensor, Tensor, list[int]]:
    """Normalized patches of tiles, their places, and patches of each tile."""
    patches = []
    for tile in tiles:
        scale, shift = tile.scale_shift.unsqueeze(-1)  # each [3, 1]
        flat = tile.pixels.view(len(tile.pixels), len(scale), -1) * scale + shift
        patches.append(flat.flatten(1).to(dtype))
    places = torch.cat([tile.places for tile in tiles])
    return torch.cat(patches), places, [len(tile.places) for tile in tiles]

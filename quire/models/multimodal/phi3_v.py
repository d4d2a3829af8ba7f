"""Phi-3-vision and Phi-3.5-vision: CLIP-L on tiles of an image and on the whole, in squares of
2 x 2 patches. A learned vector ends each line, another is before the whole image.

Source: model_type "phi3_v", https://huggingface.co/microsoft/Phi-3.5-vision-instruct
Axes:   y, x rows and columns of tiles, s squares along the side of a tile, E hidden of the text
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.framework import lazy_fusion
from quire.models.multimodal._base import (
    EncoderInput,
    Hf,
    MediaEncoder,
    field_of,
    normalized_patches,
)
from quire.models.multimodal._towers import (
    MLPProjector,
    build_clip,
    chosen_states,
    merge_neighbours,
    text_hidden,
    tower_weights,
)
from quire.models.multimodal._vit import Learned
from quire.models.multimodal.llava import VISION

AT = "vision_embed_tokens"
MERGE = 2
MOST_TILES = 16


class Encoder(MediaEncoder):
    """An item has the tensors

    pixels       uint8 [y * side, x * side, C]: the resized image, padded to whole tiles
    scale_shift  float32 [2, C], of normalization
    """

    modalities = ("image",)

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        section = field_of(hf, "img_processor", dict)
        field_of(section, "name", str, default="clip_vision_model", one_of={"clip_vision_model"})
        field_of(section, "type_feature", str, default="patch", one_of={"patch"})
        layout = field_of(hf, "embd_layer", dict, default={})
        field_of(layout, "hd_transform_order", str, default="sub_glb", one_of={"sub_glb"})
        field_of(layout, "projection_cls", str, default="mlp", one_of={"mlp"})
        for name in ("use_hd_transform", "with_learnable_separator"):
            field_of(layout, name, bool, default=True, one_of={True})
        layer = field_of(section, "layer_idx", int, default=-2)
        self.tower = build_clip({**VISION, **section}, [layer])
        self.width = text_hidden(hf)
        inputs = self.tower.config.hidden * MERGE**2
        self.glb_GN = Learned(inputs)
        self.sub_GN = Learned(inputs)
        self.projector = MLPProjector(inputs, self.width, self.width)
        names = tower_weights(
            self.tower,
            paths={
                f"{AT}.img_processor.vision_model": "tower",
                f"{AT}.img_projection.0": "projector.linear_1",
                f"{AT}.img_projection.2": "projector.linear_2",
            },
            alias={f"{AT}.{name}": f"{name}.weight" for name in ("glb_GN", "sub_GN")}
            | {
                f"{AT}.img_processor.vision_model.embeddings.class_embedding": (
                    "tower.embeddings.class_token.weight"
                )
            },
        )
        # The embeddings of tokens are there a second time.
        self.weights = replace(names, ignore=(*names.ignore, f"*{AT}.wte.weight"))

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        squares = self.tower.config.grid[0] // MERGE
        return (MOST_TILES + 1) * squares**2 + 1 + (MOST_TILES + 1) * squares

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        cut = [self.patches(one.tensors["pixels"], one.tensors["scale_shift"]) for one in items]
        states = chosen_states(self.tower(torch.cat(cut)), 1)
        squares = merge_neighbours(states, MERGE)
        rows = self.projector(squares.flatten(0, 1)).view(*squares.shape[:2], -1)
        marks = self.projector(torch.stack((self.sub_GN.weight, self.glb_GN.weight)))
        lazy_fusion.flush()
        side = self.tower.config.image[0]
        grids = [
            (one.tensors["pixels"].shape[0] // side, one.tensors["pixels"].shape[1] // side)
            for one in items
        ]
        images = torch.split(rows, [1 + y * x for y, x in grids])
        return [in_lines(own, *grid, marks) for own, grid in zip(images, grids, strict=True)]

    def patches(self, pixels: Tensor, scale_shift: Tensor) -> Tensor:
        """Patches of the whole image, shrunk to a tile, and of each tile."""
        c = self.tower.config
        side, dtype = c.image[0], self.tower.embeddings.position_embedding.weight.dtype
        lazy_fusion.flush()
        scale, shift = scale_shift
        image = (pixels * scale + shift).permute(2, 0, 1)[None]  # float32 [1, C, H, W]
        whole = F.interpolate(image, (side, side), mode="bicubic")
        grid = whole.view(c.channels, c.grid[0], c.patch, c.grid[1], c.patch)
        first = grid.permute(1, 3, 0, 2, 4).flatten(0, 1).flatten(1).to(dtype)
        y, x = pixels.shape[0] // side, pixels.shape[1] // side
        tiles = pixels.view(y, side, x, side, -1).transpose(1, 2).flatten(0, 1)
        return torch.cat((first, normalized_patches(tiles, scale_shift, c.patch, dtype)))


def in_lines(rows: Tensor, y: int, x: int, marks: Tensor) -> Tensor:
    """Put the rows of an image in the order of the prompt: tiles, a mark, the whole image.

    rows: [1 + y * x, s * s, E], the whole image first. marks: [2, E], of the end of a line and of
    what is before the whole image.
    """
    s = int(rows.shape[1] ** 0.5)

    def lines(cells: Tensor, tall: int) -> Tensor:
        cells = cells.reshape(tall, -1, cells.shape[-1])
        return torch.cat((cells, marks[:1].expand(tall, 1, -1)), 1).flatten(0, 1)

    tiles = rows[1:].view(y, x, s, s, -1).transpose(1, 2)
    return torch.cat((lines(tiles, y * s), marks[1:], lines(rows[0], s)))

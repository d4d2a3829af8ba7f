"""Florence-2: DaViT and a projection of its last map, beside the text that BART's encoder reads.

Source: model_type "florence2", https://huggingface.co/florence-community/Florence-2-base;
        transformers modeling_florence2.py
Axes:   N images, R rows and C columns of the map, E numbers at each place
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quire.kernels.framework import lazy_fusion
from quire.layers import LayerNorm, Linear
from quire.models.multimodal._base import EncoderInput, Hf, MediaEncoder, Weights, field_of
from quire.models.multimodal._davit import EPS, DaViT, read_stages
from quire.models.multimodal._vit import Learned

USUAL_SIDE = 768
"""Pixels of the images of published models."""


class Projector(nn.Module):
    """Adds vectors of rows, columns and time, and projects the places and their mean."""

    def __init__(self, width: int, outputs: int, positions: int, times: int) -> None:
        super().__init__()
        self.rows = Learned(positions, width // 2)
        self.columns = Learned(positions, width - width // 2)
        self.times = Learned(times, width)
        self.image_projection = Linear(width, outputs)
        self.image_proj_norm = LayerNorm(outputs, EPS)

    def forward(self, x: Tensor) -> Tensor:
        """[N, R, C, E] -> [N, 1 + R * C, outputs]."""
        count, rows, columns, _ = x.shape
        across = self.columns.weight[:columns].expand(rows, -1, -1)
        down = self.rows.weight[:rows].unsqueeze(1).expand(-1, columns, -1)
        x = (x + torch.cat((across, down), dim=-1)).flatten(1, 2) + self.times.weight[0]
        x = torch.cat((x.mean(1, keepdim=True), x), dim=1)
        y = self.image_proj_norm(self.image_projection(x.flatten(0, 1)))
        lazy_fusion.flush()
        return y.view(count, 1 + rows * columns, -1)


class Encoder(MediaEncoder):
    modalities: tuple[str, ...] = ("image",)
    patches_per_row = 64  # the first map has as many places for one of the last

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        vision = hf.get("vision_config") or {}
        self.stages = read_stages(vision)
        self.width = field_of(vision, "projection_dim", int, default=1024)
        self.vision_tower = DaViT(self.stages)
        self.projector = Projector(
            self.stages[-1].hidden,
            self.width,
            field_of(vision, "max_position_embeddings", int, default=50),
            field_of(vision, "max_temporal_embeddings", int, default=100),
        )
        self.weights = Weights(
            strip=("model.",),
            paths={
                "multi_modal_projector.image_position_embed.row_embeddings": "projector.rows",
                "multi_modal_projector.image_position_embed.column_embeddings": "projector.columns",
                "multi_modal_projector": "projector",
                "window_attn": "attn",
                "channel_attn": "attn",
            },
            alias={
                f"{outer}multi_modal_projector.visual_temporal_embed.pos_idx_to_embed": (
                    "projector.times.weight"
                )
                for outer in ("", "model.")
            },
        )

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        side = USUAL_SIDE
        for one in self.stages:
            side = one.side(side)
        return 1 + side**2

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        """pixels uint8 [1, H, W, 3], scale_shift float32 [2, 3]."""
        lazy_fusion.flush()
        dtype = self.projector.rows.weight.dtype
        images = []
        for one in items:
            scale, shift = one.tensors["scale_shift"]
            images.append((one.tensors["pixels"] * scale + shift).to(dtype))
        return list(self.projector(self.vision_tower(torch.cat(images))))

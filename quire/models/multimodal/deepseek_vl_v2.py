"""DeepSeek-VL2: SigLIP on tiles of an image and on the whole, in squares of 2 x 2 patches, through
an MLP. A learned vector ends each line, another separates the two views.

Source: model_type "deepseek_vl_v2", https://huggingface.co/deepseek-ai/deepseek-vl2;
        arXiv 2412.10302
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.framework import lazy_fusion
from quire.models.multimodal._base import EncoderInput, Hf, field_of
from quire.models.multimodal._towers import (
    ImageEncoder,
    MLPProjector,
    merge_neighbours,
    text_hidden,
    tower_weights,
)
from quire.models.multimodal._vit import Learned, Vit, VitConfig, vit_sizes

PATHS = {
    "vision.patch_embed.proj": "tower.embeddings.patch_embedding",
    "vision.blocks": "tower.layers",
    "vision.norm": "tower.post_layernorm",
    "attn.qkv": "self_attn.qkv_proj",
    "attn.proj": "self_attn.out_proj",
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "projector.layers.0": "projector.linear_1",
    "projector.layers.2": "projector.linear_2",
}
ALIAS = {
    "vision.pos_embed": "tower.embeddings.position_embedding.weight",
    "image_newline": "image_newline.weight",
    "view_seperator": "view_seperator.weight",  # as checkpoints spell it
}


class Encoder(ImageEncoder):
    """An item has one tensor more

    order    int32 [n]: for each row of the item, its row among those of all its tiles; the numbers
             after these are the vector at the end of a line, and that between the views.
    """

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        self.tower = _build_tower(hf.get("vision_config") or {})
        section = hf.get("projector_config") or {}
        kind = "downsample_mlp_gelu"
        field_of(section, "projector_type", str, default=kind, one_of={kind})
        field_of(section, "depth", int, default=2, one_of={2})
        field_of(section, "token_pooling", bool, default=False, one_of={False})
        field_of(hf, "tile_tag", str, default="2D", one_of={"2D"})
        self.factor = field_of(section, "downsample_ratio", int, default=2)
        self.width = text_hidden(hf)
        hidden = self.width * field_of(section, "mlp_ratio", int, default=1)
        inputs = self.tower.config.hidden * self.factor**2
        self.projector = MLPProjector(inputs, hidden, self.width)
        self.image_newline = Learned(self.width)
        self.view_seperator = Learned(self.width)
        found = tower_weights(self.tower, paths=PATHS, alias=ALIAS)
        unused = ("*vision.attn_pool.*", "*vision.head.*")
        self.weights = replace(found, ignore=(*found.ignore, *unused))
        points: Any = hf.get("candidate_resolutions") or [self.tower.config.image]
        self.largest = max(self.rows_of(int(height), int(width)) for width, height in points)

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def rows_of(self, height: int, width: int) -> int:
        """Rows of an image whose tiles have this size together."""
        side = self.tower.config.image[0]
        squares = -(-self.tower.config.grid[0] // self.factor)
        lines = height // side * squares
        return squares * (squares + 1) + 1 + lines * (width // side * squares + 1)

    def max_rows(self, modality: str) -> int:
        return self.largest

    def project(self, states: list[Tensor]) -> Tensor:
        (x,) = states
        side = self.tower.config.grid[0]
        lazy_fusion.flush()
        missing = -side % self.factor
        cells = F.pad(x.view(len(x), side, side, -1), (0, 0, 0, missing, 0, missing))
        x = merge_neighbours(cells.flatten(1, 2), self.factor)
        # Of a square, a checkpoint has all patches of a channel together.
        x = x.unflatten(-1, (self.factor**2, -1)).transpose(-1, -2).flatten(-2)
        rows: Tensor = self.projector(x.flatten(0, 1))
        return rows.view(*x.shape[:2], -1)

    def arrange(self, item: EncoderInput, rows: Tensor) -> Tensor:
        lazy_fusion.flush()
        marks = torch.stack((self.image_newline.weight, self.view_seperator.weight))
        return torch.cat((rows.flatten(0, 1), marks))[item.tensors["order"].long()]


def _build_tower(hf: Hf) -> Vit:
    """Build the SigLIP tower of a vision section with timm's names of sizes."""
    field_of(hf, "class_token", bool, default=False, one_of={False})
    width = field_of(hf, "width", int, default=1024)
    usual = {
        "hidden_size": width,
        "num_hidden_layers": field_of(hf, "layers", int, default=24),
        "num_attention_heads": field_of(hf, "heads", int, default=16),
        "intermediate_size": int(width * field_of(hf, "mlp_ratio", float, default=4.0)),
        "image_size": field_of(hf, "image_size", int, default=384),
        "patch_size": field_of(hf, "patch_size", int, default=16),
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    }
    return Vit(VitConfig(**vit_sizes(usual)), last_norm=True)

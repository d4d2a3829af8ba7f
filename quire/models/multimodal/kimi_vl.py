"""Kimi-VL: MoonViT, for images of any size, and an MLP over squares of 2 x 2 patches.

    x = patches W + learned positions, stretched over the image
    attention with rotary positions: neighbouring channels turn by columns and by rows in turn

Source: model_type "kimi_vl", https://huggingface.co/moonshotai/Kimi-VL-A3B-Instruct;
        arXiv 2504.07491
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.layers import (
    AddLayerNorm,
    LayerNorm,
    PatchLinear,
    PositionEmbedding,
    Rope,
    RopeConfig,
    add,
)
from quire.layers.rope_scaling import AxialRope
from quire.models._decoder import PlainMLP
from quire.models.multimodal._base import Hf, Weights, field_of
from quire.models.multimodal._qwen_vision import (
    Grid,
    Merger,
    Segments,
    TowerAttention,
    TowerBlock,
    TowerConfig,
    VisionTower,
    sum_of,
)
from quire.models.multimodal._towers import text_hidden
from quire.models.multimodal.glm4v import CubicTaps

MOST_SIDE = 512
"""Patches along a side of an image."""
MOST_ROWS = 4096 + MOST_SIDE
"""Rows of an image of 16,384 patches, which is then padded to whole squares."""
TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"


class Encoder(VisionTower):
    modalities = ("image",)
    weights = Weights(
        paths={
            f"{TOWER}.patch_embed.proj": "patch_embed",
            f"{TOWER}.patch_embed.pos_emb": "pos_embed",
            f"{TOWER}.encoder": "",
            "norm1": "norm2",
            "norm0": "norm1",
            "wqkv": "attn.qkv",
            "wo": "attn.proj",
            "mlp.fc0": "mlp.c_fc",
            "mlp.fc1": "mlp.c_proj",
            f"{PROJECTOR}.pre_norm": "merger.norm",
            f"{PROJECTOR}.linear_1": "merger.fc1",
            f"{PROJECTOR}.linear_2": "merger.fc2",
        },
    )

    def __init__(self, c: TowerConfig, side: int) -> None:
        """side: learned positions along a side."""
        super().__init__(c)
        self.patch_embed = PatchLinear(c.channels, (c.patch, c.patch), c.hidden, bias=True)
        self.taps = CubicTaps(side)
        self.pos_embed = SquareTable(side, c.hidden)
        self.blocks = nn.ModuleList(_block(c) for _ in range(c.layers))
        self.final_layernorm = LayerNorm(c.hidden, c.eps)
        self.merger = Merger(c, LayerNorm(c.hidden, 1e-5))

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        vision = field_of(hf, "vision_config", dict)
        hidden = field_of(vision, "hidden_size", int, default=1152)
        heads = field_of(vision, "num_attention_heads", int, default=16)
        side = field_of(vision, "init_pos_emb_height", int, default=64)
        field_of(vision, "init_pos_emb_width", int, default=side, one_of={side})
        merge = vision.get("merge_kernel_size") or (2, 2)
        if heads < 1 or hidden % (4 * heads) or len(set(merge)) != 1:
            raise ConfigError(
                f"config.json: the vision tower has {heads} heads of {hidden} numbers, and joins "
                f"{merge!r:.40} patches; heads must be multiples of 4, and squares joined"
            )
        config = TowerConfig(
            hidden=hidden,
            layers=field_of(vision, "num_hidden_layers", int, default=27),
            heads=heads,
            mlp=field_of(vision, "intermediate_size", int, default=4304),
            act="gelu_pytorch_tanh",
            outputs=text_hidden(hf),
            patch=field_of(vision, "patch_size", int, default=14),
            depth=1,
            merge=int(merge[0]),
            channels=3,
            theta=10000.0,
            eps=1e-5,
        )
        return cls(config, side)

    def max_rows(self, modality: str) -> int:
        return MOST_ROWS

    def arrays(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        return super().arrays(grids) | self.learned(grids, self.taps)

    def compute(
        self, patches: Tensor, arrays: Mapping[str, Tensor], longest: Mapping[str, int]
    ) -> Generator[None, None, Tensor]:
        angles = self.angles(arrays["positions"])
        segments = Segments(arrays["frames"], longest["frames"])
        learned = self.interpolate(self.pos_embed, arrays)
        x, res = add(self.patch_embed(patches), learned), None
        for block in self.blocks:
            x, res = block(x, res, angles, segments)
            yield
        return self.merger(self.final_layernorm(sum_of(x, res)))


def _block(c: TowerConfig) -> TowerBlock:
    made = TowerBlock(c, PlainMLP(c.hidden, c.mlp, c.act), AddLayerNorm)
    made.attn = AlternatingAttention(c)
    return made


class AlternatingAttention(TowerAttention):
    def __init__(self, c: TowerConfig) -> None:
        super().__init__(c)
        head_dim = c.hidden // c.heads
        axes = (1, 0) * (head_dim // 4)
        config = RopeConfig(c.theta, head_dim, AxialRope(2, alternate=True), axes=axes)
        self.rope = Rope(config, MOST_SIDE, interleaved=True)


class SquareTable(PositionEmbedding):
    """Learned positions that a checkpoint has in rows and columns: [side, side, E]."""

    def __init__(self, side: int, size: int) -> None:
        self.side = side
        super().__init__(side**2, size)

    def fused_shape(self, param: str) -> tuple[int, ...]:
        return (self.side, self.side, *super().fused_shape(param)[1:])

    def split_fused(self, param: str, tensor: Tensor) -> Sequence[torch.Tensor]:
        return super().split_fused(param, tensor.flatten(0, 1))

"""GLM-4.1V and GLM-4.6V-Flash: a ViT with bicubic learned positions and a convolution that merges.

Source: model_type "glm4v", https://huggingface.co/zai-org/GLM-4.1V-9B-Thinking; transformers
        modeling_glm4v.py
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, nn

from quire.kernels.framework import lazy_fusion
from quire.layers import (
    Activation,
    AddRMSNorm,
    LayerNorm,
    Linear,
    PatchLinear,
    PositionEmbedding,
    RMSNorm,
    add,
)
from quire.models._decoder import GatedMLP
from quire.models.multimodal._base import Hf, Weights, field_of
from quire.models.multimodal._qwen_vision import (
    Grid,
    Ints,
    Segments,
    TowerBlock,
    TowerConfig,
    VisionTower,
    sum_of,
    tower_sizes,
)


class GatedMerger(GatedMLP):
    """A projection, and a gated MLP of its normed activations."""

    def __init__(self, c: TowerConfig) -> None:
        super().__init__(c.outputs, c.mlp, c.act)
        self.proj = Linear(c.outputs, c.outputs)
        self.norm = LayerNorm(c.outputs, 1e-5)
        self.gelu = Activation("gelu")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.gelu(self.norm(self.proj(x))))


class Encoder(VisionTower):
    weights = Weights(
        strip=("model.visual.", "visual."),
        paths={
            "patch_embed.proj": "patch_embed",
            "embeddings.position_embedding": "pos_embed",
            "merger.post_projection_norm": "merger.norm",
        },
        fuse={"gate_up_proj": ("gate_proj", "up_proj")},
    )

    def __init__(self, c: TowerConfig, side: int) -> None:
        """side: learned positions along a side."""
        super().__init__(c, patch_bias=True)
        self.taps = CubicTaps(side)
        self.pos_embed = PositionEmbedding(side**2, c.hidden)
        self.post_conv_layernorm = RMSNorm(c.hidden, c.eps)
        self.blocks = nn.ModuleList(
            # The MLPs have the width that the rows have; that of the config is the merger's.
            TowerBlock(c, GatedMLP(c.hidden, c.outputs, c.act), AddRMSNorm)
            for _ in range(c.layers)
        )
        self.post_layernorm = RMSNorm(c.hidden, c.eps)
        self.downsample = PatchLinear(c.hidden, (c.merge, c.merge), c.outputs, bias=True)
        self.merger = GatedMerger(c)

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        c = tower_sizes(hf, hidden="hidden_size", act="silu", outputs="out_hidden_size")
        vision = field_of(hf, "vision_config", dict)
        bias = field_of(vision, "attention_bias", bool, default=False)
        eps = field_of(vision, "rms_norm_eps", float, default=1e-5)
        side = field_of(vision, "image_size", int, default=336) // c.patch
        return cls(replace(c, eps=eps, qkv_bias=bias, proj_bias=False), side)

    def arrays(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        return super().arrays(grids) | self.learned(grids, self.taps)

    def compute(
        self, patches: Tensor, arrays: Mapping[str, Tensor], longest: Mapping[str, int]
    ) -> Generator[None, None, Tensor]:
        cell = self.config.merge**2
        angles = self.angles(arrays["positions"])
        segments = Segments(arrays["frames"], longest["frames"])
        learned = self.interpolate(self.pos_embed, arrays)
        x, res = add(self.post_conv_layernorm(self.patch_embed(patches)), learned), None
        for block in self.blocks:
            x, res = block(x, res, angles, segments)
            yield
        x = self.post_layernorm(sum_of(x, res))
        lazy_fusion.flush()  # the states are read by torch
        cells = x.view(-1, cell, x.shape[1]).transpose(1, 2)  # channels first, as the weight has it
        return self.merger(self.downsample(cells.reshape(len(cells), -1)))


@dataclass(frozen=True, slots=True)
class CubicTaps:
    """Bicubic: the edges of a grid are those of the learned one, whose border is repeated."""

    side: int

    def along(self, at: Ints, size: int) -> Iterable[tuple[np.ndarray, np.ndarray]]:
        exact = (at.astype(np.float32) + 0.5) / np.float32(size) * self.side - np.float32(0.5)
        low = np.floor(exact)
        for tap in (-1, 0, 1, 2):
            distance = np.abs(exact - low - tap)
            near = (1.25 * distance - 2.25) * distance * distance + 1
            far = -0.75 * (((distance - 5) * distance + 8) * distance - 4)
            place = np.clip(low.astype(np.int64) + tap, 0, self.side - 1)
            yield place, np.where(distance <= 1, near, far)

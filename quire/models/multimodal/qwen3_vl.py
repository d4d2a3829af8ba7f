"""Qwen3-VL: a ViT with learned positions, interpolated to the grid, and DeepStack.

The states after some layers are merged as well; the text model adds them after its first layers.

Source: model_type "qwen3_vl", https://huggingface.co/Qwen/Qwen3-VL-8B-Instruct; transformers
        modeling_qwen3_vl.py
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from quire.kernels.framework import lazy_fusion
from quire.layers import AddLayerNorm, LayerNorm, PositionEmbedding
from quire.models._decoder import PlainMLP
from quire.models.multimodal._base import Hf, Weights, field_of
from quire.models.multimodal._qwen_vision import (
    Grid,
    Ints,
    Merger,
    Segments,
    TowerBlock,
    TowerConfig,
    VisionTower,
    sum_of,
    tower_sizes,
)


class Encoder(VisionTower):
    default_levels: ClassVar[tuple[int, ...]] = (8, 16, 24)
    weights = Weights(
        strip=("model.visual.", "visual."),
        paths={"patch_embed.proj": "patch_embed", "deepstack_merger_list": "deepstack"},
        rename={
            "mlp.linear_fc1": "c_fc",
            "mlp.linear_fc2": "c_proj",
            "linear_fc1": "fc1",
            "linear_fc2": "fc2",
        },
    )

    def __init__(self, c: TowerConfig, side: int, levels: Sequence[int]) -> None:
        """side: learned positions along a side. levels: layers whose states are merged too."""
        super().__init__(c, patch_bias=True)
        self.width = c.outputs * (1 + len(levels))
        self.taps, self.levels = LinearTaps(side), tuple(levels)
        self.pos_embed = PositionEmbedding(side**2, c.hidden)
        self.blocks = nn.ModuleList(
            TowerBlock(c, PlainMLP(c.hidden, c.mlp, c.act), AddLayerNorm) for _ in range(c.layers)
        )
        self.merger = Merger(c, LayerNorm(c.hidden, c.eps))
        cell = c.hidden * c.merge**2
        self.deepstack = nn.ModuleList(Merger(c, LayerNorm(cell, c.eps)) for _ in levels)

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        c = tower_sizes(
            hf, hidden="hidden_size", act="gelu_pytorch_tanh", outputs="out_hidden_size"
        )
        vision = field_of(hf, "vision_config", dict)
        side = isqrt(field_of(vision, "num_position_embeddings", int, default=2304))
        levels = field_of(vision, "deepstack_visual_indexes", list, default=[*cls.default_levels])
        return cls(c, side, levels)

    def arrays(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        return super().arrays(grids) | self.learned(grids, self.taps)

    def compute(
        self, patches: Tensor, arrays: Mapping[str, Tensor], longest: Mapping[str, int]
    ) -> Generator[None, None, Tensor]:
        angles = self.angles(arrays["positions"])
        segments = Segments(arrays["frames"], longest["frames"])
        x, res = self.patch_embed(patches), self.interpolate(self.pos_embed, arrays)
        rows = []
        for i, block in enumerate(self.blocks):
            x, res = block(x, res, angles, segments)
            if i in self.levels:
                rows.append(self.deepstack[self.levels.index(i)](sum_of(x, res)))
            yield
        rows.insert(0, self.merger(sum_of(x, res)))
        lazy_fusion.flush()  # the rows are read by torch
        return torch.cat(rows, dim=1)


@dataclass(frozen=True, slots=True)
class LinearTaps:
    """Bilinear: the corners of a grid are those of the learned one."""

    side: int

    def along(self, at: Ints, size: int) -> Iterable[tuple[np.ndarray, np.ndarray]]:
        exact = at.astype(np.float32) * np.float32(self.side - 1) / np.float32(max(size - 1, 1))
        low = np.floor(exact).astype(np.int64)
        after = exact - low.astype(np.float32)
        return (low, 1 - after), (np.minimum(low + 1, self.side - 1), after)

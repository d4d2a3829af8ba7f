"""Qwen3-VL: a ViT with learned positions, interpolated to the grid, and DeepStack.

The states after some layers are merged as well; the text model adds them after its first layers.

Source: model_type "qwen3_vl", https://huggingface.co/Qwen/Qwen3-VL-8B-Instruct; transformers
        modeling_qwen3_vl.py
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import isqrt

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quire.kernels.framework import lazy_fusion
from quire.layers import AddLayerNorm, LayerNorm, PositionEmbedding
from quire.models._decoder import PlainMLP
from quire.models.multimodal._base import Hf, Weights, field_of
from quire.models.multimodal._qwen_vision import (
    EPS,
    Grid,
    Merger,
    TowerBlock,
    TowerConfig,
    VisionTower,
    cell_positions,
    pair_segments,
    sum_of,
    tower_sizes,
)


class Encoder(VisionTower):
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
        self.side, self.levels = side, tuple(levels)
        self.pos_embed = PositionEmbedding(side**2, c.hidden)
        self.blocks = nn.ModuleList(
            TowerBlock(c, PlainMLP(c.hidden, c.mlp, c.act), AddLayerNorm) for _ in range(c.layers)
        )
        self.merger = Merger(c, LayerNorm(c.hidden, EPS))
        cell = c.hidden * c.merge**2
        self.deepstack = nn.ModuleList(Merger(c, LayerNorm(cell, EPS)) for _ in levels)

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        c = tower_sizes(
            hf, hidden="hidden_size", act="gelu_pytorch_tanh", outputs="out_hidden_size"
        )
        vision = field_of(hf, "vision_config", dict)
        side = isqrt(field_of(vision, "num_position_embeddings", int, default=2304))
        levels = field_of(vision, "deepstack_visual_indexes", list, default=[8, 16, 24])
        return cls(c, side, levels)

    def run(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        angles = self.angles(self.positions(grids), patches.device)
        segments = pair_segments(grids, patches.device)
        x, res, rows = self.patch_embed(patches), self._learned(grids, patches.device), []
        for i, block in enumerate(self.blocks):
            x, res = block(x, res, angles, segments)
            if i in self.levels:
                rows.append(self.deepstack[self.levels.index(i)](sum_of(x, res)))
        rows.insert(0, self.merger(sum_of(x, res)))
        lazy_fusion.flush()  # the rows are read by torch
        return torch.cat(rows, dim=1)

    def _learned(self, grids: Sequence[Grid], device: torch.device) -> Tensor:
        """The learned position of every patch, interpolated from the four around it: [P, E]."""
        merge = self.config.merge
        found = [position_taps(g.rows, g.columns, merge, self.side) for g in grids]
        places = torch.from_numpy(np.concatenate([one for one, _ in found], axis=1)).to(device)
        weights = torch.from_numpy(np.concatenate([one for _, one in found], axis=1)).to(device)
        total = torch.zeros((), device=device)
        for tap, share in zip(places, weights, strict=True):
            vectors = self.pos_embed(tap)
            lazy_fusion.flush()  # the vectors are read by torch
            total = total + vectors * share[:, None]
        frames = total.to(vectors.dtype).split([g.rows * g.columns for g in grids])
        return torch.cat([one.repeat(g.pairs, 1) for one, g in zip(frames, grids, strict=True)])


@functools.lru_cache(64)
def position_taps(
    rows: int, columns: int, merge: int, side: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Numbers of the four learned positions around each patch, and their weights: [4, patches].

    The corners of the grid are those of the side x side learned ones.
    """
    row, column = cell_positions(rows, columns, merge)
    (top, down), (left, right) = _axis_taps(row, rows, side), _axis_taps(column, columns, side)
    pairs = [(a, b) for a in (top, down) for b in (left, right)]
    places = np.stack([a[0] * side + b[0] for a, b in pairs])
    return places.astype(np.int32), np.stack([a[1] * b[1] for a, b in pairs])


def _axis_taps(
    at: npt.NDArray[np.int32], size: int, side: int
) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """(numbers, weights) of the learned positions before and after each place of an axis."""
    exact = at.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    low = np.floor(exact)
    after = (exact - low).astype(np.float32)
    low = low.astype(np.int64)
    return (low, 1 - after), (np.minimum(low + 1, side - 1), after)

"""Qwen2.5-VL: a ViT whose patches attend within windows, but in a few layers to the whole frame.

The patches are put in the order of windows before the first layer, and back after the last.

Source: model_type "qwen2_5_vl", https://huggingface.co/Qwen/Qwen2.5-VL-7B-Instruct; transformers
        modeling_qwen2_5_vl.py
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quire.kernels.framework import lazy_fusion
from quire.layers import AddRMSNorm, RMSNorm
from quire.models._decoder import GatedMLP
from quire.models.multimodal._base import Hf, Weights, field_of
from quire.models.multimodal._qwen_vision import (
    MERGER_2_PATHS,
    Grid,
    Merger,
    Segments,
    TowerBlock,
    TowerConfig,
    VisionTower,
    starts_of,
    sum_of,
    tower_sizes,
)


class Encoder(VisionTower):
    weights = Weights(
        strip=("model.visual.", "visual."),
        paths=MERGER_2_PATHS,
        fuse={"gate_up_proj": ("gate_proj", "up_proj")},
    )

    def __init__(self, c: TowerConfig, window: int, whole: Sequence[int]) -> None:
        """window: cells along a side of one. whole: layers that attend to the whole frame."""
        super().__init__(c)
        self.window, self.whole = window, frozenset(whole)
        self.blocks = nn.ModuleList(
            TowerBlock(c, GatedMLP(c.hidden, c.mlp, c.act, bias=True), AddRMSNorm)
            for _ in range(c.layers)
        )
        self.merger = Merger(c, RMSNorm(c.hidden, c.eps))

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        c = tower_sizes(hf, hidden="hidden_size", act="silu", outputs="out_hidden_size")
        vision = field_of(hf, "vision_config", dict)
        pixels = field_of(vision, "window_size", int, default=112)
        whole = field_of(vision, "fullatt_block_indexes", list, default=[7, 15, 23, 31])
        return cls(c, pixels // c.merge // c.patch, whole)

    def arrays(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        cell = self.config.merge**2
        order, lengths = self._windows(grids)
        found = super().arrays(grids)
        positions = found["positions"].reshape(2, -1, cell)[:, order].reshape(2, -1)
        windows = starts_of([cell * length for length in lengths])
        return found | {"positions": positions, "order": order, "windows": windows}

    def segments(self, patches: int) -> Mapping[str, int]:
        window = min((self.window * self.config.merge) ** 2, patches)
        return {**super().segments(patches), "windows": window}

    def compute(
        self, patches: Tensor, arrays: Mapping[str, Tensor], longest: Mapping[str, int]
    ) -> Generator[None, None, Tensor]:
        turned = arrays["order"]
        patches = patches.view(len(turned), -1)[turned].view(patches.shape)
        angles = self.angles(arrays["positions"])
        windows = Segments(arrays["windows"], longest["windows"])
        frames = Segments(arrays["frames"], longest["frames"])
        x, res = self.patch_embed(patches), None
        for i, block in enumerate(self.blocks):
            x, res = block(x, res, angles, frames if i in self.whole else windows)
            yield
        rows = self.merger(sum_of(x, res))
        lazy_fusion.flush()  # the rows are read by torch
        return torch.empty_like(rows).index_copy_(0, turned, rows)

    def _windows(self, grids: Sequence[Grid]) -> tuple[npt.NDArray[np.int64], list[int]]:
        """Numbers of all cells, window by window, and the cells of each window."""
        merge = self.config.merge
        found = [
            window_order(g.pairs, g.rows // merge, g.columns // merge, self.window) for g in grids
        ]
        starts = accumulate((len(order) for order, _ in found), initial=0)
        order = np.concatenate([order + start for (order, _), start in zip(found, starts)])
        return order, [length for _, lengths in found for length in lengths]


@functools.lru_cache(256)
def window_order(
    pairs: int, rows: int, columns: int, side: int
) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
    """Numbers of an item's cells, window by window, and the cells of each window.

    rows, columns: cells of a frame. side: of a window; those at the edges may be smaller.
    """
    frame = np.arange(rows * columns).reshape(rows, columns)
    windows = [
        frame[top : top + side, left : left + side].ravel()
        for top in range(0, rows, side)
        for left in range(0, columns, side)
    ]
    order = np.concatenate(windows)
    every = np.arange(pairs)[:, None] * frame.size + order
    return every.ravel(), tuple(len(one) for one in windows) * pairs

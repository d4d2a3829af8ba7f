"""GLM-OCR: the tower of GLM-4.1V without learned positions, with norms of queries and keys.

Source: model_type "glm_ocr", https://huggingface.co/zai-org/GLM-OCR; transformers
        modeling_glm_ocr.py
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import replace

from torch import Tensor, nn

from quire.kernels.framework import lazy_fusion
from quire.layers import AddRMSNorm, PatchLinear, RMSNorm
from quire.models._decoder import GatedMLP
from quire.models.multimodal._base import Hf, field_of
from quire.models.multimodal._qwen_vision import (
    Segments,
    TowerBlock,
    TowerConfig,
    VisionTower,
    sum_of,
    tower_sizes,
)
from quire.models.multimodal.glm4v import Encoder as Glm4vEncoder
from quire.models.multimodal.glm4v import GatedMerger


class Encoder(VisionTower):
    weights = Glm4vEncoder.weights

    def __init__(self, c: TowerConfig) -> None:
        super().__init__(c, patch_bias=True)
        self.blocks = nn.ModuleList(
            TowerBlock(c, GatedMLP(c.hidden, c.mlp, c.act, bias=c.proj_bias), AddRMSNorm)
            for _ in range(c.layers)
        )
        self.post_layernorm = RMSNorm(c.hidden, c.eps)
        self.downsample = PatchLinear(c.hidden, (c.merge, c.merge), c.outputs, bias=True)
        self.merger = GatedMerger(replace(c, mlp=c.outputs * c.channels))

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        c = tower_sizes(hf, hidden="hidden_size", act="silu", outputs="out_hidden_size")
        vision = field_of(hf, "vision_config", dict)
        bias = field_of(vision, "attention_bias", bool, default=True)
        eps = field_of(vision, "rms_norm_eps", float, default=1e-5)
        return cls(replace(c, eps=eps, qkv_bias=bias, proj_bias=bias, head_norms=True))

    def compute(
        self, patches: Tensor, arrays: Mapping[str, Tensor], longest: Mapping[str, int]
    ) -> Generator[None, None, Tensor]:
        cell = self.config.merge**2
        angles = self.angles(arrays["positions"])
        segments = Segments(arrays["frames"], longest["frames"])
        x, res = self.patch_embed(patches), None
        for block in self.blocks:
            x, res = block(x, res, angles, segments)
            yield
        x = self.post_layernorm(sum_of(x, res))
        lazy_fusion.flush()  # the states are read by torch
        cells = x.view(-1, cell, x.shape[1]).transpose(1, 2)  # channels first, as the weight has it
        return self.merger(self.downsample(cells.reshape(len(cells), -1)))

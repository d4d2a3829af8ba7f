"""Qwen2-VL: a ViT with 2-D rotary positions and QuickGELU, and a merger of 2 x 2 patches.

Source: model_type "qwen2_vl", https://huggingface.co/Qwen/Qwen2-VL-7B-Instruct; transformers
        modeling_qwen2_vl.py
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

from torch import Tensor, nn

from quire.layers import AddLayerNorm, LayerNorm
from quire.models._decoder import PlainMLP
from quire.models.multimodal._base import Hf, Weights, field_of
from quire.models.multimodal._qwen_vision import (
    MERGER_2_PATHS,
    Merger,
    Segments,
    TowerBlock,
    TowerConfig,
    VisionTower,
    sum_of,
    tower_sizes,
)


class Encoder(VisionTower):
    weights = Weights(
        strip=("model.visual.", "visual."),
        paths=MERGER_2_PATHS,
        rename={"mlp.fc1": "c_fc", "mlp.fc2": "c_proj"},
    )

    def __init__(self, c: TowerConfig) -> None:
        super().__init__(c)
        self.blocks = nn.ModuleList(
            TowerBlock(c, PlainMLP(c.hidden, c.mlp, c.act), AddLayerNorm) for _ in range(c.layers)
        )
        self.merger = Merger(c, LayerNorm(c.hidden, c.eps))

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        vision = field_of(hf, "vision_config", dict)
        ratio = field_of(vision, "mlp_ratio", float, default=4.0)
        mlp = int(field_of(vision, "embed_dim", int) * ratio)
        names = {"hidden": "embed_dim", "outputs": "hidden_size"}
        return cls(tower_sizes(hf, act="quick_gelu", mlp=mlp, **names))

    def compute(
        self, patches: Tensor, arrays: Mapping[str, Tensor], longest: Mapping[str, int]
    ) -> Generator[None, None, Tensor]:
        angles = self.angles(arrays["positions"])
        segments = Segments(arrays["frames"], longest["frames"])
        x, res = self.patch_embed(patches), None
        for block in self.blocks:
            x, res = block(x, res, angles, segments)
            yield
        return self.merger(sum_of(x, res))

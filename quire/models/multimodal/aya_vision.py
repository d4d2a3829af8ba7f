"""Aya Vision: states of SigLIP in squares of 2 x 2, normed, through a gated MLP.

Source: model_type "aya_vision", https://huggingface.co/CohereLabs/aya-vision-8b; transformers
modeling_aya_vision.py
"""

from __future__ import annotations

from torch import Tensor, nn

from quire.kernels.framework import lazy_fusion
from quire.layers import LayerNorm, Linear, gated_act
from quire.models.multimodal._base import Hf, field_of
from quire.models.multimodal._towers import (
    TileEncoder,
    build_tower,
    feature_layers,
    skipped_tokens,
    text_hidden,
    tower_weights,
)

VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 14,
    "image_size": 384,
    "patch_size": 14,
}
"""What a vision section leaves out."""


class GatedProjector(nn.Module):
    """linear_2(silu(gate) * up) of up and gate, the halves of linear_1(layernorm(x))."""

    def __init__(self, inputs: int, inner: int, outputs: int, eps: float) -> None:
        super().__init__()
        self.layernorm = LayerNorm(inputs, eps)
        self.linear_1 = Linear(inputs, inner, bias=True)
        self.linear_2 = Linear(inner // 2, outputs, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear_1(self.layernorm(x))
        lazy_fusion.flush()
        up, gate = x.chunk(2, dim=-1)
        return self.linear_2(gated_act(gate, up, "silu"))


class Encoder(TileEncoder):
    def __init__(self, hf: Hf) -> None:
        super().__init__()
        layers = feature_layers(hf, -1)
        self.skipped = skipped_tokens(hf, "full")
        self.tower = build_tower({**VISION, **(hf.get("vision_config") or {})}, layers)
        self.factor = field_of(hf, "downsample_factor", int, default=2)
        self.width = text_hidden(hf)
        self.projector = GatedProjector(
            self.tower.config.hidden * len(layers) * self.factor**2,
            field_of(hf, "alignment_intermediate_size", int, default=self.width),
            self.width,
            field_of(hf, "adapter_layer_norm_eps", float, default=1e-6),
        )
        self.weights = tower_weights(self.tower)

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

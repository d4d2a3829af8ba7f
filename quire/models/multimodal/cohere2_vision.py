"""Command A Vision: tiles through SigLIP, states in squares of 2 x 2 through a gated projector.

Source: model_type "cohere2_vision", https://huggingface.co/CohereLabs/command-a-vision-07-2025;
        transformers modeling_cohere2_vision.py
"""

from __future__ import annotations

from torch import Tensor, nn

from quire.kernels.framework import lazy_fusion
from quire.layers import Linear, gated_act
from quire.models.multimodal._base import Hf, field_of
from quire.models.multimodal._towers import TileEncoder, build_siglip, text_hidden, tower_weights

VISION = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 27,
    "num_attention_heads": 12,
    "image_size": 512,
}
"""What a vision section leaves out."""


class HalvedProjector(nn.Module):
    """linear_2(silu(gate) * up) of up and gate, the halves of linear_1(x)."""

    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.linear_1 = Linear(inputs, inner, bias=True)
        self.linear_2 = Linear(inner // 2, outputs, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear_1(x)
        lazy_fusion.flush()
        up, gate = x.chunk(2, dim=-1)
        return self.linear_2(gated_act(gate, up, "silu"))


class Encoder(TileEncoder):
    skipped = 0

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        self.tower = build_siglip({**VISION, **(hf.get("vision_config") or {})})
        self.factor = field_of(hf, "downsample_factor", int, default=2)
        self.width = text_hidden(hf)
        inner = field_of(hf, "alignment_intermediate_size", int, default=36864)
        inputs = self.tower.config.hidden * self.factor**2
        self.projector = HalvedProjector(inputs, inner, self.width)
        self.weights = tower_weights(self.tower)

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

"""GLM-4-0414 (9B, 32B) and GLM-Z1: GLM-4 with a norm before and after each half of a layer.

Source: model_type "glm4", https://huggingface.co/zai-org/GLM-4-32B-0414; transformers
        modeling_glm4.py
Axes:   T tokens in the step, E hidden
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from quire.layers import AddRMSNorm, RMSNorm
from quire.models import glm, llama
from quire.models._decoder import GatedMLP, spare_names
from quire.models.base import StepInputs

CONVENTIONS = {
    "defaults": {
        "head_dim": 128,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
    }
}

Config = glm.Config


class Layer(nn.Module):
    def __init__(self, c: glm.Config, layer: int) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.self_attn = llama.SelfAttention(c, c.window(layer))
        self.post_self_attn_layernorm = RMSNorm(c.hidden, c.norm_eps)
        self.post_attention_layernorm = AddRMSNorm(c.hidden, c.norm_eps)  # before the MLP
        self.mlp = GatedMLP(c.hidden, c.mlp, c.act)
        self.post_mlp_layernorm = RMSNorm(c.hidden, c.norm_eps)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> tuple[Tensor, Tensor]:
        x, res = self.input_layernorm(x, res)
        x = self.post_self_attn_layernorm(self.self_attn(x, step))
        x, res = self.post_attention_layernorm(x, res)
        return self.post_mlp_layernorm(self.mlp(x)), res


class Model(glm.Model):
    layer_class = Layer

    def __init__(self, c: glm.Config) -> None:
        super().__init__(c)  # GLM-OCR has a layer more, which predicts further tokens
        self.weights = replace(self.weights, absent=spare_names(c.layers, 1))

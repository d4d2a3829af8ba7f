"""OLMo-2: norms after attention and MLP, and a norm over all heads of the queries and of the keys.

Source: model_type "olmo2", https://huggingface.co/allenai/OLMo-2-1124-7B; transformers
        modeling_olmo2.py
Axes:   T tokens in the step, E hidden, H query heads, K kv heads, D head size
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quire.layers import (
    AllHeadsRMSNorm,
    Attention,
    QKVLinear,
    RMSNorm,
    Rope,
    RopeConfig,
    RowLinear,
    add,
)
from quire.models import llama
from quire.models._decoder import Decoder, GatedMLP
from quire.models._rope import rope_of, scaled_max_len
from quire.models.base import Hf, ModelConfig, StepInputs, field_of, sizes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ModelConfig):
    rope: RopeConfig
    bias: bool

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes = sizes_of({"rms_norm_eps": 1e-5, **hf})
        return cls(
            **{**sizes, "max_len": scaled_max_len(hf)},
            rope=rope_of(hf, sizes["head_dim"]),
            bias=field_of(hf, "attention_bias", bool, default=False),
        )


class SelfAttention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(c.hidden, c.heads, c.kv_heads, c.head_dim, c.bias)
        self.o_proj = RowLinear(c.heads * c.head_dim, c.hidden, c.bias)
        self.q_norm = AllHeadsRMSNorm(c.heads, c.head_dim, c.norm_eps)
        self.k_norm = AllHeadsRMSNorm(c.kv_heads, c.head_dim, c.norm_eps, repeat=True)
        self.rope = Rope(c.rope, c.max_len)
        self.attn = Attention(c.heads, c.kv_heads, c.head_dim)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, k, v = self.qkv_proj(x)  # [T, H, D] [T, K, D] [T, K, D]
        q, k = self.rope(self.q_norm(q), self.k_norm(k), step.positions)
        return self.o_proj(self.attn(q, k, v, step.attention))


class Layer(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.norm_eps)
        self.mlp = GatedMLP(c.hidden, c.mlp, c.act)
        self.post_feedforward_layernorm = RMSNorm(c.hidden, c.norm_eps)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> tuple[Tensor, Tensor]:
        x = x if res is None else add(x, res)
        res = add(x, self.post_attention_layernorm(self.self_attn(x, step)))
        return self.post_feedforward_layernorm(self.mlp(res)), res


class Model(Decoder):
    layer_class = Layer
    weights = llama.Model.weights

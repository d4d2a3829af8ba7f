"""Qwen3, dense. Llama with a norm on every query and key head, and no q/k/v bias.

Source: model_type "qwen3", https://huggingface.co/Qwen/Qwen3-8B; transformers modeling_qwen3.py
Axes:   T tokens in the step, E hidden, F mlp width, H query heads, K kv heads, D head size, V vocab
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quire.layers import (
    AddRMSNorm,
    Attention,
    QKVLinear,
    RMSNorm,
    Rope,
    RopeConfig,
    RowLinear,
)
from quire.models._decoder import Decoder, GatedMLP, PreNormLayer
from quire.models._rope import rope_of, scaled_max_len
from quire.models._windows import read_upper_layer_windows
from quire.models.base import Hf, ModelConfig, StepInputs, Weights, field_of, sizes_of

CONVENTIONS = {"windows": "upper", "windows_on_request": True, "defaults": {"head_dim": 128}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ModelConfig):
    rope: RopeConfig
    bias: bool = False

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes = sizes_of(hf)
        return cls(
            **{**sizes, "max_len": scaled_max_len(hf)},
            rope=rope_of(hf, sizes["head_dim"]),
            bias=field_of(hf, "attention_bias", bool, default=False),
            windows=read_upper_layer_windows(hf, sizes["layers"]),
        )


class SelfAttention(nn.Module):
    def __init__(self, c: Config, window: int | None) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(c.hidden, c.heads, c.kv_heads, c.head_dim, c.bias)
        self.o_proj = RowLinear(c.heads * c.head_dim, c.hidden, c.bias)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.rope = Rope(c.rope, c.max_len)
        self.attn = Attention(c.heads, c.kv_heads, c.head_dim, window=window)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, k, v = self.qkv_proj(x)  # [T, H, D] [T, K, D] [T, K, D]
        q, k = self.rope(self.q_norm(q), self.k_norm(k), step.positions)
        return self.o_proj(self.attn(q, k, v, step.attention))


class Layer(PreNormLayer):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.self_attn = SelfAttention(c, c.window(layer))
        self.post_attention_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mlp = GatedMLP(c.hidden, c.mlp, c.act)


class Model(Decoder):
    layer_class = Layer
    weights = Weights(
        strip=("model.",),
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        ignore=("*.rotary_emb.inv_freq",),
        tie={"lm_head": "embed_tokens"},
    )

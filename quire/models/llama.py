"""Llama, 1 to 3.x: RMSNorm before, rotary positions, gated MLP, grouped queries.

The block that Mistral, Qwen2 and Phi-3 share; their files only read configs.

Source: model_type "llama", https://huggingface.co/meta-llama; transformers modeling_llama.py
Axes:   T tokens in the step, E hidden, F mlp width, H query heads, K kv heads, D head size, V vocab
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from quire.layers import (
    AddRMSNorm,
    Attention,
    QKVLinear,
    Rope,
    RopeConfig,
    RowLinear,
)
from quire.models._decoder import Decoder, GatedMLP, PreNormLayer
from quire.models._rope import rotary_sizes_of
from quire.models.base import Hf, ModelConfig, StepInputs, Weights, field_of

CONVENTIONS = {
    "nested_defaults": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ModelConfig):
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    scale: float | None = None  # of attention scores; None: 1 / sqrt(D)
    interleaved: bool = False  # rotary pairs are neighbours, not halves

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        bias = field_of(hf, "attention_bias", bool, default=False)
        return cls(
            **rotary_sizes_of(hf),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=field_of(hf, "mlp_bias", bool, default=False),
        )


class SelfAttention(nn.Module):
    """Subclasses add norms of queries and keys, or take the rotation away."""

    def __init__(self, c: Config, window: int | None) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(c.hidden, c.heads, c.kv_heads, c.head_dim, c.qkv_bias)
        self.o_proj = RowLinear(c.heads * c.head_dim, c.hidden, c.o_bias)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        self.rope: Rope | None = Rope(c.rope, c.max_len, interleaved=c.interleaved)
        self.attn = Attention(c.heads, c.kv_heads, c.head_dim, scale=c.scale, window=window)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, k, v = self.qkv_proj(x)  # [T, H, D] [T, K, D] [T, K, D]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            q, k = self.rope(q, k, step.positions)
        return self.o_proj(self.attn(q, k, v, step.attention))


class Layer(PreNormLayer):
    attention_class: type[SelfAttention] = SelfAttention

    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.self_attn = self.attention_class(c, c.window(layer))
        self.post_attention_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mlp = GatedMLP(c.hidden, c.mlp, c.act, c.mlp_bias)


class Model(Decoder):
    layer_class: ClassVar[Any] = Layer
    weights = Weights(
        strip=("model.",),
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        ignore=("*.rotary_emb.inv_freq",),
        tie={"lm_head": "embed_tokens"},
    )

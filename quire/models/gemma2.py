"""Gemma-2: norms before and after each half, every other layer windowed, soft-capped scores.

Norm weights are stored as differences from one; embeddings are scaled by sqrt(E).

Source: model_type "gemma2", https://huggingface.co/google/gemma-2-2b; transformers
        modeling_gemma2.py
Axes:   T tokens in the step, E hidden, F mlp width, H query heads, K kv heads, D head size, V vocab
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
from quire.models._decoder import Decoder, GatedMLP
from quire.models._rope import rotary_sizes_of
from quire.models._windows import read_periodic_windows
from quire.models.base import Hf, ModelConfig, StepInputs, Weights, field_of

CONVENTIONS = {
    "windows": "periodic",
    "window": 4096,
    "period": 2,
    "tied": True,
    "defaults": {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ModelConfig):
    rope: RopeConfig
    scale: float  # of attention scores
    bias: bool
    attn_softcap: float | None

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(hf, "use_bidirectional_attention", bool, default=False, one_of={False})
        sizes = rotary_sizes_of(hf, act="hidden_activation", tied=True)
        return cls(
            **sizes,
            embed_scale=sizes["hidden"] ** 0.5,
            norm_offset=1.0,
            windows=read_periodic_windows(hf, sizes["layers"], window=4096, period=2),
            scale=field_of(hf, "query_pre_attn_scalar", float, default=256.0) ** -0.5,
            bias=field_of(hf, "attention_bias", bool, default=False),
            attn_softcap=field_of(hf, "attn_logit_softcapping", float, default=None),
            logit_softcap=field_of(hf, "final_logit_softcapping", float, default=None),
        )


class SelfAttention(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(c.hidden, c.heads, c.kv_heads, c.head_dim, c.bias)
        self.o_proj = RowLinear(c.heads * c.head_dim, c.hidden, c.bias)
        self.rope = Rope(c.rope, c.max_len)
        self.attn = Attention(
            c.heads,
            c.kv_heads,
            c.head_dim,
            scale=c.scale,
            window=c.window(layer),
            softcap=c.attn_softcap,
        )

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, k, v = self.qkv_proj(x)  # [T, H, D] [T, K, D] [T, K, D]
        q, k = self.rope(q, k, step.positions)
        return self.o_proj(self.attn(q, k, v, step.attention))


class Layer(nn.Module):
    """A layer with a norm before and after each half. Gemma-3 replaces the attention."""

    attention_class: ClassVar[type[nn.Module]] = SelfAttention

    def __init__(self, c: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps, offset=1.0)
        self.self_attn = self.attention_class(c, layer)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.norm_eps, offset=1.0)
        self.pre_feedforward_layernorm = AddRMSNorm(c.hidden, c.norm_eps, offset=1.0)
        self.mlp = GatedMLP(c.hidden, c.mlp, c.act)
        self.post_feedforward_layernorm = RMSNorm(c.hidden, c.norm_eps, offset=1.0)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> tuple[Tensor, Tensor]:
        x, res = self.input_layernorm(x, res)
        x = self.post_attention_layernorm(self.self_attn(x, step))
        x, res = self.pre_feedforward_layernorm(x, res)
        return self.post_feedforward_layernorm(self.mlp(x)), res


class Model(Decoder):
    layer_class = Layer
    weights = Weights(
        strip=("model.",),
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        ignore=("*.rotary_emb.inv_freq",),
        tie={"lm_head": "embed_tokens"},
    )

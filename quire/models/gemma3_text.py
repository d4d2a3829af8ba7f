"""Gemma-3, text: five windowed layers to one full, each kind with its own rotary base; q, k norms.

Norm weights are stored as differences from one; embeddings are scaled by sqrt(E). The published
config files leave out what equals the defaults of the family. EmbeddingGemma attends in both
directions.

Source: model_type "gemma3_text", https://huggingface.co/google/gemma-3-1b-it; transformers
        modeling_gemma3.py
Axes:   T tokens in the step, E hidden, F mlp width, H query heads, K kv heads, D head size, V vocab
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quire.layers import (
    Attention,
    QKVLinear,
    RMSNorm,
    Rope,
    RopeConfig,
    RowLinear,
)
from quire.models import gemma2
from quire.models._rope import rope_of, section_of
from quire.models._windows import FULL, SLIDING, read_periodic_windows
from quire.models.base import Hf, ModelConfig, StepInputs, field_of, sizes_of

CONVENTIONS = {
    "windows": "periodic",
    "window": 4096,
    "period": 6,
    "tied": True,
    "scaling_extends": False,
    "defaults": {
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rope_local_base_freq": 10000.0,
    },
    "nested_defaults": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ModelConfig):
    rope: RopeConfig  # of layers with full attention
    local_rope: RopeConfig  # of layers with a window
    scale: float  # of attention scores
    bias: bool

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        both = field_of(hf, "use_bidirectional_attention", bool, default=False)
        if hf.get("attn_logit_softcapping") is not None:  # transformers ignores it too
            field_of(hf, "attn_logit_softcapping", float, one_of={None})
        sizes = sizes_of(hf, act="hidden_activation", tied=True)
        period = field_of(hf, "sliding_window_pattern", int, default=6)
        windows = read_periodic_windows(hf, sizes["layers"], window=4096, period=period)
        return cls(
            **sizes,
            bidirectional=both,
            embed_scale=sizes["hidden"] ** 0.5,
            norm_offset=1.0,
            # in both directions the stated window has a half on each side
            windows=tuple(w // 2 + 1 if w and both else w for w in windows),
            rope=_rope(hf, FULL, sizes["head_dim"]),
            local_rope=_rope(hf, SLIDING, sizes["head_dim"]),
            scale=field_of(hf, "query_pre_attn_scalar", float, default=256.0) ** -0.5,
            bias=field_of(hf, "attention_bias", bool, default=False),
            logit_softcap=field_of(hf, "final_logit_softcapping", float, default=None),
        )


def _rope(hf: Hf, kind: str, head_dim: int) -> RopeConfig:
    """Older files: rope_scaling is for full layers, windowed ones have rope_local_base_freq."""
    if kind == FULL:
        return rope_of(hf, head_dim, theta=1e6, section=section_of(hf, FULL))
    theta = field_of(hf, "rope_local_base_freq", float, default=10000.0)
    hf = {**hf, "rope_theta": theta, "rope_scaling": None}
    return rope_of(hf, head_dim, section=section_of(hf, SLIDING))


class SelfAttention(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(c.hidden, c.heads, c.kv_heads, c.head_dim, c.bias)
        self.o_proj = RowLinear(c.heads * c.head_dim, c.hidden, c.bias)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps, offset=1.0)
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps, offset=1.0)
        self.rope = Rope(c.rope if c.windows[layer] is None else c.local_rope, c.max_len)
        self.attn = Attention(
            c.heads, c.kv_heads, c.head_dim, scale=c.scale, window=c.window(layer)
        )

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, k, v = self.qkv_proj(x)  # [T, H, D] [T, K, D] [T, K, D]
        q, k = self.rope(self.q_norm(q), self.k_norm(k), step.positions)
        return self.o_proj(self.attn(q, k, v, step.attention))


class Layer(gemma2.Layer):
    attention_class = SelfAttention


class Model(gemma2.Model):
    layer_class = Layer

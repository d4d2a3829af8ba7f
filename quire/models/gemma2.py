"""Gemma-2: norms before and after each half, every other layer windowed, soft-capped scores.

Norm weights are stored as differences from one; embeddings are scaled by sqrt(E).

Source: model_type "gemma2", https://huggingface.co/google/gemma-2-2b; transformers
        modeling_gemma2.py
Axes:   T tokens in the step, E hidden, F mlp width, H query heads, K kv heads, D head size, V vocab
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quire.layers import (
    AddRMSNorm,
    Attention,
    ColumnLinear,
    Embedding,
    GatedActivation,
    LMHead,
    QKVLinear,
    RMSNorm,
    Rope,
    RopeConfig,
    RowLinear,
    softcap,
)
from quire.models._rope import rope_of, scaled_max_len
from quire.models._windows import read_periodic_windows
from quire.models.base import Hf, ModelConfig, StepInputs, Weights, field_of, sizes_of

DEFAULTS = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ModelConfig):
    rope: RopeConfig
    scale: float  # of attention scores
    bias: bool
    attn_softcap: float | None
    logit_softcap: float | None

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(hf, "use_bidirectional_attention", bool, default=False, one_of={False})
        hf = {**DEFAULTS, **hf}
        sizes = sizes_of(hf, act="hidden_activation", tied=True)
        return cls(
            **{**sizes, "max_len": scaled_max_len(hf)},
            windows=read_periodic_windows(hf, sizes["layers"], window=4096, period=2),
            rope=rope_of(hf, sizes["head_dim"]),
            scale=field_of(hf, "query_pre_attn_scalar", float, default=256.0) ** -0.5,
            bias=field_of(hf, "attention_bias", bool, default=False),
            attn_softcap=field_of(hf, "attn_logit_softcapping", float, default=None),
            logit_softcap=field_of(hf, "final_logit_softcapping", float, default=None),
        )


class SelfAttention(nn.Module):
    def __init__(self, c: Config, window: int | None) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(c.hidden, c.heads, c.kv_heads, c.head_dim, c.bias)
        self.o_proj = RowLinear(c.heads * c.head_dim, c.hidden, c.bias)
        self.rope = Rope(c.rope, c.max_len)
        self.attn = Attention(
            c.heads, c.kv_heads, c.head_dim, scale=c.scale, window=window, softcap=c.attn_softcap
        )

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, k, v = self.qkv_proj(x)  # [T, H, D] [T, K, D] [T, K, D]
        q, k = self.rope(q, k, step.positions)
        return self.o_proj(self.attn(q, k, v, step.attention))


class MLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_up_proj = ColumnLinear(c.hidden, (c.mlp, c.mlp))
        self.act = GatedActivation(c.act)
        self.down_proj = RowLinear(c.mlp, c.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x)))  # [T, 2F] -> [T, F] -> [T, E]


class Layer(nn.Module):
    def __init__(self, c: Config, window: int | None) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps, offset=1.0)
        self.self_attn = SelfAttention(c, window)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.norm_eps, offset=1.0)
        self.pre_feedforward_layernorm = AddRMSNorm(c.hidden, c.norm_eps, offset=1.0)
        self.mlp = MLP(c)
        self.post_feedforward_layernorm = RMSNorm(c.hidden, c.norm_eps, offset=1.0)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> tuple[Tensor, Tensor]:
        x, res = self.input_layernorm(x, res)
        x = self.post_attention_layernorm(self.self_attn(x, step))
        x, res = self.pre_feedforward_layernorm(x, res)
        return self.post_feedforward_layernorm(self.mlp(x)), res


class Model(nn.Module):
    weights = Weights(
        strip=("model.",),
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        ignore=("*.rotary_emb.inv_freq",),
        tie={"lm_head": "embed_tokens"},
    )

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.cap = c.logit_softcap
        self.embed_tokens = Embedding(c.vocab, c.hidden, scale=c.hidden**0.5)
        self.layers = nn.ModuleList(Layer(c, c.window(i)) for i in range(c.layers))
        self.norm = AddRMSNorm(c.hidden, c.norm_eps, offset=1.0)
        self.lm_head = LMHead(c.vocab, c.hidden)

    def forward(self, step: StepInputs) -> Tensor:
        """Hidden states of every token in the step: [T, E]."""
        x, res = self.embed_tokens(step.token_ids), None
        for layer in self.layers:
            x, res = layer(x, res, step)
        return self.norm(x, res)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, E] -> [R, V] for the rows that are sampled."""
        logits = self.lm_head(hidden)
        return logits if self.cap is None else softcap(logits, self.cap)

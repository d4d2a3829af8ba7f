"""Persimmon: norms of queries and keys, half of each head rotated, an MLP of squared ReLU.

One tensor has q, k, v of each head in turn. It is also the text half of Fuyu.

Source: model_type "persimmon", https://huggingface.co/adept/persimmon-8b-base; transformers
        modeling_persimmon.py
Axes:   T tokens in the step, H heads, D head size
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.layers import LayerNorm, gated_act
from quire.models._decoder import PlainMLP
from quire.models._plain import (
    PlainAttention,
    PlainConfig,
    PlainDecoder,
    PlainLayer,
    grouped_head_order,
    plain_rotary_sizes,
)
from quire.models.base import Hf, StepInputs, Weights, field_of

CONVENTIONS = {
    "mlp_kind": "plain",
    "defaults": {
        "hidden_act": "relu2",
        "partial_rotary_factor": 0.5,
        "layer_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
    },
    "nested_defaults": {
        "vocab_size": 262_144,
        "hidden_size": 4096,
        "intermediate_size": 16_384,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "max_position_embeddings": 16_384,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PlainConfig):
    qk_norms: bool
    squared: bool  # the activation is the square of ReLU

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        squared = hf.get("hidden_act") == "relu2"
        sizes = plain_rotary_sizes(
            {**hf, **({"hidden_act": "relu"} if squared else {})}, tied=False
        )
        return cls(
            **sizes,
            squared=squared,
            head_order=grouped_head_order(sizes["heads"], sizes["kv_heads"]),
            qk_norms=field_of(hf, "qk_layernorm", bool, default=True),
        )


class SelfAttention(PlainAttention):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__(c, layer)
        self.q_norm = LayerNorm(c.head_dim, c.norm_eps) if c.qk_norms else None
        self.k_norm = LayerNorm(c.head_dim, c.norm_eps) if c.qk_norms else None

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, k, v = self.qkv_proj(x)  # each [T, H, D]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        assert self.rope is not None
        q, k = self.rope(q, k, step.positions)
        return self.out_proj(self.attn(q, k, v, step.attention))


class SquaredMLP(PlainMLP):
    """The square of ReLU is ReLU times its input."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        return self.c_proj(gated_act(x, x, "relu"))


class Layer(PlainLayer):
    attention_class = SelfAttention

    def __init__(self, c: Config, layer: int) -> None:
        super().__init__(c, layer)
        if c.squared:
            self.mlp = SquaredMLP(c.hidden, c.mlp, c.act)


class Model(PlainDecoder):
    layer_class = Layer
    weights = Weights(
        strip=("model.",),
        rename={
            "input_layernorm": "norm_1",
            "self_attn": "attn",
            "query_key_value": "qkv_proj",
            "dense": "out_proj",
            "q_layernorm": "q_norm",
            "k_layernorm": "k_norm",
            "post_attention_layernorm": "norm_2",
            "dense_h_to_4h": "c_fc",
            "dense_4h_to_h": "c_proj",
            "final_layernorm": "norm",
        },
        ignore=("*.rotary_emb.inv_freq",),
        tie={"lm_head": "embed_tokens"},
    )

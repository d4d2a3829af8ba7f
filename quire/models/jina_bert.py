"""Jina embeddings v2: BERT with ALiBi in both directions and a gated MLP.

Their config.json has the model type "bert". Those for code and for two languages norm queries and
keys over all heads, and have a third norm in a layer.

Source: position_embedding_type "alibi", https://huggingface.co/jinaai/jina-embeddings-v2-base-en
and jina-embeddings-v2-base-code, whose Python code is in other repositories
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.layers import AddLayerNorm, ColumnLinear, LayerNorm
from quire.models._plain import alibi_slopes
from quire.models._rotary_encoder import (
    EncoderMLP,
    RotaryEncoder,
    RotaryEncoderConfig,
    RotaryEncoderLayer,
    RotarySelfAttention,
    rotary_encoder_sizes,
)
from quire.models.base import CarriedStates, Hf, StepInputs, Weights, field_of

CONVENTIONS = {
    "positions_kind": "alibi",
    "tied": True,
    "bidirectional": True,
    "defaults": {"type_vocab_size": 2},
}

GATES = {"geglu": "gelu", "reglu": "relu"}
"""feed_forward_type -> activation of the gate."""
QK_NORM_CODE = "qk-post-norm"
"""Part of the name of the repository with the code of models that norm queries and keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RotaryEncoderConfig):
    qk_norm: bool

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(hf, "position_embedding_type", str, one_of={"alibi"})
        kind = field_of(hf, "feed_forward_type", str, default="geglu", one_of=GATES)
        sizes = rotary_encoder_sizes(hf, theta=None)
        code = f"{hf.get('auto_map')} {hf.get('_name_or_path')}"
        return cls(
            **sizes | {"act": GATES[kind]},
            alibi=alibi_slopes(sizes["heads"]),
            qk_norm=QK_NORM_CODE in code,
        )


class SelfAttention(RotarySelfAttention):
    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.layer_norm_q = LayerNorm(c.hidden, c.norm_eps) if c.qk_norm else None
        self.layer_norm_k = LayerNorm(c.hidden, c.norm_eps) if c.qk_norm else None

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, k, v = self.qkv_proj(x)  # each [T, H, D]
        if self.layer_norm_q is not None and self.layer_norm_k is not None:
            q = self.layer_norm_q(q.view(len(q), -1)).view(q.shape)
            k = self.layer_norm_k(k.view(len(k), -1)).view(k.shape)
        return self.out_proj(self.attn(q, k, v, step.attention))


class GateUpMLP(EncoderMLP):
    up_class = ColumnLinear  # a checkpoint's one tensor has the gate rows first


class Layer(RotaryEncoderLayer):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__(c, layer)
        self.self_attn = SelfAttention(c)
        self.layer_norm_1 = AddLayerNorm(c.hidden, c.norm_eps) if c.qk_norm else None
        if not c.qk_norm:
            self.mlp = GateUpMLP(c)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> CarriedStates:
        y, _ = self.self_attn_layer_norm(self.self_attn(x, step), x)
        if self.layer_norm_1 is not None:
            y, _ = self.layer_norm_1(y, x)
        return self.final_layer_norm(self.mlp(y), y)[0], None


class Model(RotaryEncoder):
    layer_class = Layer
    weights = Weights(
        strip=("bert.",),
        paths={
            "embeddings.word_embeddings": "embed_tokens",
            "embeddings.token_type_embeddings": "embed_positions",
            "embeddings.LayerNorm": "embed_norm",
            "encoder.layer": "layers",
            "attention.self": "self_attn",
            "attention.output.dense": "self_attn.out_proj",
            "attention.output.LayerNorm": "self_attn_layer_norm",
            "mlp.gated_layers": "mlp.gate_up_proj",
            "mlp.up_gated_layer": "mlp.gate_up_proj",
            "mlp.wo": "mlp.down_proj",
            "mlp.down_layer": "mlp.down_proj",
            "mlp.layernorm": "final_layer_norm",
            "layer_norm_2": "final_layer_norm",
            "pooler.dense": "head.dense",
            "classifier": "head.out_proj",
            "cls.predictions.transform.dense": "lm_transform.dense",
            "cls.predictions.transform.LayerNorm": "lm_transform.norm",
            "cls.predictions.decoder": "lm_head",
            "cls.predictions": "lm_bias",
        },
        fuse={"qkv_proj": ("query", "key", "value")},
        ignore=("*embeddings.position_ids", "*encoder.alibi", "cls.predictions.decoder.bias"),
        tie={"lm_head": "embed_tokens"},
    )

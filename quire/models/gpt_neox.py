"""GPT-NeoX and Pythia: part of each head rotated, attention beside the MLP on norms of their own.

One tensor has q, k, v of each head in turn.

Source: model_type "gpt_neox", https://huggingface.co/EleutherAI/pythia-6.9b; transformers
        modeling_gpt_neox.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.models._plain import PlainConfig, PlainDecoder, grouped_head_order, plain_rotary_sizes
from quire.models.base import Hf, Weights, field_of

CONVENTIONS = {"mlp_kind": "plain", "defaults": {"rotary_pct": 0.25, "hidden_act": "gelu"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PlainConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
        sizes = plain_rotary_sizes(
            {**hf, **{usual: hf.get(name) for usual, name in names.items()}}, tied=False
        )
        bias = field_of(hf, "attention_bias", bool, default=True)
        return cls(
            **sizes,
            qkv_bias=bias,
            out_bias=bias,
            parallel=field_of(hf, "use_parallel_residual", bool, default=True),
            head_order=grouped_head_order(sizes["heads"], sizes["kv_heads"]),
        )


class Model(PlainDecoder):
    weights = Weights(
        strip=("gpt_neox.",),
        rename={
            "embed_in": "embed_tokens",
            "input_layernorm": "norm_1",
            "attention": "attn",
            "query_key_value": "qkv_proj",
            "dense": "out_proj",
            "post_attention_layernorm": "norm_2",
            "dense_h_to_4h": "c_fc",
            "dense_4h_to_h": "c_proj",
            "final_layer_norm": "norm",
            "embed_out": "lm_head",
        },
        ignore=("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"),
        tie={"lm_head": "embed_tokens"},
    )

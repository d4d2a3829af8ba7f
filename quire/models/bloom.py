"""Bloom: ALiBi, a norm after the embedding, q, k, v of each head side by side in one tensor.

Source: model_type "bloom", https://huggingface.co/bigscience/bloom; transformers modeling_bloom.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.models._plain import (
    PlainConfig,
    PlainDecoder,
    alibi_slopes,
    grouped_head_order,
    plain_sizes,
)
from quire.models.base import Hf, Weights, field_of

SERVED_LEN = 2048  # if config.json has no length: ALiBi has no table that ends
FIXED = {"n_inner": None, "hidden_act": "gelu_new"}  # config.json cannot set them

CONVENTIONS = {"mlp_kind": "plain", "positions_kind": "alibi", "tied": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PlainConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(
            hf, "apply_residual_connection_post_layernorm", bool, default=False, one_of={False}
        )
        sizes = plain_sizes({"seq_length": SERVED_LEN, **hf, **FIXED})
        return cls(
            **sizes,
            embed_norm=True,
            alibi=alibi_slopes(sizes["heads"]),
            head_order=grouped_head_order(sizes["heads"], sizes["heads"]),
        )


class Model(PlainDecoder):
    weights = Weights(
        strip=("transformer.",),
        rename={
            "word_embeddings": "embed_tokens",
            "word_embeddings_layernorm": "embed_norm",
            "h": "layers",
            "ln_f": "norm",
            "input_layernorm": "norm_1",
            "self_attention": "attn",
            "query_key_value": "qkv_proj",
            "dense": "out_proj",
            "post_attention_layernorm": "norm_2",
            "dense_h_to_4h": "c_fc",
            "dense_4h_to_h": "c_proj",
        },
        tie={"lm_head": "embed_tokens"},
    )

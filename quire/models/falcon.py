"""Falcon: rotary positions or ALiBi, attention beside the MLP or before it, few KV heads or all.

One tensor has q, k, v, in the same order for all three kinds: for each KV head its queries, the key
and the value. transformers rounds ALiBi's product of slope and position to bfloat16; here it is
exact.

Source: model_type "falcon", https://huggingface.co/tiiuae/falcon-7b (one KV head), falcon-40b
        (new_decoder_architecture), falcon-rw-1b (ALiBi); transformers modeling_falcon.py
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
from quire.models._rope import rope_of, scaled_max_len
from quire.models.base import Hf, Weights, field_of

CONVENTIONS = {
    "mlp_kind": "plain",
    "tied": True,
    "defaults": {"max_position_embeddings": 2048, "activation": "gelu", "multi_query": True},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PlainConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        grouped = field_of(hf, "new_decoder_architecture", bool, default=False)
        if grouped:
            field_of(hf, "parallel_attn", bool, default=True, one_of={True})
            kv_heads: int | None = field_of(hf, "num_kv_heads", int, default=None)
            norms = field_of(hf, "num_ln_in_parallel_attn", int, default=2, one_of={1, 2})
        else:
            kv_heads = 1 if field_of(hf, "multi_query", bool) else None
            field_of(hf, "num_ln_in_parallel_attn", int, default=1, one_of={1})
            norms = 1 if field_of(hf, "parallel_attn", bool, default=True) else 2
        parallel = grouped or norms == 1
        bias = field_of(hf, "bias", bool, default=False)
        hf = {**hf, "num_key_value_heads": kv_heads, "head_dim": None}
        sizes = plain_sizes(hf)
        if field_of(hf, "alibi", bool, default=False):
            by = sizes["head_dim"] ** -0.5  # the bias is scaled with the scores
            sizes["alibi"] = tuple(slope * by for slope in alibi_slopes(sizes["heads"]))
        else:
            sizes["max_len"] = scaled_max_len(hf)
            sizes["rope"] = rope_of(hf, sizes["head_dim"])
        return cls(
            **sizes,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            parallel=parallel,
            norms=norms,
            head_order=grouped_head_order(sizes["heads"], sizes["kv_heads"]),
        )


class Model(PlainDecoder):
    weights = Weights(
        strip=("transformer.",),
        rename={
            "word_embeddings": "embed_tokens",
            "h": "layers",
            "ln_f": "norm",
            "input_layernorm": "norm_1",
            "ln_attn": "norm_1",
            "self_attention": "attn",
            "query_key_value": "qkv_proj",
            "dense": "out_proj",
            "post_attention_layernorm": "norm_2",
            "ln_mlp": "norm_2",
            "dense_h_to_4h": "c_fc",
            "dense_4h_to_h": "c_proj",
        },
        ignore=("*.inv_freq",),
        tie={"lm_head": "embed_tokens"},
    )

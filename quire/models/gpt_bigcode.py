"""GPT-BigCode (StarCoder, SantaCoder): GPT-2 with one KV head for all queries, or one for each.

Source: model_type "gpt_bigcode", https://huggingface.co/bigcode/gpt_bigcode-santacoder;
        transformers modeling_gpt_bigcode.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.models import gpt2
from quire.models._plain import PlainConfig, PlainDecoder, grouped_head_order, plain_sizes
from quire.models.base import Hf, Weights, field_of

CONVENTIONS = {
    "mlp_kind": "plain",
    "positions_kind": "learned",
    "tied": True,
    "defaults": {
        "n_positions": 1024,
        "activation_function": "gelu_pytorch_tanh",
        "multi_query": True,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PlainConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(hf, "add_cross_attention", bool, default=False, one_of={False})
        one = field_of(hf, "multi_query", bool)
        hf = {**hf, "num_key_value_heads": 1 if one else None}
        sizes = plain_sizes(hf)
        scaled = field_of(hf, "scale_attn_weights", bool, default=True)
        return cls(
            **sizes,
            positions=sizes["max_len"],
            scales=() if scaled else (1.0,) * sizes["layers"],
            head_order=grouped_head_order(sizes["heads"], sizes["kv_heads"]),
        )


class Model(PlainDecoder):
    weights = Weights(
        strip=("transformer.",),
        rename=gpt2.Model.weights.rename,
        ignore=("bias", "*.attn.bias", "*.attn.masked_bias"),  # causal masks
        tie={"lm_head": "embed_tokens"},
    )

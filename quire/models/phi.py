"""Phi-1, Phi-1.5 and Phi-2: part of each head rotated, attention beside the MLP, biases everywhere.

Source: model_type "phi", https://huggingface.co/microsoft/phi-2; transformers modeling_phi.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.models._plain import PlainConfig, PlainDecoder, plain_rotary_sizes
from quire.models.base import Hf, Weights, field_of

CONVENTIONS = {
    "mlp_kind": "plain",
    "defaults": {"partial_rotary_factor": 0.5, "hidden_act": "gelu_new"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PlainConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(hf, "qk_layernorm", bool, default=False, one_of=(False,))
        field_of(hf, "tie_word_embeddings", bool, default=False, one_of=(False,))
        sizes = plain_rotary_sizes(hf, tied=False)
        return cls(**sizes, parallel=True, norms=1, head_bias=True)


class Model(PlainDecoder):
    weights = Weights(
        strip=("model.",),
        rename={
            "input_layernorm": "norm_1",
            "self_attn": "attn",
            "dense": "out_proj",
            "fc1": "c_fc",
            "fc2": "c_proj",
            "final_layernorm": "norm",
        },
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
        ignore=("*.rotary_emb.inv_freq",),
    )

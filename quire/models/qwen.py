"""Qwen 1, with or without the tower of Qwen-VL: Llama with biases on q, k, v, and names of its own.

Lengths beyond the trained one are not served: the original changes rotary angles and scales queries
by the length at hand there.

Source: model_type "qwen", https://huggingface.co/Qwen/Qwen-VL-Chat, whose Python code is in the
checkpoint
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.models import llama
from quire.models._rope import rotary_sizes_of
from quire.models.base import Hf, Weights, field_of

CONVENTIONS = {
    "names": {
        "kv_channels": "head_dim",
        "layer_norm_epsilon": "rms_norm_eps",
        "rotary_emb_base": "rope_theta",
        "rotary_pct": "partial_rotary_factor",
    },
    "defaults": {"seq_length": 2048},
    "mlp_joined": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(hf, "no_bias", bool, default=True, one_of={True})
        field_of(hf, "scale_attn_weights", bool, default=True, one_of={True})
        length = field_of(hf, "seq_length", int)
        mlp = field_of(hf, "intermediate_size", int) // 2  # of both matrices together
        changed = {"intermediate_size": mlp, "max_position_embeddings": length}
        return cls(**rotary_sizes_of({**hf, **changed}), qkv_bias=True)


class Model(llama.Model):
    weights = Weights(
        strip=("transformer.",),
        rename={
            "wte": "embed_tokens",
            "h": "layers",
            "ln_f": "norm",
            "ln_1": "input_layernorm",
            "ln_2": "post_attention_layernorm",
            "attn": "self_attn",
            "attn.c_attn": "qkv_proj",
            "attn.c_proj": "o_proj",
            "mlp.c_proj": "down_proj",
        },
        fuse={"gate_up_proj": ("w2", "w1")},
        ignore=("*.rotary_emb.inv_freq", "*.attn.bias", "*.attn.masked_bias"),
        tie={"lm_head": "embed_tokens"},
    )

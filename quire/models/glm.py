"""GLM-4 (9B): Llama with neighbouring rotary pairs on half of each head, gate and up in one tensor.

Source: model_type "glm", https://huggingface.co/zai-org/glm-4-9b-chat-hf; transformers
        modeling_glm.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.models import llama
from quire.models._rope import rotary_sizes_of
from quire.models.base import Hf, field_of

CONVENTIONS = {
    "defaults": {
        "head_dim": 128,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
    }
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        bias = field_of(hf, "attention_bias", bool, default=True)
        return cls(**rotary_sizes_of(hf), interleaved=True, qkv_bias=bias)


class Model(llama.Model):
    weights = replace(llama.Model.weights, fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")})

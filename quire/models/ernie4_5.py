"""ERNIE 4.5, dense: Llama with neighbouring rotary pairs.

Source: model_type "ernie4_5", https://huggingface.co/baidu/ERNIE-4.5-0.3B-PT; transformers
        modeling_ernie4_5.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.models import llama
from quire.models._rope import rotary_sizes_of
from quire.models.base import Hf, field_of

Model = llama.Model

CONVENTIONS = {
    "tied": True,
    "defaults": {
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes = rotary_sizes_of(hf, tied=True)
        bias = field_of(hf, "use_bias", bool, default=False)
        return cls(**sizes, interleaved=True, qkv_bias=bias, o_bias=bias, mlp_bias=bias)

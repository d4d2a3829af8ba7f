"""Seed-OSS: Llama with biases on q, k, v but not on the output projection.

Source: model_type "seed_oss", https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct;
        transformers modeling_seed_oss.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.models import llama
from quire.models._rope import rotary_sizes_of
from quire.models.base import Hf, field_of

Model = llama.Model

CONVENTIONS = {"defaults": {"head_dim": 128}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        return cls(
            **rotary_sizes_of(hf),
            qkv_bias=field_of(hf, "attention_bias", bool, default=True),
            o_bias=field_of(hf, "attention_out_bias", bool, default=False),
            mlp_bias=field_of(hf, "mlp_bias", bool, default=False),
        )

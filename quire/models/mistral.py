"""Mistral: Llama with a sliding window in every layer, if at all.

Source: model_type "mistral", https://huggingface.co/mistralai; transformers modeling_mistral.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.models import llama
from quire.models._rope import rotary_sizes_of
from quire.models._windows import read_uniform_windows
from quire.models.base import Hf

Model = llama.Model

CONVENTIONS = {
    "nested_defaults": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes = rotary_sizes_of(hf)
        return cls(
            **sizes,
            windows=read_uniform_windows(hf, sizes["layers"]),
        )

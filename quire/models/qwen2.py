"""Qwen2 and Qwen2.5: Llama with biases on q, k, v, and optionally a window in its upper layers.

Source: model_type "qwen2", https://huggingface.co/Qwen/Qwen2.5-7B; transformers modeling_qwen2.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.models import llama
from quire.models._rope import rotary_sizes_of
from quire.models._windows import read_upper_layer_windows
from quire.models.base import Hf

CONVENTIONS = {
    "windows": "upper",
    "windows_on_request": True,
    "nested_defaults": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes = rotary_sizes_of(hf)
        return cls(
            **sizes,
            qkv_bias=True,
            windows=read_upper_layer_windows(hf, sizes["layers"]),
        )


class Model(llama.Model):
    """MiMo's checkpoints also have layers that predict further tokens (quire.models.drafters)."""

    weights = replace(
        llama.Model.weights, ignore=(*llama.Model.weights.ignore, "model.mtp_layers.*")
    )

"""Gemma 1: Llama's block with norm weights stored as differences from one, and scaled embeddings.

Source: model_type "gemma", https://huggingface.co/google/gemma-2b; transformers modeling_gemma.py
Axes:   E hidden
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.layers import AddRMSNorm
from quire.models import llama
from quire.models._rope import rotary_sizes_of
from quire.models.base import Hf, field_of

CONVENTIONS = {
    "tied": True,
    "defaults": {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh"},
    "nested_defaults": {
        "vocab_size": 257_152,
        "hidden_size": 2048,
        "intermediate_size": 16_384,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "max_position_embeddings": 8192,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(hf, "use_bidirectional_attention", bool, default=False, one_of={False})
        if hf.get("hidden_act") == "gelu":  # so the files say, and the tanh form is meant
            hf = {**hf, "hidden_act": "gelu_pytorch_tanh"}
        sizes = rotary_sizes_of(hf, tied=True)
        bias = field_of(hf, "attention_bias", bool, default=False)
        return cls(
            **sizes,
            embed_scale=sizes["hidden"] ** 0.5,
            norm_offset=1.0,
            qkv_bias=bias,
            o_bias=bias,
        )


class Layer(llama.Layer):
    def __init__(self, c: llama.Config, layer: int) -> None:
        super().__init__(c, layer)
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps, offset=1.0)
        self.post_attention_layernorm = AddRMSNorm(c.hidden, c.norm_eps, offset=1.0)


class Model(llama.Model):
    layer_class = Layer

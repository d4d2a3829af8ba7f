"""Ministral-3: Mistral with yarn, and queries that grow with their position as in Llama-4.

The factor of a query depends on its position alone, so it is part of the queries' rotary table;
keys have a table without it. Up to the length of training it is one, and both tables are equal.

Source: model_type "ministral3", https://huggingface.co/mistralai/Ministral-3-8B-Base-2512;
        transformers modeling_ministral3.py
Axes:   T tokens in the step, E hidden, H query heads, K kv heads, D head size
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from quire.layers import Rope, RopeTemperature
from quire.models import llama, mistral
from quire.models._rope import rotary_sizes_of, section_of
from quire.models._windows import read_uniform_windows
from quire.models.base import Hf, StepInputs

CONVENTIONS = {
    "defaults": {
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "nested_defaults": {
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(mistral.Config):
    temperature: RopeTemperature | None  # None: queries do not grow

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes, part = rotary_sizes_of(hf), section_of(hf)
        beta = part.number("llama_4_scaling_beta", 0.0)
        return cls(
            **sizes,
            windows=read_uniform_windows(hf, sizes["layers"]),
            temperature=RopeTemperature(beta, part.trained_len) if beta else None,
        )


class SelfAttention(llama.SelfAttention):
    def __init__(self, c: Config, window: int | None) -> None:
        super().__init__(c, window)
        self.query_rope: Rope | None = None
        if c.temperature is not None and c.max_len > c.temperature.length:
            self.query_rope = Rope(replace(c.rope, temperature=c.temperature), c.max_len)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        if self.query_rope is None or self.rope is None:
            return super().forward(x, step)
        q, k, v = self.qkv_proj(x)  # [T, H, D] [T, K, D] [T, K, D]
        grown, _ = self.query_rope(q, k[:, :1], step.positions)  # a rotation takes both
        _, k = self.rope(q[:, :1], k, step.positions)
        return self.o_proj(self.attn(grown, k, v, step.attention))


class Layer(llama.Layer):
    attention_class = SelfAttention


class Model(llama.Model):
    layer_class = Layer

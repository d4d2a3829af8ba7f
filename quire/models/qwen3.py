"""Qwen3, dense. Llama with a norm on every query and key head, and no q/k/v bias.

Source: model_type "qwen3", https://huggingface.co/Qwen/Qwen3-8B; transformers modeling_qwen3.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.layers import RMSNorm
from quire.models import llama
from quire.models._rope import rotary_sizes_of
from quire.models._windows import read_upper_layer_windows
from quire.models.base import Hf, field_of

CONVENTIONS = {"windows": "upper", "windows_on_request": True, "defaults": {"head_dim": 128}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes = rotary_sizes_of(hf)
        bias = field_of(hf, "attention_bias", bool, default=False)
        return cls(
            **sizes,
            qkv_bias=bias,
            o_bias=bias,
            windows=read_upper_layer_windows(hf, sizes["layers"]),
        )


class SelfAttention(llama.SelfAttention):
    def __init__(self, c: llama.Config, window: int | None) -> None:
        super().__init__(c, window)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps)


class Layer(llama.Layer):
    attention_class = SelfAttention


class Model(llama.Model):
    layer_class = Layer

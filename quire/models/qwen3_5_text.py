"""Qwen3.5, text: Qwen3-Next with a dense MLP, and projections of the delta nets by kind.

Source: model_type "qwen3_5_text", https://huggingface.co/Qwen/Qwen3.5-27B; transformers
        modeling_qwen3_5.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from quire.layers.recurrent import DeltaNetSizes
from quire.models import llama, qwen3_next
from quire.models._decoder import GatedMLP
from quire.models._recurrent import recurrent_fields
from quire.models._rope import rotary_sizes_of
from quire.models.base import Hf, field_of

CONVENTIONS = {
    "recurrent": "gated_delta_net",
    "recurrent_layers": "interval",
    "defaults": {
        "mrope_interleaved": True,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    delta: DeltaNetSizes
    by_head: bool = False

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        bias = field_of(hf, "attention_bias", bool, default=False)
        return cls(
            **rotary_sizes_of(hf),
            **recurrent_fields(hf),
            qkv_bias=bias,
            o_bias=bias,
            norm_offset=1.0,
            delta=qwen3_next.delta_sizes(hf),
        )


class Layer(qwen3_next.Layer):
    def build_mlp(self, c: Config, layer: int) -> nn.Module:  # type: ignore[override]
        return GatedMLP(c.hidden, c.mlp, c.act)


SEPARATE = {"in_proj_ba": ("in_proj_b", "in_proj_a")}
"""Projections of the delta nets in checkpoints."""


class Model(qwen3_next.Model):
    layer_class = Layer
    weights = replace(
        qwen3_next.Model.weights, fuse={**qwen3_next.Model.weights.fuse, **SEPARATE}, experts={}
    )

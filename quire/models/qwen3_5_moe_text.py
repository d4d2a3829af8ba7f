"""Qwen3.5 with experts, text: Qwen3-Next with projections of the delta nets by kind.

Source: model_type "qwen3_5_moe_text", https://huggingface.co/Qwen/Qwen3.5-35B-A3B; transformers
        modeling_qwen3_5_moe.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.models import qwen3_5_text, qwen3_next
from quire.models._experts import ExpertSizes, expert_counts
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
class Config(qwen3_next.Config):
    by_head: bool = False

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        bias = field_of(hf, "attention_bias", bool, default=False)
        width = field_of(hf, "moe_intermediate_size", int)
        experts, top_k = expert_counts(hf)
        return cls(
            **rotary_sizes_of({**hf, "intermediate_size": width}),
            **recurrent_fields(hf),
            qkv_bias=bias,
            o_bias=bias,
            norm_offset=1.0,
            moe=ExpertSizes(experts, top_k, width, renormalise=True),
            shared_mlp=field_of(hf, "shared_expert_intermediate_size", int),
            delta=qwen3_next.delta_sizes(hf),
        )


class Model(qwen3_next.Model):
    weights = replace(
        qwen3_next.Model.weights,
        fuse={**qwen3_next.Model.weights.fuse, **qwen3_5_text.SEPARATE},
    )

"""Bamba: Mamba-2 mixers, and attention in some layers, each with an MLP.

Source: model_type "bamba", https://huggingface.co/ibm-ai-platform/Bamba-9B-v2; transformers
        modeling_bamba.py
Axes:   T tokens in the step, E hidden
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quire.config.recurrent_layers import RECURRENT
from quire.layers import AddRMSNorm
from quire.layers.recurrent import Mamba2Mixer, Mamba2Sizes
from quire.models import llama
from quire.models._decoder import Decoder, GatedMLP
from quire.models._recurrent import (
    mamba2_sizes,
    recurrent_fields,
    states_of,
)
from quire.models._rope import rotary_sizes_of
from quire.models.base import CarriedStates, Hf, StepInputs, Weights, field_of

CONVENTIONS = {
    "recurrent": "mamba2",
    "recurrent_layers": "indices",
    "defaults": {
        "partial_rotary_factor": 0.5,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    mixer: Mamba2Sizes

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        bias = field_of(hf, "attention_bias", bool, default=False)
        sizes = rotary_sizes_of(hf)
        return cls(
            **sizes,
            **recurrent_fields(hf),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=field_of(hf, "mlp_bias", bool, default=False),
            mixer=mamba2_sizes(hf, sizes["norm_eps"]),
        )


class Layer(nn.Module):
    """Subclasses have another mixer, attention or MLP."""

    def __init__(self, c: Any, layer: int) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mamba = self.self_attn = None
        if c.kinds[layer] == RECURRENT:
            self.mamba = self.build_mixer(c)
        else:
            self.self_attn = self.build_attention(c)
        self.pre_ff_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.feed_forward = self.build_mlp(c, layer)

    def build_mixer(self, c: Any) -> nn.Module:
        return Mamba2Mixer(c.hidden, c.mixer)

    def build_attention(self, c: Any) -> nn.Module:
        return llama.SelfAttention(c, None)

    def build_mlp(self, c: Any, layer: int) -> nn.Module:
        return GatedMLP(c.hidden, c.mlp, c.act, c.mlp_bias)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> CarriedStates:
        x, res = self.input_layernorm(x, res)
        if self.mamba is not None:
            x = self.mamba(x, states_of(step))
        elif self.self_attn is not None:
            x = self.self_attn(x, step)
        x, res = self.pre_ff_layernorm(x, res)
        return self.feed_forward(x), res


class Model(Decoder):
    layer_class = Layer
    weights = Weights(
        strip=("model.",),
        alias={"model.final_layernorm.weight": "norm.weight"},
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        ignore=("*.rotary_emb.inv_freq",),
        tie={"lm_head": "embed_tokens"},
    )

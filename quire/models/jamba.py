"""Jamba: Mamba mixers, attention without positions in some layers, and experts in some.

Source: model_type "jamba", https://huggingface.co/ai21labs/AI21-Jamba-1.5-Mini; transformers
        modeling_jamba.py
Axes:   T tokens in the step, E hidden
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quire.layers import (
    ACTIVATION_KINDS,
    ExpertActivation,
    Experts,
    Router,
    RoutingMethod,
)
from quire.layers.recurrent import MambaMixer, MambaSizes
from quire.models import bamba, llama
from quire.models._decoder import Decoder, GatedMLP
from quire.models._experts import expert_counts
from quire.models._recurrent import recurrent_fields
from quire.models._rope import rotary_sizes_of
from quire.models.base import Hf, Weights, field_of

CONVENTIONS = {
    "recurrent": "mamba",
    "recurrent_layers": "period",
    "positions_kind": "computed",
    "defaults": {
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "max_position_embeddings": 262144,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    mixer: MambaSizes
    experts: int
    top_k: int
    expert_period: int
    expert_offset: int

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes = rotary_sizes_of(hf)
        experts, top_k = expert_counts(hf)
        rank = hf.get("mamba_dt_rank", "auto")
        mixer = MambaSizes(
            inner=field_of(hf, "mamba_expand", int) * sizes["hidden"],
            state=field_of(hf, "mamba_d_state", int),
            kernel=field_of(hf, "mamba_d_conv", int),
            rank=rank if isinstance(rank, int) else -(-sizes["hidden"] // 16),
            bias=field_of(hf, "mamba_proj_bias", bool, default=False),
            conv_bias=field_of(hf, "mamba_conv_bias", bool, default=True),
            eps=sizes["norm_eps"],
            norm_weights=True,
        )
        return cls(
            **sizes,
            **recurrent_fields(hf),
            mixer=mixer,
            experts=experts,
            top_k=top_k,
            expert_period=field_of(hf, "expert_layer_period", int),
            expert_offset=field_of(hf, "expert_layer_offset", int),
        )

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in place of an MLP."""
        return self.experts > 1 and layer % self.expert_period == self.expert_offset


class SelfAttention(llama.SelfAttention):
    def __init__(self, c: llama.Config) -> None:
        super().__init__(c, None)
        self.rope = None


class SparseMLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.router = Router(c.hidden, c.experts, RoutingMethod(c.top_k))
        self.experts = Experts(
            c.hidden, c.mlp, c.experts, ExpertActivation(ACTIVATION_KINDS[c.act])
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.router(x))


class Layer(bamba.Layer):
    def build_mixer(self, c: Config) -> nn.Module:
        return MambaMixer(c.hidden, c.mixer)

    def build_attention(self, c: Config) -> nn.Module:
        return SelfAttention(c)

    def build_mlp(self, c: Config, layer: int) -> nn.Module:
        return SparseMLP(c) if c.has_experts(layer) else GatedMLP(c.hidden, c.mlp, c.act)


class Model(Decoder):
    layer_class = Layer
    weights = Weights(
        strip=("model.",),
        alias={"model.final_layernorm.weight": "norm.weight"},
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        experts={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
        tie={"lm_head": "embed_tokens"},
    )

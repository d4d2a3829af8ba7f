"""Granite 4: Mamba-2 mixers and attention, each with an MLP beside experts, and Granite's factors.

Sizes differ: some have no experts, some no recurrent layers; most have attention without positions.
The residual is divided by its factor, as in granite.py.

Source: model_type "granitemoehybrid", https://huggingface.co/ibm-granite/granite-4.0-h-tiny;
        transformers modeling_granitemoehybrid.py
Axes:   T tokens in the step, E hidden
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quire.config.recurrent_layers import RECURRENT
from quire.layers import (
    ACTIVATION_KINDS,
    ExpertActivation,
    Experts,
    Router,
    RoutingMethod,
    add,
    scale,
)
from quire.layers.recurrent import Mamba2Sizes
from quire.models import bamba, granite, jamba, llama
from quire.models._decoder import Decoder, GatedMLP
from quire.models._experts import expert_counts
from quire.models._recurrent import mamba2_sizes, recurrent_fields
from quire.models.base import Hf, StepInputs, Weights, field_of

CONVENTIONS = {
    "recurrent": "mamba2",
    "recurrent_layers": "indices",
    "defaults": {
        "position_embedding_type": "nope",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(granite.Config):
    mixer: Mamba2Sizes | None  # None: there are no recurrent layers
    rotary: bool
    experts: int  # 0: there are none
    top_k: int
    expert_mlp: int

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes, layers = granite.multiplied_sizes(hf), recurrent_fields(hf)
        field_of(hf, "normalization_function", str, default="rmsnorm", one_of=("rmsnorm",))
        kind = field_of(hf, "position_embedding_type", str, one_of=("rope", "nope"))
        eps = field_of(hf, "rms_norm_eps", float, default=1e-6)
        experts, top_k = expert_counts(hf) if hf["num_local_experts"] != 0 else (0, 0)
        return cls(
            **{**sizes, "mlp": field_of(hf, "shared_intermediate_size", int)},
            **layers,
            mixer=mamba2_sizes(hf, eps) if RECURRENT in layers["kinds"] else None,
            rotary=kind == "rope",
            experts=experts,
            top_k=top_k,
            expert_mlp=sizes["mlp"],
        )


class FeedForward(nn.Module):
    """Experts, if there are any, plus an MLP for all tokens."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.shared_mlp = GatedMLP(c.hidden, c.mlp, c.act)
        self.experts = None
        if c.experts:
            self.router = Router(c.hidden, c.experts, RoutingMethod(c.top_k, renormalise=True))
            gate = ExpertActivation(ACTIVATION_KINDS[c.act])
            self.experts = Experts(c.hidden, c.expert_mlp, c.experts, gate)

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared_mlp(x)
        return shared if self.experts is None else add(self.experts(x, *self.router(x)), shared)


class Layer(bamba.Layer):
    def build_attention(self, c: Config) -> nn.Module:
        return llama.SelfAttention(c, None) if c.rotary else jamba.SelfAttention(c)

    def build_mlp(self, c: Config, layer: int) -> nn.Module:
        return FeedForward(c)


class Model(Decoder):
    layer_class = Layer
    weights = Weights(
        strip=("model.",),
        paths={
            "router.layer": "router",
            "block_sparse_moe": "feed_forward",
            "shared_mlp": "feed_forward.shared_mlp",
        },
        rename={
            "post_attention_layernorm": "pre_ff_layernorm",
            "shared_mlp.input_linear": "gate_up_proj",
            "shared_mlp.output_linear": "down_proj",
            "feed_forward.input_linear": "experts.gate_up_proj",
            "feed_forward.output_linear": "experts.down_proj",
        },
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
        experts={"gate_up_proj": ("gate_up_proj",), "down_proj": ("down_proj",)},
        ignore=("*.rotary_emb.inv_freq",),
        tie={"lm_head": "embed_tokens"},
    )

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.embed_factor = c.embed_factor

    def embed(self, step: StepInputs) -> Tensor:
        """Given vectors are multiplied too, as in transformers."""
        return scale(super().embed(step), self.embed_factor)

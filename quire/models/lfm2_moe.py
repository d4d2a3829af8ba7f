"""LFM2 with experts: sigmoid scores, and a bias of the MLP that corrects the choice of experts.

The first layers have an ordinary MLP.

Source: model_type "lfm2_moe", https://huggingface.co/LiquidAI/LFM2-8B-A1B; transformers
        modeling_lfm2_moe.py
Axes:   T tokens in the step, E hidden, X experts
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quire.layers import (
    ACTIVATION_KINDS,
    ExpertActivation,
    Experts,
    ParamModule,
    Router,
    RoutingMethod,
)
from quire.models import lfm2
from quire.models._decoder import GatedMLP
from quire.models._experts import RoutedSizes, expert_counts
from quire.models.base import Hf, field_of
from quire.weights.mapping import InitSpec, WeightShard, unsharded_layout

CONVENTIONS = {
    "recurrent": "short_conv",
    "recurrent_layers": "indices",
    "tied": True,
    "defaults": {
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
        "intermediate_size": 7168,
        "max_position_embeddings": 128_000,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(lfm2.Config):
    moe: RoutedSizes

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        experts, top_k = expert_counts(hf)
        moe = RoutedSizes(
            experts=experts,
            mlp=field_of(hf, "moe_intermediate_size", int),
            shared=0,
            dense=field_of(hf, "num_dense_layers", int),
            routing=RoutingMethod(
                top_k,
                "sigmoid",
                renormalise=field_of(hf, "norm_topk_prob", bool, default=True),
                scale=field_of(hf, "routed_scaling_factor", float, default=1.0),
            ),
            correction=field_of(hf, "use_expert_bias", bool, default=True),
        )
        return cls(**lfm2.sizes_of(hf), moe=moe)


class SparseMLP(ParamModule):
    """Owns the router's correction, under the name that checkpoints give it."""

    expert_bias: Tensor

    def __init__(self, hidden: int, act: str, moe: RoutedSizes) -> None:
        super().__init__()
        self.gate = Router(hidden, moe.experts, moe.routing)
        gate = ExpertActivation(ACTIVATION_KINDS[act])
        self.experts = Experts(hidden, moe.mlp, moe.experts, gate)
        if moe.correction:
            self.declare("expert_bias")

    def forward(self, x: Tensor) -> Tensor:
        """x [T, E] -> [T, E]."""
        return self.experts(x, *self.gate(x))

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return unsharded_layout((self.gate.experts,))

    def init_spec(self, param: str) -> InitSpec:
        return self.gate.init_spec("e_score_correction_bias")

    def dtype(self, param: str) -> torch.dtype | None:
        return self.gate.dtype("e_score_correction_bias")

    def set_param(self, param: str, value: object) -> None:
        super().set_param(param, value)
        self.gate.e_score_correction_bias = self.expert_bias.detach()


class Layer(lfm2.Layer):
    def make_mlp(self, c: lfm2.Config, layer: int) -> nn.Module:
        assert isinstance(c, Config)
        if layer < c.moe.dense:
            return GatedMLP(c.hidden, c.mlp, c.act)
        return SparseMLP(c.hidden, c.act, c.moe)


class Model(lfm2.Model):
    layer_class = Layer
    weights = replace(
        lfm2.Model.weights,
        experts={"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
    )

"""MiniMax-M2: Mixtral with sigmoid scores, part of each head rotated, norms over all heads.

The bias that corrects the choice of experts is the MLP's in the checkpoint. Layers after the last,
which predict further tokens (MTP), are left there.

Source: model_type "minimax_m2", https://huggingface.co/MiniMaxAI/MiniMax-M2; transformers
        modeling_minimax_m2.py
Axes:   T tokens in the step, E hidden, F width of an expert, X experts, H query heads, K kv heads,
        D head size
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.layers import (
    ACTIVATION_KINDS,
    AddRMSNorm,
    ExpertActivation,
    Experts,
    ParamModule,
    Router,
    RoutingMethod,
)
from quire.models import mixtral, olmo2
from quire.models._decoder import Decoder, PreNormLayer, spare_names
from quire.models._experts import expert_counts
from quire.models._rope import rotary_sizes_of
from quire.models.base import Hf, field_of
from quire.weights.mapping import InitSpec, WeightShard, unsharded_layout

CONVENTIONS = {"defaults": {"head_dim": 128, "rope_theta": 5_000_000.0}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(olmo2.Config):
    experts: int
    top_k: int
    spare_layers: int

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        _check(hf)
        if (dims := field_of(hf, "rotary_dim", int, default=None)) is not None:
            hf = {**hf, "partial_rotary_factor": dims / field_of(hf, "head_dim", int)}
        experts, top_k = expert_counts(hf)
        return cls(
            **rotary_sizes_of(hf),
            experts=experts,
            top_k=top_k,
            spare_layers=field_of(hf, "num_mtp_modules", int, default=0),
        )


def _check(hf: Hf) -> None:
    """Refuse what MiniMax's other models have."""
    kinds = field_of(hf, "attn_type_list", list, default=[])
    if any(kind != 1 for kind in kinds):
        raise ConfigError(
            "config.json: attn_type_list has layers other than 1 (full attention); "
            "lightning attention is not supported"
        )
    field_of(hf, "use_qk_norm", bool, default=True, one_of=(True,))
    field_of(hf, "qk_norm_type", str, default="per_layer", one_of=("per_layer",))
    field_of(hf, "scoring_func", str, default="sigmoid", one_of=("sigmoid",))
    field_of(hf, "use_routing_bias", bool, default=True, one_of=(True,))
    field_of(hf, "shared_intermediate_size", int, default=0, one_of=(0,))
    field_of(hf, "sliding_window", int, default=None, one_of=(None,))


class SparseMLP(ParamModule):
    """Owns the router's correction, under the name that checkpoints give it."""

    e_score_correction_bias: Tensor

    def __init__(self, c: Config) -> None:
        super().__init__()
        routing = RoutingMethod(c.top_k, "sigmoid", renormalise=True)
        self.gate = Router(c.hidden, c.experts, routing)
        self.experts = Experts(
            c.hidden, c.mlp, c.experts, ExpertActivation(ACTIVATION_KINDS[c.act])
        )
        self.declare("e_score_correction_bias")

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.gate(x))

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return unsharded_layout((self.gate.experts,))

    def init_spec(self, param: str) -> InitSpec:
        return self.gate.init_spec(param)

    def dtype(self, param: str) -> torch.dtype | None:
        return self.gate.dtype(param)

    def set_param(self, param: str, value: object) -> None:
        super().set_param(param, value)
        self.gate.e_score_correction_bias = self.e_score_correction_bias.detach()


class Layer(PreNormLayer):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.self_attn = olmo2.SelfAttention(c, layer)
        self.post_attention_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mlp = SparseMLP(c)


class Model(Decoder):
    layer_class = Layer
    weights = mixtral.Model.weights

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.weights = replace(self.weights, absent=spare_names(c.layers, c.spare_layers))

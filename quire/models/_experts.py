"""Reads from config.json how many experts there are, how large, and in which layers.

ExpertSizes has the names that Qwen gives to the fields, RoutedSizes those of DeepSeek.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quire.errors import ConfigError
from quire.layers import (
    ACTIVATION_KINDS,
    ExpertActivation,
    Experts,
    Router,
    RoutingMethod,
    add,
)
from quire.models._decoder import GatedMLP
from quire.models.base import Hf, ModelConfig, field_of


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The fields of a model's Config about its experts."""

    experts: int
    top_k: int
    mlp: int  # width of one expert
    renormalise: bool
    sparse_step: int = 1  # layers every - 1, 2 * every - 1, ... are sparse
    dense_layers: tuple[int, ...] = ()  # but not these

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0


def expert_sizes(hf: Hf) -> ExpertSizes:
    """Read Qwen's names of these fields."""
    dense = field_of(hf, "mlp_only_layers", list, default=[])
    if not all(type(i) is int for i in dense):
        raise ConfigError(f"config.json: mlp_only_layers is {dense!r}; it must be layer numbers")
    experts, top_k = expert_counts(hf)
    every = field_of(hf, "decoder_sparse_step", int, default=1)
    if every < 1:
        raise ConfigError(f"config.json: decoder_sparse_step is {every}; it must be 1 or more")
    return ExpertSizes(
        experts=experts,
        top_k=top_k,
        mlp=field_of(hf, "moe_intermediate_size", int),
        renormalise=field_of(hf, "norm_topk_prob", bool, default=False),
        sparse_step=every,
        dense_layers=tuple(dense),
    )


def expert_counts(hf: Hf) -> tuple[int, int]:
    """Return (experts, experts per token); the first has one of two names."""
    name = "num_local_experts" if hf.get("num_experts") is None else "num_experts"
    experts = field_of(hf, name, int)
    top_k = field_of(hf, "num_experts_per_tok", int)
    if not 1 <= top_k <= experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok is {top_k}; it must be in [1, {experts}], "
            f"{experts} being {name}"
        )
    return experts, top_k


@dataclass(frozen=True, slots=True)
class RoutedSizes:
    """Routed experts, and shared ones beside them, from some layer on. (DeepSeek)"""

    experts: int
    mlp: int  # width of one expert
    shared: int  # so many that all tokens go to
    dense: int  # so many first layers have an ordinary MLP
    routing: RoutingMethod
    correction: bool  # a learned bias corrects the choice of experts


def routed_sizes(hf: Hf, routing: RoutingMethod, *, correction: bool = False) -> RoutedSizes:
    """Read DeepSeek's names of these fields."""
    field_of(hf, "moe_layer_freq", int, default=1, one_of=(1,))
    return RoutedSizes(
        experts=field_of(hf, "n_routed_experts", int),
        mlp=field_of(hf, "moe_intermediate_size", int),
        shared=field_of(hf, "n_shared_experts", int, default=0),
        dense=field_of(hf, "first_k_dense_replace", int, default=0),
        routing=routing,
        correction=correction,
    )


def sigmoid_routing(hf: Hf) -> RoutingMethod:
    """Sigmoid scores; the best experts of the best groups. (DeepSeek-V3)"""
    field_of(hf, "scoring_func", str, default="sigmoid", one_of=("sigmoid",))
    field_of(hf, "topk_method", str, default="noaux_tc", one_of=("noaux_tc",))
    routing = RoutingMethod(
        field_of(hf, "num_experts_per_tok", int, default=8),
        "sigmoid",
        renormalise=field_of(hf, "norm_topk_prob", bool, default=True),
        scale=field_of(hf, "routed_scaling_factor", float),
        groups=field_of(hf, "n_group", int),
        top_groups=field_of(hf, "topk_group", int),
        group_score="top2",
    )
    return check_routing(hf, routing)


def check_routing(hf: Hf, routing: RoutingMethod) -> RoutingMethod:
    """Return the routing, if there are enough experts for it. Raises ConfigError."""
    experts = field_of(hf, "n_routed_experts", int)
    if experts % routing.groups or not 1 <= routing.top_groups <= routing.groups:
        raise ConfigError(
            f"config.json: n_group is {routing.groups} and topk_group {routing.top_groups}; "
            f"n_group must divide n_routed_experts, which is {experts}, and be no less than "
            "topk_group"
        )
    within = experts // routing.groups * routing.top_groups
    if not 1 <= routing.top_k <= within:
        raise ConfigError(
            f"config.json: num_experts_per_tok is {routing.top_k}; it must be in [1, {within}]"
        )
    return routing


def mlp_of_layer(c: ModelConfig, moe: RoutedSizes, layer: int) -> nn.Module:
    """Return the experts of a layer, or the ordinary MLP of one of the first."""
    if layer < moe.dense:
        return GatedMLP(c.hidden, c.mlp, c.act)
    return RoutedMLP(c.hidden, c.act, moe)


class RoutedMLP(nn.Module):
    """Routed experts, plus shared ones as a single MLP."""

    def __init__(self, hidden: int, act: str, moe: RoutedSizes) -> None:
        super().__init__()
        self.gate = Router(hidden, moe.experts, moe.routing, correction=moe.correction)
        gate = ExpertActivation(ACTIVATION_KINDS[act])
        self.experts = Experts(hidden, moe.mlp, moe.experts, gate)
        width = moe.shared * moe.mlp
        self.shared_experts = GatedMLP(hidden, width, act) if width else None

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.experts(x, *self.gate(x))
        return chosen if self.shared_experts is None else add(chosen, self.shared_experts(x))

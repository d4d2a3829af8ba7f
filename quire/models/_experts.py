"""Reads from config.json how many experts there are, how large, and in which layers. (Qwen)"""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.models.base import Hf, field_of


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

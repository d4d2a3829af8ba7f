"""Experts of transformers' mixture models, on quire's grouped kernel.

transformers' expert classes are written for an interface: weights of all experts in two tensors,
and a `_apply_gate` between the two products. A class whose gate is one of the kernel's, by its
results on random numbers, is replaced; any other runs as its class has it.

Axes: T tokens, E hidden size, F width of an expert, X experts, k experts of a token.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.framework import lazy_fusion
from quire.layers import ExpertActivation, Experts

GATES = (
    ExpertActivation("silu"),
    ExpertActivation("gelu_tanh"),
    ExpertActivation("gelu"),
    ExpertActivation("relu"),
)
SPREAD = 12.0
"""Random inputs reach so far, so that a clamp in a gate shows."""


def shape_only(module: nn.Module, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Experts function of the probe: a result of the right shape."""
    return torch.zeros_like(hidden_states)


class InterfaceExperts(Experts):
    """A bank that is called as transformers calls its own."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[..., E], ids and weights [T, k] -> [..., E]."""
        flat = hidden_states.reshape(-1, self.hidden)
        k = top_k_index.shape[-1]
        ids = top_k_index.reshape(-1, k).int().contiguous()
        weights = top_k_weights.reshape(-1, k).float().contiguous()
        y = super().forward(flat, ids, weights)
        lazy_fusion.flush()  # code of transformers reads it
        return y.view(hidden_states.shape)


def replace_experts(module: Any) -> InterfaceExperts | None:
    """Return quire's bank in place of an expert module of transformers; None: it has none."""
    if not hasattr(module, "_apply_gate") or not getattr(module, "has_gate", False):
        return None
    if getattr(module, "has_post_expert_norm", False):
        return None
    turned, bias = bool(module.is_transposed), bool(module.has_bias)
    names = {"gate_up_proj", "down_proj"} | (
        {"gate_up_proj_bias", "down_proj_bias"} if bias else set()
    )
    own = {name for name, param in module.named_parameters() if param is not None}
    if own != names:
        return None
    experts, first, second = module.gate_up_proj.shape
    double, hidden = (second, first) if turned else (first, second)
    interleaved = not module.is_concatenated
    gate = _proven_gate(module, double // 2, interleaved)
    if gate is None:
        return None
    return InterfaceExperts(
        hidden, double // 2, experts, gate, bias=bias, turned=turned, interleaved=interleaved
    )


def _proven_gate(module: Any, width: int, interleaved: bool) -> ExpertActivation | None:
    """Return the kernel's gate that gives the results of the module's; None: there is none."""
    generator = torch.Generator("cpu").manual_seed(0)
    halves = torch.empty(32, 2 * width, device="cpu").uniform_(-SPREAD, SPREAD, generator=generator)
    given = halves.view(32, 2, width).transpose(1, 2).reshape(32, -1) if interleaved else halves
    with torch.inference_mode():
        wanted = module._apply_gate(given)
    for gate in (*GATES, *_clamped(module)):
        if torch.allclose(gate(halves), wanted, rtol=1e-5, atol=1e-5):
            return gate
    return None


def _clamped(module: Any) -> list[ExpertActivation]:
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if not isinstance(alpha, float) or not isinstance(limit, (int, float)):
        return []
    return [ExpertActivation("clamped", alpha, float(limit))] if math.isfinite(limit) else []

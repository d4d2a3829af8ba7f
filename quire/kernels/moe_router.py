"""MoE router chooses the experts of each token and their weights: product, scores, choice.

`scale_routes` multiplies the weights by learned factors of the experts. (Gemma-4)

    scores = softmax or sigmoid of (x @ weight.T + bias)      fp32 throughout, never rounded
    choice = the top k of scores (+ correction), within the best groups if there are groups
    weight = scores of the chosen, renormalised if configured, times a factor

Softmax over the chosen only (Mixtral, GPT-OSS) is softmax over all, renormalised. Among equal
scores the lower expert wins, so that every body chooses alike.

Axes: T tokens in the step, E hidden size, X experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.framework.op import op
from quire.kernels.native.library import DTYPES, ROUTER, NativeOp, address_of, empty


@dataclass(frozen=True, slots=True)
class RoutingMethod:
    """How a model chooses experts."""

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = False  # weights of a token sum to 1, before `scale`
    scale: float = 1.0
    groups: int = 1  # neighbouring experts, equally many in each
    top_groups: int = 1  # groups a token may choose from
    group_score: Literal["max", "top2"] = "max"  # of a group: its best score, or best two summed


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    bf16, fp32 = torch.bfloat16, torch.float32
    for t, e, x, dtype, routing in [
        (1, 64, 8, fp32, RoutingMethod(2, renormalise=True)),
        (7, 96, 60, bf16, RoutingMethod(4)),
        (33, 128, 128, bf16, RoutingMethod(8, renormalise=True)),
        (5, 100, 32, fp32, RoutingMethod(4, renormalise=True)),
        (9, 64, 64, bf16, RoutingMethod(6, scale=16.0, groups=8, top_groups=3)),
        (3, 64, 64, fp32, RoutingMethod(8, "sigmoid", True, 2.5, 8, 4, "top2")),
    ]:
        case = {
            "x": torch.randn(t, e, device=device).to(dtype),
            "weight": (2 * torch.randn(x, e, device=device) / e**0.5).to(dtype),
            "routing": routing,
        }
        yield case
        if routing.score == "sigmoid":
            yield {**case, "correction": torch.randn(x, device=device)}
        elif routing.groups == 1:
            yield {**case, "bias": torch.randn(x, device=device).to(dtype)}


_run = NativeOp(ROUTER, "qqqqqqqqqqqqqqqqqd")


def _native(
    x: Tensor,
    weight: Tensor,
    routing: RoutingMethod,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if x.dtype not in DTYPES or x.stride(1) != 1 or weight.dtype != x.dtype:
        return NotImplemented
    if not weight.is_contiguous() or (bias is not None and bias.dtype != x.dtype):
        return NotImplemented
    if correction is not None and correction.dtype != torch.float32:
        return NotImplemented
    ids = empty((len(x), routing.top_k), torch.int32)
    weights = empty(ids.shape, torch.float32)
    _run(
        x.data_ptr(), x.stride(0) * x.element_size(), weight.data_ptr(), address_of(bias),
        address_of(correction), ids.data_ptr(), weights.data_ptr(), *x.shape, len(weight),
        routing.top_k, routing.score == "sigmoid", routing.renormalise, routing.groups,
        routing.top_groups, routing.group_score == "top2", DTYPES[x.dtype], routing.scale,
    )  # fmt: skip
    return ids, weights


@op(cases=_cases, native=_native, gpu="moe.moe_router")
def moe_router(
    x: Tensor,
    weight: Tensor,
    routing: RoutingMethod,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose experts for every row of x.

    x: [T, E]. weight: [X, E], bias: [X], of x's dtype. correction: [X] float32, added to the
    scores for the choice only. Returns (ids [T, top_k] int32, weights [T, top_k] float32), best
    first.
    """
    wide = None if bias is None else bias.float()
    logits = F.linear(x.float(), weight.float(), wide)
    scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
    ranked = scores if correction is None else scores + correction
    if routing.groups > 1:
        ranked = _mask_to_top_groups(ranked, routing)
    ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, ids)
    if routing.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids.int(), weights * routing.scale


def _mask_to_top_groups(ranked: Tensor, routing: RoutingMethod) -> Tensor:
    """The same scores, minus infinity outside of a token's best groups."""
    grouped = ranked.view(len(ranked), routing.groups, -1)
    if routing.group_score == "max":
        best = grouped.amax(-1)
    else:
        best = grouped.topk(2, dim=-1).values.sum(-1)
    chosen = best.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, chosen, True)
    return grouped.masked_fill(~kept[:, :, None], float("-inf")).view_as(ranked)


def _scale_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, k, x, dtype in [
        (1, 2, 8, torch.float32),
        (7, 8, 128, torch.bfloat16),
        (33, 3, 60, torch.float16),
    ]:
        yield {
            "weights": torch.rand(t, k, device=device),
            "ids": torch.randint(0, x, (t, k), dtype=torch.int32, device=device),
            "factors": torch.randn(x, device=device).to(dtype),
        }


@op(cases=_scale_cases, gpu="moe.scale_routes")
def scale_routes(weights: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
    """Multiply the weight of each chosen expert by a factor of that expert.

    weights: [T, k] float32, ids: [T, k] int32. factors: [X]. Returns a new [T, k] float32.
    """
    return weights * factors[ids.long()].float()

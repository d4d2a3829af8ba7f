"""Router kernel: product, scores and choice in one launch.

Few rows: many blocks share a row's product, since one alone would wait on memory for longer than
the rest takes; the last of them to finish (found by a counter) chooses. Many rows: a
block has some rows and all experts, so it chooses from its registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel
from quire.kernels.moe_router import RoutingMethod

MAX_SMALL_ROWS = 16  # rows up to which a row is shared by many blocks
MAX_HIDDEN = 8192  # of such a row: it is held in registers whole
SMALL_M_PLAN = 4, 4  # experts of a block, and its warps


@triton.jit
def _mask_to_top_groups(ranked, xs, X: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
                        TOP_TWO: tl.constexpr):  # fmt: skip
    """ranked [T, X], minus infinity outside of each row's best groups."""
    group = xs // (X // GROUPS)
    of_group = tl.full(ranked.shape, float("-inf"), tl.float32)  # each expert's group's score
    for g in tl.static_range(GROUPS):
        inside = tl.where((group == g) & (xs < X), ranked, float("-inf"))
        score, at = tl.max(inside, 1, return_indices=True)
        if TOP_TWO:
            score += tl.max(tl.where(xs == at[:, None], float("-inf"), inside), 1)
        of_group = tl.where((group == g) & (xs < X), score[:, None], of_group)
    kept = tl.zeros(ranked.shape, tl.int1)
    for _ in tl.static_range(TOP_GROUPS):
        _, at = tl.max(of_group, 1, return_indices=True)
        mine = group == (at // (X // GROUPS))[:, None]
        kept = kept | mine
        of_group = tl.where(mine, float("-inf"), of_group)
    return tl.where(kept, ranked, float("-inf"))


@triton.jit
def _select_experts(logits, correction_ptr,
           X: tl.constexpr, X_PAD: tl.constexpr, TOP: tl.constexpr, TOP_PAD: tl.constexpr,
           SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, SCALE: tl.constexpr,
           GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_TWO: tl.constexpr):  # fmt: skip
    """logits [T, X_PAD] -> ids, weights [T, TOP_PAD]. Best first, lower expert on a tie."""
    xs = tl.arange(0, X_PAD)[None]
    logits = tl.where(xs < X, logits, float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        grown = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = grown / tl.sum(grown, 1)[:, None]
    ranked = scores
    if correction_ptr is not None:
        ranked += tl.load(correction_ptr + xs, xs < X, 0.0)
    ranked = tl.where(xs < X, ranked, float("-inf"))
    if GROUPS > 1:
        ranked = _mask_to_top_groups(ranked, xs, X, GROUPS, TOP_GROUPS, TOP_TWO)
    ks = tl.arange(0, TOP_PAD)[None]
    ids = tl.zeros((logits.shape[0], TOP_PAD), tl.int32)
    weights = tl.zeros((logits.shape[0], TOP_PAD), tl.float32)
    for k in tl.static_range(TOP):
        best, at = tl.max(ranked, 1, return_indices=True)
        mine = xs == at[:, None]
        if correction_ptr is not None:
            best = tl.sum(tl.where(mine, scores, 0.0), 1)
        ids = tl.where(ks == k, at[:, None], ids)
        weights = tl.where(ks == k, best[:, None], weights)
        ranked = tl.where(mine, float("-inf"), ranked)
    if RENORMALISE:
        weights = weights / tl.sum(weights, 1)[:, None]
    return ids, weights * SCALE


@triton.jit
def _write(ids, weights, ts, tokens, id_ptr, weight_ptr, TOP: tl.constexpr, TOP_PAD: tl.constexpr):
    """Store the choice of rows ts [T]."""
    ks = tl.arange(0, TOP_PAD)[None]
    live = (ts < tokens)[:, None] & (ks < TOP)
    at = ts[:, None] * TOP + ks
    tl.store(id_ptr + at, ids, live)
    tl.store(weight_ptr + at, weights, live)


@kernel()
def _router_small_m_kernel(
    x_ptr,  # [T, E]
    residual_ptr,  # [T, E] or None
    norm_ptr,  # [E] or None: x is normalised already
    w_ptr,  # [X, E]
    bias_ptr,  # [X] or None
    correction_ptr,  # [X] or None
    logit_ptr,  # [T, X] scratch
    ticket_ptr,  # [FEW], zero before and after
    y_ptr,  # [T, E] out, or None
    r_ptr,  # [T, E] out, or None
    id_ptr,  # [T, TOP] out
    weight_ptr,  # [T, TOP] out
    X_T: tl.constexpr,
    E: tl.constexpr,
    X: tl.constexpr,
    X_PAD: tl.constexpr,
    TOP: tl.constexpr,
    TOP_PAD: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_TWO: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(1)
    xs = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    es = tl.arange(0, BLOCK_E)
    live = es < E
    w = tl.load(w_ptr + tl.minimum(xs, X - 1)[:, None] * E + es[None], live[None], 0.0)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + es, live, 0.0).to(tl.float32) + OFFSET
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()  # weights need not wait, x must
    x = tl.load(x_ptr + t * X_T + es, live, 0.0).to(tl.float32)
    if norm_ptr is not None:
        if residual_ptr is not None:
            r = (x + tl.load(residual_ptr + t * E + es, live, 0.0).to(tl.float32)).to(
                x_ptr.dtype.element_ty
            )
            if tl.program_id(0) == 0:
                tl.store(r_ptr + t * E + es, r, live)
            x = r.to(tl.float32)
        y = (x * tl.rsqrt(tl.sum(x * x, 0) / E + EPS) * norm).to(x_ptr.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(y_ptr + t * E + es, y, live)
        x = y.to(tl.float32)
    logits = tl.sum(w.to(tl.float32) * x[None], 1)
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + xs, xs < X, 0.0).to(tl.float32)
    tl.store(logit_ptr + t * X + xs, logits, xs < X)
    tl.debug_barrier()  # every thread's logits are written before the ticket is drawn
    ticket = tl.atomic_add(ticket_ptr + t, 1, sem="acq_rel")
    if ticket == tl.num_programs(0) - 1:
        every = tl.arange(0, X_PAD)[None]
        row = tl.load(logit_ptr + t * X + every, every < X, float("-inf"), cache_modifier=".cg")
        ts = t + tl.zeros((1,), tl.int32)
        ids, weights = _select_experts(row, correction_ptr, X, X_PAD, TOP, TOP_PAD, SIGMOID,
        RENORMALISE,
                              SCALE, GROUPS, TOP_GROUPS, TOP_TWO)  # fmt: skip
        _write(ids, weights, ts, t + 1, id_ptr, weight_ptr, TOP, TOP_PAD)
        tl.store(ticket_ptr + t, 0)


@kernel("tokens")
def _router_kernel(
    x_ptr,  # [T, E]
    w_ptr,  # [X, E]
    bias_ptr,  # [X] or None
    correction_ptr,  # [X] or None
    id_ptr,  # [T, TOP] out
    weight_ptr,  # [T, TOP] out
    tokens,
    X_T: tl.constexpr,
    E: tl.constexpr,
    X: tl.constexpr,
    X_PAD: tl.constexpr,
    TOP: tl.constexpr,
    TOP_PAD: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_TWO: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    ts = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    xs = tl.arange(0, X_PAD)
    es = tl.arange(0, BLOCK_E)
    x_at = x_ptr + tl.minimum(ts, tokens - 1).to(tl.int64)[:, None] * X_T + es[None]
    w_at = w_ptr + tl.minimum(xs, X - 1)[None] * E + es[:, None]
    sums = tl.zeros((BLOCK_T, X_PAD), tl.float32)
    for start in range(0, E, BLOCK_E):
        inside = start + es < E
        x = tl.load(x_at + start, inside[None], 0.0)
        w = tl.load(w_at + start, inside[:, None], 0.0)
        sums = tl.dot(x, w, sums, input_precision="ieee")
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + xs, xs < X, 0.0).to(tl.float32)[None]
    ids, weights = _select_experts(sums, correction_ptr, X, X_PAD, TOP, TOP_PAD, SIGMOID,
    RENORMALISE,
                          SCALE, GROUPS, TOP_GROUPS, TOP_TWO)  # fmt: skip
    _write(ids, weights, ts, tokens, id_ptr, weight_ptr, TOP, TOP_PAD)


class ZeroedCounters:
    """Counters on each device that every kernel leaves as it found them: zero."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._by_device: dict[torch.device, Tensor] = {}

    def for_device(self, device: torch.device) -> Tensor:
        found = self._by_device.get(device)
        if found is None:
            found = torch.zeros(self._count, dtype=torch.int32, device=device)
            self._by_device[device] = found
        return found


_COUNTERS = ZeroedCounters(MAX_SMALL_ROWS)


def outputs(
    x: Tensor,
    weight: Tensor,
    routing: RoutingMethod,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
) -> Any:
    if x.dim() != 2 or x.stride(1) != 1 or not weight.is_contiguous() or x.dtype != weight.dtype:
        return NotImplemented
    shape = (x.shape[0], routing.top_k)
    ids = torch.empty(shape, dtype=torch.int32, device=x.device)
    return ids, torch.empty(shape, dtype=torch.float32, device=x.device)


class RouterNorm(NamedTuple):
    """The RMSNorm whose result the router reads: the arguments of that op."""

    x: Tensor
    weight: Tensor
    eps: float
    residual: Tensor | None
    offset: float
    y: Tensor
    r: Tensor


def launch(
    outs: tuple[Tensor, Tensor],
    x: Tensor,
    weight: Tensor,
    routing: RoutingMethod,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
) -> None:
    tokens = x.shape[0]
    if is_small_m(x):
        _launch_small_m(outs, x, weight, routing, bias, correction, None)
    elif tokens:
        rows = 16 if tokens <= 4096 else 64
        inner = 128 if len(weight) <= 128 else 64  # what three stages of weights may take
        inner //= x.element_size() // 2
        grid = (cdiv(tokens, rows), 1, 1)
        consts = (*_routing_constants(x, weight, routing), rows, inner)
        warps = 8 if len(weight) > 64 else 4
        _router_kernel(grid, (x, weight, bias, correction, *outs), (tokens,), consts, warps)


def launch_normed(
    outs: tuple[Tensor, Tensor],
    weight: Tensor,
    routing: RoutingMethod,
    bias: Tensor | None,
    correction: Tensor | None,
    norm: RouterNorm,
) -> None:
    """The norm and the router of few rows in one launch: norm.y and norm.r are filled too."""
    _launch_small_m(outs, norm.x, weight, routing, bias, correction, norm)


def is_small_m(x: Tensor) -> bool:
    """Whether the rows are few enough to be shared by many blocks."""
    return 0 < x.shape[0] <= MAX_SMALL_ROWS and x.shape[1] <= MAX_HIDDEN


def supports_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, offset: float
) -> bool:
    """Whether `launch_normed` supports this norm."""
    return is_small_m(x) and (residual is None or residual.is_contiguous())


def _launch_small_m(
    outs: tuple[Tensor, Tensor],
    x: Tensor,
    weight: Tensor,
    routing: RoutingMethod,
    bias: Tensor | None,
    correction: Tensor | None,
    norm: RouterNorm | None,
) -> None:
    (tokens, size), experts = x.shape, weight.shape[0]
    logits = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    before: tuple[Tensor | None, ...] = (x, None, None)
    normed: tuple[Tensor | None, ...] = (None, None)
    form = (0.0, 0.0)
    if norm is not None:
        before, normed = (x, norm.residual, norm.weight), (norm.y, norm.r)
        form = (norm.eps, norm.offset)
    block, warps = SMALL_M_PLAN if size <= 4096 else (4, 8)
    consts = (*_routing_constants(x, weight, routing), *form, block, next_power_of_2(size))
    grid = (cdiv(experts, block), tokens, 1)
    tensors = (
        *before,
        weight,
        bias,
        correction,
        logits,
        _COUNTERS.for_device(x.device),
        *normed,
        *outs,
    )
    _router_small_m_kernel(grid, tensors, (), (*consts, PDL_ENABLED), warps, pdl=PDL_ENABLED)


def _routing_constants(x: Tensor, weight: Tensor, routing: RoutingMethod) -> tuple[Any, ...]:
    experts, size = weight.shape
    return (x.stride(0), size, *select_constants(experts, routing))


def select_constants(experts: int, routing: RoutingMethod) -> tuple[Any, ...]:
    """The constants of `chosen`, from X on."""
    return (
        experts, next_power_of_2(experts),
        routing.top_k, next_power_of_2(routing.top_k), routing.score == "sigmoid",
        routing.renormalise, routing.scale,
        routing.groups, routing.top_groups, routing.group_score == "top2",
    )  # fmt: skip

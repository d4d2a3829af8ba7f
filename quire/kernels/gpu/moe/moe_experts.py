"""MoE dispatcher on the GPU: picks the launches of the op by the number of rows.

    few rows    up, down                          quire.kernels.gpu.moe.moe_small_m
    more        sort, gate_up, down, sum          quire.kernels.gpu.{moe_sort,grouped_gemm}
    many        the products with loaders         quire.kernels.gpu.moe.grouped_gemm_hopper

Every access to 16-bit weights is in those files; to e4m3 ones, in quire.kernels.gpu.moe.moe_fp8;
to those of two to eight bits, in moe_grouped.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.fp8_weight import Fp8ExpertWeights
from quire.kernels.formats.tiled_weight import TiledExperts
from quire.kernels.gpu.moe import moe_fp8, moe_grouped
from quire.kernels.gpu.moe.grouped_gemm import GroupedGemmTile, down, gate_up
from quire.kernels.gpu.moe.moe_small_m import experts_small_m
from quire.kernels.gpu.moe.moe_sort import sort_by_expert
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import launch_dependents, wait_for_previous_kernel
from quire.kernels.moe_experts import ExpertActivation

MAX_SMALL_M = 4  # rows up to which pairs share too few experts for sorting to pay


@kernel()
def _sum(
    y_ptr,  # [T, TOP, E]
    weight_ptr,  # [T, TOP]
    id_ptr,  # [T, TOP], of which some are -1 and have no outputs; None: all have
    out_ptr,  # [T, E] out
    E: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_previous_kernel()
        launch_dependents()
    t = tl.program_id(0).to(tl.int64)  # T * TOP * E can pass 2**31
    es = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP):
        live = es < E
        if id_ptr is not None:
            live &= tl.load(id_ptr + t * TOP + k) >= 0
        y = tl.load(y_ptr + (t * TOP + k) * E + es, live, 0.0).to(tl.float32)
        sums += tl.load(weight_ptr + t * TOP + k) * y
    tl.store(out_ptr + t * E + es, sums.to(out_ptr.dtype.element_ty), es < E)


HOPPER_MIN_ROWS = 24, 48
"""Rows an expert has on average from which each product is quickest with a loader of its own."""


def plan_tiles(rows: float, item: int) -> tuple[GroupedGemmTile, GroupedGemmTile]:
    """Tiles of both products, by the rows an expert has on average."""
    if item > 2:  # float32 is for checking only
        return GroupedGemmTile(16, 32, 32, 8, 4, 2), GroupedGemmTile(16, 32, 32, 8, 4, 2)
    if rows <= 24:
        m = 16 if rows <= 8 else 32
        return GroupedGemmTile(m, 64, 128, 8, 4, 3), GroupedGemmTile(m, 128, 128, 8, 4, 3)
    if rows <= 96:
        return GroupedGemmTile(64, 64, 64, 8, 4, 4), GroupedGemmTile(64, 128, 64, 8, 4, 4)
    return GroupedGemmTile(128, 128, 64, 8, 8, 3), GroupedGemmTile(128, 256, 64, 8, 8, 3)


@functools.cache
def _grouped_hopper_module() -> Any:
    """The products with loaders, if this Triton has Gluon."""
    try:
        return import_module("quire.kernels.gpu.moe.grouped_gemm_hopper")
    except ImportError:
        return None


def _use_hopper(
    x: Tensor, second: Tensor, gate: ExpertActivation, rows: float
) -> tuple[bool, bool]:
    """Which of the two products use a loader."""
    if rows < min(HOPPER_MIN_ROWS) or x.is_cpu or _grouped_hopper_module() is None:
        return False, False
    takes = _grouped_hopper_module().supports(x, second, gate)
    return takes and rows >= HOPPER_MIN_ROWS[0], takes and rows >= HOPPER_MIN_ROWS[1]


def _body_of(bank: object) -> Any:
    """The module of the kernels of a bank that is not a tensor; None: of a tensor, or none has."""
    if isinstance(bank, Fp8ExpertWeights):
        return moe_fp8
    return moe_grouped if isinstance(bank, TiledExperts) else None


def outputs(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Any,
    down: Any,
    gate: ExpertActivation,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    absent: bool = False,
) -> Any:
    if body := _body_of(gate_up):
        if gate.kind == "relu2":
            return NotImplemented
        fits = body.supports(x, gate_up, down) and ids.is_contiguous() and weights.is_contiguous()
        return torch.empty(x.shape, dtype=x.dtype, device=x.device) if fits else NotImplemented
    plain = all(
        isinstance(t, Tensor) and t.is_contiguous() and t.dtype == x.dtype for t in (gate_up, down)
    )
    if not plain or x.stride(1) != 1 or not ids.is_contiguous() or not weights.is_contiguous():
        return NotImplemented
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def launch(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Any,
    down: Any,
    gate: ExpertActivation,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    absent: bool = False,
) -> None:
    if body := _body_of(gate_up):
        if len(x):
            pairs = body.expert_outputs(x, ids, gate_up, down, gate, gate_up_bias, down_bias)
            weighted_sum(out, pairs, weights, ids if absent else None)
    elif 0 < len(x) <= MAX_SMALL_M:
        experts_small_m(out, x, ids, weights, gate_up, down, gate, gate_up_bias, down_bias, absent)
    elif len(x):
        experts_sorted(out, x, ids, weights, gate_up, down, gate, gate_up_bias, down_bias, absent)


def experts_sorted(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    gate: ExpertActivation,
    first_bias: Tensor | None,
    second_bias: Tensor | None,
    absent: bool = False,
) -> None:
    """moe_experts over many rows."""
    (tokens, top), (experts, size, width) = ids.shape, second.shape
    rows = tokens * top / experts
    one, two = plan_tiles(rows, x.element_size())
    loaders = _use_hopper(x, second, gate, rows)
    order, starts = sort_by_expert(ids, experts)
    tiles = (
        _grouped_hopper_module().build_tile_table(starts, tokens * top) if any(loaders) else None
    )
    h = x.new_empty((tokens * top, width))
    if loaders[0]:
        _grouped_hopper_module().gate_up(h, x, order, tiles, first, first_bias, gate, top)
    else:
        gate_up(h, x, order, starts, first, first_bias, gate, top, one)
    y = x.new_empty((tokens * top, size))
    if loaders[1]:
        _grouped_hopper_module().down(y, h, order, tiles, second, second_bias)
    else:
        down(y, h, order, starts, second, second_bias, two)
    weighted_sum(out, y, weights, ids if absent else None)


def weighted_sum(out: Tensor, y: Tensor, weights: Tensor, ids: Tensor | None) -> None:
    """out [T, E] = the outputs of each token's experts, y [T * k, E], by its weights [T, k].

    ids: where they are -1, y has nothing; None: nowhere.
    """
    (tokens, size), top = out.shape, weights.shape[1]
    wide = min(next_power_of_2(size), 1024)
    grid = (tokens, cdiv(size, wide), 1)
    pdl = not _sum.interpreted
    _sum(grid, (y, weights, ids, out), (), (size, top, wide, pdl), pdl=pdl)

"""Experts on the GPU: which launches make up the op, by the number of rows.

    few rows    up, down                          quire.kernels.gpu.moe_few
    more        sort, gate_up, down, sum          quire.kernels.gpu.{moe_sort,grouped_gemm}
    many        the products with loaders         quire.kernels.gpu.grouped_hopper

Every access to 16-bit weights is in those files; to e4m3 ones, in quire.kernels.gpu.moe_fp8.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.fp8 import Fp8Bank
from quire.kernels.gpu import moe_fp8
from quire.kernels.gpu.grouped_gemm import Tile, down, gate_up
from quire.kernels.gpu.moe_few import few
from quire.kernels.gpu.moe_sort import sort
from quire.kernels.gpu.sizes import cdiv, next_power_of_2
from quire.kernels.gpu.start import kernel
from quire.kernels.moe_experts import Gate

FEW = 4  # rows up to which pairs share too few experts for sorting to pay


@kernel()
def _sum(
    y_ptr,  # [T, TOP, E]
    weight_ptr,  # [T, TOP]
    out_ptr,  # [T, E] out
    E: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)  # T * TOP * E can pass 2**31
    es = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP):
        y = tl.load(y_ptr + (t * TOP + k) * E + es, es < E, 0.0).to(tl.float32)
        sums += tl.load(weight_ptr + t * TOP + k) * y
    tl.store(out_ptr + t * E + es, sums.to(out_ptr.dtype.element_ty), es < E)


WIDE = 24, 48
"""Rows an expert has on average from which each product is quickest with a loader of its own."""


def tiles_of(rows: float, item: int) -> tuple[Tile, Tile]:
    """Tiles of both products, by the rows an expert has on average."""
    if item > 2:  # float32 is for checking only
        return Tile(16, 32, 32, 8, 4, 2), Tile(16, 32, 32, 8, 4, 2)
    if rows <= 24:
        m = 16 if rows <= 8 else 32
        return Tile(m, 64, 128, 8, 4, 3), Tile(m, 128, 128, 8, 4, 3)
    if rows <= 96:
        return Tile(64, 64, 64, 8, 4, 4), Tile(64, 128, 64, 8, 4, 4)
    return Tile(128, 128, 64, 8, 8, 3), Tile(128, 256, 64, 8, 8, 3)


@functools.cache
def _hopper() -> Any:
    """The products with loaders, if this Triton has what they are written in."""
    try:
        return import_module("quire.kernels.gpu.grouped_hopper")
    except ImportError:
        return None


def _with_loaders(x: Tensor, second: Tensor, gate: Gate, rows: float) -> tuple[bool, bool]:
    """Which of the two products go that way."""
    if rows < min(WIDE) or not x.is_cuda or _hopper() is None:
        return False, False
    takes = _hopper().takes(x, second, gate)
    return takes and rows >= WIDE[0], takes and rows >= WIDE[1]


def outputs(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Any,
    down: Any,
    gate: Gate,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Any:
    if isinstance(gate_up, Fp8Bank):
        fits = moe_fp8.takes(x, gate_up, down) and ids.is_contiguous() and weights.is_contiguous()
        return torch.empty(x.shape, dtype=x.dtype, device=x.device) if fits else NotImplemented
    plain = all(t.is_contiguous() and t.dtype == x.dtype for t in (gate_up, down))
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
    gate: Gate,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> None:
    if isinstance(gate_up, Fp8Bank):
        if len(x):
            pairs = moe_fp8.pairs_of(x, ids, gate_up, down, gate, gate_up_bias, down_bias)
            weighted(out, pairs, weights)
    elif 0 < len(x) <= FEW:
        few(out, x, ids, weights, gate_up, down, gate, gate_up_bias, down_bias)
    elif len(x):
        sorted_rows(out, x, ids, weights, gate_up, down, gate, gate_up_bias, down_bias)


def sorted_rows(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    gate: Gate,
    first_bias: Tensor | None,
    second_bias: Tensor | None,
) -> None:
    """moe_experts over many rows."""
    (tokens, top), (experts, size, width) = ids.shape, second.shape
    rows = tokens * top / experts
    one, two = tiles_of(rows, x.element_size())
    loaders = _with_loaders(x, second, gate, rows)
    order, starts = sort(ids, experts)
    tiles = _hopper().table(starts, tokens * top) if any(loaders) else None
    h = x.new_empty((tokens * top, width))
    if loaders[0]:
        _hopper().gate_up(h, x, order, tiles, first, first_bias, gate, top)
    else:
        gate_up(h, x, order, starts, first, first_bias, gate, top, one)
    y = x.new_empty((tokens * top, size))
    if loaders[1]:
        _hopper().down(y, h, order, tiles, second, second_bias)
    else:
        down(y, h, order, starts, second, second_bias, two)
    weighted(out, y, weights)


def weighted(out: Tensor, y: Tensor, weights: Tensor) -> None:
    """out [T, E] = what the experts of each token say, y [T * k, E], by its weights [T, k]."""
    (tokens, size), top = out.shape, weights.shape[1]
    wide = min(next_power_of_2(size), 1024)
    grid = (tokens, cdiv(size, wide), 1)
    pdl = not _sum.interpreted
    _sum(grid, (y, weights, out), (), (size, top, wide, pdl), pdl=pdl)

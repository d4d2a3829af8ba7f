"""Combination of attention slices on the GPU: one program for each head and some queries."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.attention.online_softmax import LOG2E, LOWEST_SCORE
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2

ELEMENTS = 2048  # of a result that a program has at a time


@kernel("queries")
def combine_kernel(
    parts_ptr,  # [R, H, S, D + 1] fp32
    sinks_ptr,  # [H], if SINKS
    out_ptr,  # [S, H, D]
    queries,
    R: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,  # power of two >= D
    M: tl.constexpr,  # queries of a program
    SINKS: tl.constexpr,
):
    h = tl.program_id(0)
    s = tl.program_id(1) * M + tl.arange(0, M)
    d = tl.arange(0, DP)
    live = s < queries
    mask = live[:, None] & (d < D)[None, :]
    top = tl.full([M], LOWEST_SCORE, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    for r in tl.static_range(R):
        at = ((r * H + h) * queries + s).to(tl.int64) * (D + 1)
        its_sum = tl.load(parts_ptr + at + D, mask=live, other=LOWEST_SCORE)
        some = tl.load(parts_ptr + at[:, None] + d[None, :], mask=mask, other=0.0)
        higher = tl.maximum(top, its_sum)
        shrink = tl.exp2(top - higher)
        weight = tl.exp2(its_sum - higher)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + some * weight[:, None]
        top = higher
    if SINKS:
        sink = tl.load(sinks_ptr + h).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.exp2(sink - higher)
        acc = acc * shrink[:, None]
    y = acc / tl.where(total > 0, total, 1.0)[:, None]
    where = (s.to(tl.int64) * H + h)[:, None] * D + d[None, :]
    tl.store(out_ptr + where, y.to(out_ptr.dtype.element_ty), mask=mask)


def outputs(parts: Tensor, dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
    if not parts.is_contiguous():
        return NotImplemented
    _, heads, queries, size = parts.shape
    return torch.empty((queries, heads, size - 1), dtype=dtype, device=parts.device)


def launch(out: Tensor, parts: Tensor, dtype: torch.dtype, sinks: Tensor | None = None) -> None:
    ranks, heads, queries, size = parts.shape
    padded = next_power_of_2(size - 1)
    each = max(1, min(ELEMENTS // padded, 4))
    combine_kernel(
        (heads, cdiv(queries, each), 1),
        (parts, sinks, out),
        (queries,),
        (ranks, heads, size - 1, padded, each, sinks is not None),
        warps=4,
    )

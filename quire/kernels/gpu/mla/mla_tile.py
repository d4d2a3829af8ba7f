"""MLA inner loop: a tile of query rows sweeps over the latents of one sequence.

All heads share the latents, so a tile packs heads (and queries, where there are few heads) into
its rows: that is what fills the matrix units. A block of latents is loaded once and used twice,
as keys and, but for its rotated part, as values.

Axes: M query rows of the tile, BN latents at a time, L compressed size, R rotated size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class MLATile(NamedTuple):
    """Split of a kernel."""

    rows: int
    latents: int  # at a time
    warps: int
    stages: int


def dot_precision(dtype: torch.dtype) -> str:
    """float32 stays float32; tensor cores support no other choice."""
    return "ieee" if dtype == torch.float32 else "tf32"


def latent_constants(
    q: Tensor, q_rope: Tensor, cache: Tensor, tables: Tensor, rows: Tensor | None
) -> tuple[int | bool, ...]:
    """The constants that kernels over latents begin with."""
    return (
        q.shape[1],
        q.shape[2],
        q_rope.shape[2],
        q.stride(0),
        q.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        cache.stride(0),
        tables.stride(0),
        cache.shape[3],
        rows is not None,
    )


@triton.jit
def sequence_of(tile, starts_ptr, first, sequences, BQ: tl.constexpr):
    """The sequence, from `first` on, that a tile of BQ queries belongs to, and its first tile.

    Tiles are counted as if each sequence began a new one where it starts: no table is needed.
    """
    origin = tl.load(starts_ptr + first)
    low = first
    high = sequences - 1
    while low < high:  # the last sequence whose tiles begin at or before this one
        middle = (low + high + 1) // 2
        begins = (tl.load(starts_ptr + middle) - origin) // BQ + (middle - first)
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle - 1)
    start = tl.load(starts_ptr + low) - origin
    return low, start, tl.load(starts_ptr + low + 1) - origin - start, start // BQ + (low - first)


@triton.jit
def attend_latents(
    q,  # [M, L]
    q_rope,  # [M, R]
    cache_ptr,
    table_ptr,  # of the sequence
    start,
    end,  # latents [start, end) are swept
    seen,  # [M]: row m attends to the first seen[m] latents
    scale,  # times log2(e)
    STRIDE_N: tl.constexpr,
    B: tl.constexpr,
    M: tl.constexpr,
    BN: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns (sums [M, L] not yet divided, largest score [M] in powers of 2, divisor [M])."""
    c = tl.arange(0, L)
    r = tl.arange(0, R)
    n = tl.arange(0, BN)
    best = tl.full([M], -1e30, tl.float32)  # finite: a row without latents gives 0, not NaN
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, L], tl.float32)
    for at in range(start, end, BN):
        token = at + n
        live = token < end  # values beyond may be stale, NaN included
        block = tl.load(table_ptr + token // B, mask=live, other=0)
        row = block.to(tl.int64) * STRIDE_N + (token % B) * (L + R)  # the pool can pass 2**31
        row = tl.multiple_of(row, 16)
        k = tl.load(cache_ptr + row[:, None] + c[None, :], mask=live[:, None], other=0.0)
        k_rope = tl.load(cache_ptr + row[:, None] + L + r[None, :], mask=live[:, None], other=0.0)
        s = tl.dot(q_rope, tl.trans(k_rope), input_precision=PRECISION)
        s = tl.dot(q, tl.trans(k), acc=s, input_precision=PRECISION)
        s = tl.where(token[None, :] < seen[:, None], s * scale, float("-inf"))
        higher = tl.maximum(best, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(k.dtype), k, acc=acc, input_precision=PRECISION)
        best = higher
    return acc, best, total

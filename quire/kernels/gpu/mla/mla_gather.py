"""Latent gather kernel: copies latents out of the paged cache to compute keys and values.

    grid (tiles of positions, sequences)

Axes: as in quire.kernels.mla_attention; C positions of a tile.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv

POSITIONS = 16


@kernel("first", "low", "window")
def _gather(
    cache_ptr,
    tables_ptr,
    starts_ptr,
    contexts_ptr,
    rows_ptr,
    out_ptr,  # [sequences * window, L + R]
    first,
    low,
    window,
    L: tl.constexpr,
    R: tl.constexpr,
    STRIDE_N: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    B: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    C: tl.constexpr,
):
    s = first + tl.program_id(1)
    i = tl.program_id(0) * C + tl.arange(0, C)
    queries = tl.load(starts_ptr + s + 1) - tl.load(starts_ptr + s)
    past = tl.load(contexts_ptr + s) - queries
    real = (i < window) & (low + i < past)
    table = s.to(tl.int64)
    if HAS_ROWS:
        table = tl.load(rows_ptr + s).to(tl.int64)
    token = low + i
    block = tl.load(tables_ptr + table * TABLE_ROW + token // B, mask=real, other=0)
    row = block.to(tl.int64) * STRIDE_N + (token % B) * (L + R)  # the pool can pass 2**31
    to = (tl.program_id(1).to(tl.int64) * window + i) * (L + R)
    c = tl.arange(0, L)
    r = L + tl.arange(0, R)
    x = tl.load(cache_ptr + row[:, None] + c[None, :], mask=real[:, None], other=0.0)
    tl.store(out_ptr + to[:, None] + c[None, :], x, mask=real[:, None])
    x = tl.load(cache_ptr + row[:, None] + r[None, :], mask=real[:, None], other=0.0)
    tl.store(out_ptr + to[:, None] + r[None, :], x, mask=real[:, None])


def gather_latents(
    out: Tensor,
    rotated: int,
    cache: Tensor,
    tables: Tensor,
    q_starts: Tensor,
    contexts: Tensor,
    rows: Tensor | None,
    first: int,
    low: int,
    window: int,
) -> None:
    """Positions [low, low + window) before the step, of each sequence from `first` on, to `out`.

    out: [sequences * window, L + R]; rows of positions past a sequence stay as they are.
    """
    consts = (out.shape[1] - rotated, rotated, cache.stride(0), tables.stride(0), cache.shape[3])
    _gather(
        (cdiv(window, POSITIONS), contexts.shape[0] - first, 1),
        (cache, tables, q_starts, contexts, rows, out),
        (first, low, window),
        (*consts, rows is not None, POSITIONS),
    )

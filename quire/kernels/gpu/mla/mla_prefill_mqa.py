"""MLA prefill over cached latents: rows of prompts and chunks in tiles of queries times heads.

    grid (head tiles, query tiles)

For sequences with a few queries each, computed like decoding rows, for steps of any number.

Axes: as in quire.kernels.mla_attention; T here counts the tokens of these sequences only.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.mla.mla_tile import (
    MLATile,
    attend_latents,
    dot_precision,
    latent_constants,
    sequence_of,
)
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2


@kernel("scale", "first", "sequences")
def _prefill_mqa_kernel(
    q_ptr,  # [T, H, L]
    rope_ptr,  # [T, H, R]
    cache_ptr,
    tables_ptr,
    starts_ptr,
    contexts_ptr,
    rows_ptr,
    out_ptr,  # [T, H, L]
    scale,
    first,  # sequence; those before it decode
    sequences,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    ROPE_ROW: tl.constexpr,
    ROPE_HEAD: tl.constexpr,
    STRIDE_N: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    B: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BQ: tl.constexpr,  # queries of a tile
    BH: tl.constexpr,  # heads of a tile
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of queries and heads. The last tiles go first: they are the longest."""
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    s, q_start, queries, tiles = sequence_of(tile, starts_ptr, first, sequences, BQ)
    query = (tile - tiles) * BQ
    past = tl.load(contexts_ptr + s) - queries
    if query < queries:
        m = tl.arange(0, BQ * BH)
        i = query + m // BH
        h = tl.program_id(0) * BH + m % BH
        c = tl.arange(0, L)
        r = tl.arange(0, R)
        real = (i < queries) & (h < H)
        t = (q_start + i).to(tl.int64)
        q_at = t * Q_ROW + h * Q_HEAD
        q = tl.load(q_ptr + q_at[:, None] + c[None, :], mask=real[:, None], other=0.0)
        rope_at = t * ROPE_ROW + h * ROPE_HEAD
        q_rope = tl.load(rope_ptr + rope_at[:, None] + r[None, :], mask=real[:, None], other=0.0)
        table = s.to(tl.int64)
        if HAS_ROWS:
            table = tl.load(rows_ptr + s).to(tl.int64)
        end = past + tl.minimum(query + BQ, queries)
        seen = past + i + 1
        acc, _, total = attend_latents(
            q, q_rope, cache_ptr, tables_ptr + table * TABLE_ROW, 0, end, seen, scale,
            STRIDE_N, B, BQ * BH, BN, L, R, PRECISION,
        )  # fmt: skip
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        at = t * H + h
        to = out_ptr + at[:, None] * L + c[None, :]
        tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=real[:, None])


def prefill_mqa(
    out: Tensor,
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    tables: Tensor,
    q_starts: Tensor,
    contexts: Tensor,
    log_scale: float,
    rows: Tensor | None,
    first: int,
    tile: MLATile | None = None,
) -> None:
    """The sequences from `first` on. q, q_rope, out: of their tokens."""
    heads = q.shape[1]
    tile = tile or mqa_tile(q.dtype.itemsize)
    each = min(tile.rows, next_power_of_2(heads))
    queries = tile.rows // each
    sequences = contexts.shape[0]
    tiles = q.shape[0] // queries + (sequences - first)
    _prefill_mqa_kernel(
        (cdiv(heads, each), tiles, 1),
        (q, q_rope, cache, tables, q_starts, contexts, rows, out),
        (log_scale, first, sequences),
        (
            *latent_constants(q, q_rope, cache, tables, rows),
            queries,
            each,
            tile.latents,
            dot_precision(q.dtype),
        ),
        warps=tile.warps,
        stages=tile.stages,
    )


def mqa_tile(itemsize: int) -> MLATile:
    """Rows are queries times heads: always enough of them for a warpgroup."""
    return MLATile(16, 16, 4, 2) if itemsize == 4 else MLATile(64, 64, 8, 3)

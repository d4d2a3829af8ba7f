"""Latent attention on the GPU: decode rows split along the context, other rows in tiles of queries.

    decode    grid (head tiles, sequences, splits); with several splits, parts are merged after
    others    grid (head tiles, query tiles); a tile finds its sequence in q_starts

How many splits there are depends on the number of rows only, since a captured graph is replayed
for contexts of any length; each program finds its share in `contexts`, and may have none.

Axes: as in quire.kernels.mla_attention; M query rows of a tile, X splits.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.mla_tile import sweep
from quire.kernels.gpu.start import kernel

SHORTEST = 128
"""Latents that are worth a program of their own."""
MOST_SPLITS = 64


class Tile(NamedTuple):
    """How a kernel is cut."""

    heads: int  # of a tile
    latents: int  # at a time
    warps: int
    stages: int


@kernel("scale", "splits")
def _decode(
    q_ptr,  # [T, H, L]
    rope_ptr,  # [T, H, R]
    cache_ptr,
    tables_ptr,
    contexts_ptr,
    rows_ptr,
    out_ptr,  # [T, H, L]
    part_ptr,  # [T, X, H, L] float32 where there are splits
    weight_ptr,  # [T, X, H] float32
    scale,
    splits,
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
    M: tl.constexpr,
    BN: tl.constexpr,
    WHOLE: tl.constexpr,  # one split
    LEAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    s = tl.program_id(1).to(tl.int64)
    x = tl.program_id(2)
    context = tl.load(contexts_ptr + s)
    share = tl.cdiv(tl.maximum(tl.cdiv(context, splits), LEAST), BN) * BN
    start = x * share
    end = tl.minimum(start + share, context)
    if WHOLE or start < end:
        h = tl.program_id(0) * M + tl.arange(0, M)
        c = tl.arange(0, L)
        r = tl.arange(0, R)
        real = h[:, None] < H
        q = tl.load(q_ptr + s * Q_ROW + h[:, None] * Q_HEAD + c[None, :], mask=real, other=0.0)
        rope_at = rope_ptr + s * ROPE_ROW + h[:, None] * ROPE_HEAD + r[None, :]
        q_rope = tl.load(rope_at, mask=real, other=0.0)
        table = s
        if HAS_ROWS:
            table = tl.load(rows_ptr + s).to(tl.int64)
        seen = tl.full([M], 0, tl.int32) + context
        acc, best, total = sweep(
            q, q_rope, cache_ptr, tables_ptr + table * TABLE_ROW, start, end, seen, scale,
            STRIDE_N, B, M, BN, L, R, PRECISION,
        )  # fmt: skip
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        if WHOLE:
            tl.store(
                out_ptr + (s * H + h[:, None]) * L + c[None, :],
                acc.to(out_ptr.dtype.element_ty),
                mask=real,
            )
        else:
            at = (s * splits + x) * H + h
            tl.store(part_ptr + at[:, None] * L + c[None, :], acc, mask=real)
            tl.store(weight_ptr + at, best + tl.log2(total), mask=h < H)


@kernel("splits")
def _merge(
    part_ptr,
    weight_ptr,
    contexts_ptr,
    out_ptr,
    splits,
    H: tl.constexpr,
    L: tl.constexpr,
    BN: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Sum the parts of one head, each by its share of the whole softmax."""
    s = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0)
    context = tl.load(contexts_ptr + s)
    share = tl.cdiv(tl.maximum(tl.cdiv(context, splits), LEAST), BN) * BN
    parts = tl.cdiv(context, share)
    x = tl.arange(0, MOST)
    c = tl.arange(0, L)
    at = s * splits * H + h
    weights = tl.load(weight_ptr + at + x * H, mask=x < parts, other=float("-inf"))
    highest = tl.maximum(tl.max(weights, 0), -1e30)
    total = tl.sum(tl.exp2(weights - highest), 0)
    acc = tl.zeros([L], tl.float32)
    for i in range(parts):
        weight = tl.exp2(tl.load(weight_ptr + at + i * H) - highest)
        acc += weight * tl.load(part_ptr + (at + i * H) * L + c)
    acc = acc / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + (s * H + h) * L + c, acc.to(out_ptr.dtype.element_ty))


@kernel("scale", "first", "sequences")
def _others(
    q_ptr,
    rope_ptr,
    cache_ptr,
    tables_ptr,
    starts_ptr,
    contexts_ptr,
    rows_ptr,
    out_ptr,
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
    origin = tl.load(starts_ptr + first)
    low = first
    high = sequences - 1
    while low < high:  # the last sequence whose tiles begin at or before this one
        middle = (low + high + 1) // 2
        begins = (tl.load(starts_ptr + middle) - origin) // BQ + (middle - first)
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle - 1)
    s = low
    q_start = tl.load(starts_ptr + s)
    queries = tl.load(starts_ptr + s + 1) - q_start
    query = (tile - ((q_start - origin) // BQ + (s - first))) * BQ
    context = tl.load(contexts_ptr + s)
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
        seen = context - queries + i + 1
        end = context - queries + tl.minimum(query + BQ, queries)
        acc, _, total = sweep(
            q, q_rope, cache_ptr, tables_ptr + table * TABLE_ROW, 0, end, seen, scale,
            STRIDE_N, B, BQ * BH, BN, L, R, PRECISION,
        )  # fmt: skip
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_at = (t * H + h) * L
        tl.store(
            out_ptr + out_at[:, None] + c[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=real[:, None],
        )


def outputs(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    tables: Tensor,
    q_starts: Tensor,
    contexts: Tensor,
    scale: float,
    rows: Tensor | None = None,
    decodes: int = 0,
) -> Tensor:
    """[T, H, L]. Sizes must be powers of two for the tiles, a cache of the queries' dtype."""
    latent, rotated = q.shape[2], q_rope.shape[2]
    for size in (latent, rotated, cache.shape[3]):
        if size < 16 or size & (size - 1):
            return NotImplemented
    if latent > 512 or cache.dtype != q.dtype or q_rope.dtype != q.dtype:
        return NotImplemented
    if q.stride(2) != 1 or q_rope.stride(2) != 1 or not cache.is_contiguous():
        return NotImplemented
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def launch(
    out: Tensor,
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    tables: Tensor,
    q_starts: Tensor,
    contexts: Tensor,
    scale: float,
    rows: Tensor | None = None,
    decodes: int = 0,
) -> None:
    sequences = contexts.shape[0]
    log_scale = scale * math.log2(math.e)
    if decodes:
        decode(out, q, q_rope, cache, tables, contexts, log_scale, rows, decodes)
    if decodes < sequences:
        others(out, q, q_rope, cache, tables, q_starts, contexts, log_scale, rows, decodes)


def decode(
    out: Tensor,
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    tables: Tensor,
    contexts: Tensor,
    log_scale: float,
    rows: Tensor | None,
    count: int,
    tile: Tile | None = None,
    splits: int | None = None,
) -> None:
    """The first `count` sequences, of one query each. tile, splits: for measurements."""
    heads, latent = q.shape[1:]
    tile = tile or decode_tile(heads, latent, q.dtype.itemsize)
    programs = triton.cdiv(heads, tile.heads) * count
    splits = splits or splits_of(programs, _multiprocessors(q.device.index))
    part = weight = None
    if splits > 1:
        both = torch.empty(
            count * splits * heads * (latent + 1), dtype=torch.float32, device=q.device
        )
        part, weight = both[: count * splits * heads * latent], both[-count * splits * heads :]
    _decode(
        (triton.cdiv(heads, tile.heads), count, splits),
        (q, q_rope, cache, tables, contexts, rows, out, part, weight),
        (log_scale, splits),
        (
            *_sizes(q, q_rope, cache, tables, rows),
            tile.heads,
            tile.latents,
            splits == 1,
            SHORTEST,
            precision(q.dtype),
        ),
        warps=tile.warps,
        stages=tile.stages,
    )
    if splits > 1:
        consts = (heads, latent, tile.latents, MOST_SPLITS, SHORTEST)
        _merge((heads, count, 1), (part, weight, contexts, out), (splits,), consts)


def others(
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
    tile: Tile | None = None,
) -> None:
    """The sequences from `first` on, each of any number of queries."""
    heads, latent = q.shape[1:]
    tile = tile or others_tile(heads, latent, q.dtype.itemsize)
    each = min(tile.heads, max(1, triton.next_power_of_2(heads)))
    queries = tile.heads // each
    sequences = contexts.shape[0]
    tiles = (q.shape[0] - first) // queries + (sequences - first)
    _others(
        (triton.cdiv(heads, each), tiles, 1),
        (q, q_rope, cache, tables, q_starts, contexts, rows, out),
        (log_scale, first, sequences),
        (
            *_sizes(q, q_rope, cache, tables, rows),
            queries,
            each,
            tile.latents,
            precision(q.dtype),
        ),
        warps=tile.warps,
        stages=tile.stages,
    )


def _sizes(
    q: Tensor, q_rope: Tensor, cache: Tensor, tables: Tensor, rows: Tensor | None
) -> tuple[int | bool, ...]:
    """The constants that both kernels begin with."""
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


def precision(dtype: torch.dtype) -> str:
    """float32 stays float32; others have no choice."""
    return "ieee" if dtype == torch.float32 else "tf32"


@functools.cache
def decode_tile(heads: int, latent: int, itemsize: int) -> Tile:
    """A warpgroup multiplies 64 rows at once; few heads leave the stream as the bound."""
    if itemsize == 4:
        return Tile(16, 16, 4, 2)
    if heads > 32:
        return Tile(64, 64, 8, 2)
    return Tile(16 if heads <= 16 else 32, 64, 4, 3)


@functools.cache
def others_tile(heads: int, latent: int, itemsize: int) -> Tile:
    """Rows here are queries times heads: always enough of them."""
    return Tile(16, 16, 4, 2) if itemsize == 4 else Tile(64, 64, 8, 2)


@functools.cache
def splits_of(programs: int, multiprocessors: int) -> int:
    """The number that leaves the fewest multiprocessors idle, merging held against it."""

    def time(splits: int) -> float:
        return -(-programs * splits // multiprocessors) / splits + 0.004 * splits

    return min(range(1, MOST_SPLITS + 1), key=time)


@functools.cache
def _multiprocessors(index: int | None) -> int:
    if index is None:  # the interpreter, on CPU tensors
        return 8
    return torch.cuda.get_device_properties(index).multi_processor_count

"""MLA decode kernel: decoding rows against cached latents, split along the context, then merged.

    grid (head tiles, sequences, splits)

The number of splits depends on the number of rows only, since a captured graph is replayed
for contexts of any length; each program finds its share in `contexts`, and may have none.

Axes: as in quire.kernels.mla_attention; M query rows of a tile, X splits.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import NamedTuple

import torch
import triton
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
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.target import gpu_target, sm_count

MIN_SPLIT_LATENTS = 128
"""Minimum of latents for a program of their own."""
MAX_SPLITS = 128


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
        acc, best, total = attend_latents(
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


@triton.jit
def merge_splits(part_ptr, weight_ptr, contexts_ptr, s, h, c, splits, H: tl.constexpr,
                 L: tl.constexpr, BN: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr,
                 BX: tl.constexpr):  # fmt: skip
    """(mean of channels c over the parts of a head, divisor, largest score): BX parts at a time.

    Each part counts by its share of the whole softmax.
    """
    context = tl.load(contexts_ptr + s)
    share = tl.cdiv(tl.maximum(tl.cdiv(context, splits), LEAST), BN) * BN
    parts = tl.cdiv(context, share)
    at = s * splits * H + h
    every = tl.arange(0, MOST)
    weights = tl.load(weight_ptr + at + every * H, mask=every < parts, other=float("-inf"))
    highest = tl.maximum(tl.max(weights, 0), -1e30)
    total = tl.sum(tl.exp2(weights - highest), 0)
    acc = tl.zeros(c.shape, tl.float32)
    for low in range(0, parts, BX):
        x = low + tl.arange(0, BX)
        there = x < parts
        weight = tl.load(weight_ptr + at + x * H, mask=there, other=float("-inf"))
        some = tl.load(
            part_ptr + (at + x[:, None] * H) * L + c[None, :], mask=there[:, None], other=0.0
        )
        acc += tl.sum(tl.exp2(weight - highest)[:, None] * some, 0)
    return acc / tl.where(total > 0, total, 1.0), total, highest


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
    BX: tl.constexpr,  # parts at a time
    BL: tl.constexpr,  # channels of a program
):
    """Sum the parts of one head, each by its share of the whole softmax."""
    s = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0)
    c = tl.program_id(2) * BL + tl.arange(0, BL)
    acc, _, _ = merge_splits(
        part_ptr, weight_ptr, contexts_ptr, s, h, c, splits, H, L, BN, MOST, LEAST, BX
    )
    tl.store(out_ptr + (s * H + h) * L + c, acc.to(out_ptr.dtype.element_ty))


@kernel("splits")
def _merge_from_latent(
    part_ptr,
    weight_ptr,
    contexts_ptr,
    up_ptr,  # [H, V, L], heads UP_HEAD apart
    out_ptr,  # [T, H * V]
    splits,
    H: tl.constexpr,
    L: tl.constexpr,
    V: tl.constexpr,
    UP_HEAD: tl.constexpr,
    BN: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    BX: tl.constexpr,  # parts at a time
    C: tl.constexpr,  # outputs of a program
):
    """For few rows: sum the parts of a head again for every few outputs, and continue."""
    s = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0)
    v = tl.program_id(2) * C + tl.arange(0, C)
    c = tl.arange(0, L)
    w_at = up_ptr + h * UP_HEAD + v[:, None] * L + c[None, :]
    w = tl.load(w_at, mask=v[:, None] < V, other=0.0)
    acc, _, _ = merge_splits(
        part_ptr, weight_ptr, contexts_ptr, s, h, c, splits, H, L, BN, MOST, LEAST, BX
    )
    mixed = acc.to(out_ptr.dtype.element_ty).to(tl.float32)  # as rounded by a store in between
    y = tl.sum(w.to(tl.float32) * mixed[None, :], 1)
    tl.store(out_ptr + (s * H + h) * V + v, y.to(out_ptr.dtype.element_ty), mask=v < V)


@kernel("first", "sequences")
def _expand_to_decode_rows_kernel(
    starts_ptr,
    contexts_ptr,
    rows_ptr,
    seen_ptr,  # [T] out
    place_ptr,  # [T] out
    first,
    sequences,
    HAS_ROWS: tl.constexpr,
):
    tile = tl.program_id(0)
    s, start, queries, tiles = sequence_of(tile, starts_ptr, first, sequences, 1)
    i = tile - tiles
    if i < queries:
        table = s
        if HAS_ROWS:
            table = tl.load(rows_ptr + s)
        tl.store(seen_ptr + start + i, tl.load(contexts_ptr + s) - queries + i + 1)
        tl.store(place_ptr + start + i, table)


def expand_to_decode_rows(
    tokens: int, q_starts: Tensor, contexts: Tensor, rows: Tensor | None, first: int
) -> tuple[Tensor, Tensor]:
    """(visible tokens, table) of each token from sequence `first` on, as if it decoded."""
    seen, place = contexts.new_empty(tokens), contexts.new_empty(tokens)
    sequences = contexts.shape[0]
    _expand_to_decode_rows_kernel(
        (tokens + sequences - first, 1, 1),
        (q_starts, contexts, rows, seen, place),
        (first, sequences),
        (rows is not None,),
        warps=1,
    )
    return seen, place


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
    tile: MLATile | None = None,
    splits: int | None = None,
    finish: tuple[Tensor, Tensor] | None = None,
) -> bool:
    """The first `count` sequences, of one query each. tile, splits: for measurements.

    finish: (out [T, H * V], values [H, V, L]). True: the result is in finish, and `out` is not
    to be read.
    """
    heads, latent = q.shape[1:]
    where = (cache, tables, contexts, log_scale, rows, count)
    tile, splits, part, weight = attend_splits(q, q_rope, *where, out, tile, splits)
    if splits > 1 and finish is not None:
        final, values = finish
        value = values.shape[1]
        _merge_from_latent(
            (heads, count, cdiv(value, 16)),
            (part, weight, contexts, values, final),
            (splits,),
            (
                heads,
                latent,
                value,
                values.stride(0),
                tile.latents,
                MAX_SPLITS,
                MIN_SPLIT_LATENTS,
                4,
                16,
            ),
        )
        return True
    if splits > 1:
        # a program waits for its loads more than it adds: many rows need no more programs than rows
        wide = latent if count * heads >= 1024 else min(latent, 128)
        consts = (heads, latent, tile.latents, MAX_SPLITS, MIN_SPLIT_LATENTS, 8, wide)
        grid = (heads, count, latent // wide)
        _merge(grid, (part, weight, contexts, out), (splits,), consts)
    return False


class DecodeSplits(NamedTuple):
    """Parts of a context, one for each split, before they are merged."""

    tile: MLATile
    splits: int
    part: Tensor | None  # float32 [T, X, H, L]; None: there is one split
    weight: Tensor | None  # float32 [T, X, H]


def attend_splits(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    tables: Tensor,
    contexts: Tensor,
    log_scale: float,
    rows: Tensor | None,
    count: int,
    out: Tensor | None = None,
    tile: MLATile | None = None,
    splits: int | None = None,
) -> DecodeSplits:
    """Attend the first `count` sequences, of one query each.

    out: [T, H, L], where the result goes if there is one split; None: there are two at least.
    """
    heads, latent = q.shape[1:]
    hopper = _decode_hopper_module(gpu_target(q.device).capability) if tile is None else None
    tile = tile or decode_tile(heads, q.dtype.itemsize)
    programs = cdiv(heads, tile.rows) * count
    splits = splits or num_splits(programs, tile.rows, sm_count(q.device))
    if out is None:
        splits = max(splits, 2)
    part = weight = None
    if splits > 1:
        both = torch.empty(
            count * splits * heads * (latent + 1), dtype=torch.float32, device=q.device
        )
        part, weight = both[: count * splits * heads * latent], both[-count * splits * heads :]
    to = q if out is None else out  # of the right dtype, and never written
    tensors = (to, part, weight, q, q_rope, cache, tables, contexts, rows)
    if hopper is not None and hopper.supports(q, q_rope, cache):
        hopper.launch(*tensors, log_scale, count, splits, tile.latents, MIN_SPLIT_LATENTS)
    else:
        _launch_portable(*tensors, log_scale, count, splits, tile)
    return DecodeSplits(tile, splits, part, weight)


def _launch_portable(
    out: Tensor,
    part: Tensor | None,
    weight: Tensor | None,
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    tables: Tensor,
    contexts: Tensor,
    rows: Tensor | None,
    log_scale: float,
    count: int,
    splits: int,
    tile: MLATile,
) -> None:
    _decode(
        (cdiv(q.shape[1], tile.rows), count, splits),
        (q, q_rope, cache, tables, contexts, rows, out, part, weight),
        (log_scale, splits),
        (
            *latent_constants(q, q_rope, cache, tables, rows),
            tile.rows,
            tile.latents,
            splits == 1,
            MIN_SPLIT_LATENTS,
            dot_precision(q.dtype),
        ),
        warps=tile.warps,
        stages=tile.stages,
    )


@functools.cache
def decode_tile(heads: int, itemsize: int) -> MLATile:
    """A warpgroup multiplies 64 rows at once; with few heads memory is the limit."""
    if itemsize == 4:
        return MLATile(16, 16, 4, 2)
    if heads > 32:
        return MLATile(64, 64, 8, 3)
    return MLATile(16 if heads <= 16 else 32, 32, 4, 5)


@functools.cache
def num_splits(programs: int, rows: int, multiprocessors: int) -> int:
    """The number that finishes first: waves of programs, and the cost of merging.

    programs: without splits, each of so many rows. Two small ones fit a multiprocessor at once.
    Splits that a short context does not need cost next to nothing.
    """
    slots = multiprocessors * (1 if rows > 32 else 2)

    def time(splits: int) -> float:
        merging = 5e-6 * programs * rows * splits if splits > 1 else 0.0
        return -(-programs * splits // slots) / splits + merging

    return min(range(1, MAX_SPLITS + 1), key=time)


@functools.cache
def _decode_hopper_module(capability: tuple[int, int]) -> ModuleType | None:
    """The kernel for Hopper, where there is one and this Triton can make it."""
    if capability[0] != 9:
        return None
    try:
        from quire.kernels.gpu.mla import mla_decode_hopper
    except ImportError:
        return None
    return (
        mla_decode_hopper if hasattr(mla_decode_hopper.gl, "thread_barrier") else None
    )  # an older Triton

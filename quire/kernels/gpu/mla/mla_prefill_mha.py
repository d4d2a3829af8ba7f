"""MLA prefill with computed keys and values: rows of prompts and chunks, multi-head attention.

    grid (heads, query tiles)

Ordinary attention, except that a key has two pieces: its own of each head, and the rotated one
that all heads share. Keys and values are rows of one matrix product, never separate. Tokens before
the step are read some at a time, with results in float32, and the step's own come last.

Axes: as in quire.kernels.mla_attention; T here counts the tokens of these sequences only; M query
rows of a tile, BN keys at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.mla.mla_tile import MLATile, dot_precision, sequence_of
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2


@triton.jit
def _attend_keys(
    acc,
    best,
    total,
    q,
    q_rope,
    kv_ptr,  # of the sequence's first token and this head
    rotated_ptr,  # of the sequence's first token
    start,
    end,
    query,  # of the tile's first row
    count,  # keys there are
    scale,
    P: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    PP: tl.constexpr,
    VP: tl.constexpr,
    RP: tl.constexpr,
    KV_ROW: tl.constexpr,
    LATENT_ROW: tl.constexpr,
    M: tl.constexpr,
    BN: tl.constexpr,
    DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    p = tl.arange(0, PP)
    v = tl.arange(0, VP)
    r = tl.arange(0, RP)
    row = query + tl.arange(0, M)
    for at in range(start, end, BN):
        n = at + tl.arange(0, BN)
        here = n.to(tl.int64)  # tokens times heads times sizes can pass 2**31
        there = n[:, None] < count
        k_at = kv_ptr + here[:, None] * KV_ROW + p[None, :]
        k = tl.load(k_at, mask=there & (p[None, :] < P), other=0.0)
        rotated_at = rotated_ptr + here[:, None] * LATENT_ROW + r[None, :]
        rotated = tl.load(rotated_at, mask=there & (r[None, :] < R), other=0.0)
        s = tl.dot(q_rope, tl.trans(rotated), input_precision=PRECISION)
        s = tl.dot(q, tl.trans(k), acc=s, input_precision=PRECISION) * scale
        if DIAGONAL:
            s = tl.where(n[None, :] <= row[:, None], s, float("-inf"))
        else:
            s = tl.where(n[None, :] < count, s, float("-inf"))
        higher = tl.maximum(best, tl.max(s, 1))
        weights = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        value_at = kv_ptr + here[:, None] * KV_ROW + P + v[None, :]
        value = tl.load(value_at, mask=there & (v[None, :] < V), other=0.0)
        acc = tl.dot(weights.to(value.dtype), value, acc=acc, input_precision=PRECISION)
        best = higher
    return acc, best, total


@kernel("scale", "first", "sequences", "low", "window")
def _prefill_mha_kernel(
    q_ptr,  # [T, H, P]
    rope_ptr,  # [T, H, R]
    kv_ptr,  # [T or sequences * window, H, P + V]
    rotated_ptr,  # as many rows of [R], LATENT_ROW apart
    starts_ptr,
    contexts_ptr,
    out_ptr,  # [T, H * V]
    sum_ptr,  # [T, H * V] float32, with weight_ptr [T, H] float32: results of other keys so far
    weight_ptr,
    scale,
    first,  # sequence; those before it decode
    sequences,
    low,  # PAST: the keys are positions [low, low + window) of each sequence
    window,
    H: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    PP: tl.constexpr,  # powers of two
    VP: tl.constexpr,
    RP: tl.constexpr,
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    ROPE_ROW: tl.constexpr,
    ROPE_HEAD: tl.constexpr,
    LATENT_ROW: tl.constexpr,
    PAST: tl.constexpr,  # keys of tokens before the step; else the step's own
    GO_ON: tl.constexpr,  # start from sum_ptr
    M: tl.constexpr,
    BN: tl.constexpr,  # divides M
    PRECISION: tl.constexpr,
):
    """One tile of queries of one head. The last tiles go first: they are the longest."""
    KV_ROW: tl.constexpr = H * (P + V)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    h = tl.program_id(0)
    s, q_start, queries, tiles = sequence_of(tile, starts_ptr, first, sequences, M)
    query = (tile - tiles) * M
    if query < queries:
        m = query + tl.arange(0, M)
        p = tl.arange(0, PP)
        r = tl.arange(0, RP)
        v = tl.arange(0, VP)
        t = q_start.to(tl.int64) + m  # tokens times heads times sizes can pass 2**31
        real = m[:, None] < queries
        q_at = q_ptr + t[:, None] * Q_ROW + h * Q_HEAD + p[None, :]
        q = tl.load(q_at, mask=real & (p[None, :] < P), other=0.0)
        rope_at = rope_ptr + t[:, None] * ROPE_ROW + h * ROPE_HEAD + r[None, :]
        q_rope = tl.load(rope_at, mask=real & (r[None, :] < R), other=0.0)
        out_at = (t[:, None] * H + h) * V + v[None, :]
        wanted = real & (v[None, :] < V)
        best = tl.full([M], -1e30, tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, VP], tl.float32)
        if GO_ON:
            before = tl.load(weight_ptr + t * H + h, mask=m < queries, other=float("-inf"))
            best = tl.maximum(before, best)
            total = tl.where(before > float("-inf"), 1.0, 0.0)
            acc = tl.load(sum_ptr + out_at, mask=wanted, other=0.0)
        if PAST:
            keys_at = (s - first).to(tl.int64) * window
            count = tl.minimum(tl.maximum(tl.load(contexts_ptr + s) - queries - low, 0), window)
        else:
            keys_at = q_start.to(tl.int64)
            count = queries
        keys = kv_ptr + keys_at * KV_ROW + h * (P + V)
        rotated = rotated_ptr + keys_at * LATENT_ROW
        acc, best, total = _attend_keys(
            acc, best, total, q, q_rope, keys, rotated, 0, count if PAST else query, query, count,
            scale, P, V, R, PP, VP, RP, KV_ROW, LATENT_ROW, M, BN, False, PRECISION,
        )  # fmt: skip
        if not PAST:
            end = tl.minimum(query + M, queries)
            acc, best, total = _attend_keys(
                acc, best, total, q, q_rope, keys, rotated, query, end, query, count, scale,
                P, V, R, PP, VP, RP, KV_ROW, LATENT_ROW, M, BN, True, PRECISION,
            )  # fmt: skip
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        if PAST:
            tl.store(sum_ptr + out_at, acc, mask=wanted)
            tl.store(weight_ptr + t * H + h, best + tl.log2(total), mask=m < queries)
        else:
            tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=wanted)


class ProjectedKV(NamedTuple):
    """Keys and values made of latents. low, window: of tokens before the step, see the kernel."""

    kv: Tensor  # [rows, H, P + V]
    rotated: Tensor  # [rows, R], may be strided
    low: int | None = None  # None: the step's own tokens
    positions: int = 0


class PartialAttention(NamedTuple):
    """Results of some of the keys, and their weight. begun: there are results."""

    sums: Tensor  # [T, H * V] float32
    weights: Tensor  # [T, H] float32
    started: bool


def prefill_mha(
    out: Tensor,
    running: PartialAttention | None,
    q: Tensor,
    q_rope: Tensor,
    keys: ProjectedKV,
    q_starts: Tensor,
    contexts: Tensor,
    log_scale: float,
    first: int,
    tile: MLATile | None = None,
) -> None:
    """The sequences from `first` on; out and queries: of their tokens.

    Results of tokens before the step are kept in `running`; the step's own write `out`.
    """
    tokens, heads, plain = q.shape
    rotation, value = q_rope.shape[2], keys.kv.shape[2] - plain
    tile = tile or mha_tile(q.dtype.itemsize)
    sequences = contexts.shape[0]
    sums, weights, begun = running or (None, None, False)
    _prefill_mha_kernel(
        (heads, tokens // tile.rows + (sequences - first), 1),
        (q, q_rope, keys.kv, keys.rotated, q_starts, contexts, out, sums, weights),
        (log_scale, first, sequences, keys.low or 0, keys.positions),
        (
            heads,
            plain,
            value,
            rotation,
            *(max(16, next_power_of_2(size)) for size in (plain, value, rotation)),
            q.stride(0),
            q.stride(1),
            q_rope.stride(0),
            q_rope.stride(1),
            keys.rotated.stride(0),
            keys.low is not None,
            begun,
            tile.rows,
            tile.latents,
            dot_precision(q.dtype),
        ),
        warps=tile.warps,
        stages=tile.stages,
    )


def mha_tile(itemsize: int) -> MLATile:
    """128 rows are two warpgroups' worth."""
    return MLATile(32, 32, 4, 2) if itemsize == 4 else MLATile(128, 64, 8, 3)

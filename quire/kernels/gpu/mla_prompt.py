"""Rows of prompts and chunks against the step's own tokens, whose keys and values have been made.

    grid (heads, query tiles)

An ordinary causal attention, but that a key is in two pieces: its own of each head, and the rotated
one that all heads share. Keys and values come as one matrix product's rows, never apart.

Axes: as in quire.kernels.mla_attention; T here counts the tokens of these sequences only; M query
rows of a tile, BN keys at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.mla_tile import Tile, precision, sequence_of
from quire.kernels.gpu.start import kernel


@triton.jit
def _sweep(
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
    queries,
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
        there = n[:, None] < queries
        k_at = kv_ptr + here[:, None] * KV_ROW + p[None, :]
        k = tl.load(k_at, mask=there & (p[None, :] < P), other=0.0)
        rotated_at = rotated_ptr + here[:, None] * LATENT_ROW + r[None, :]
        rotated = tl.load(rotated_at, mask=there & (r[None, :] < R), other=0.0)
        s = tl.dot(q_rope, tl.trans(rotated), input_precision=PRECISION)
        s = tl.dot(q, tl.trans(k), acc=s, input_precision=PRECISION) * scale
        if DIAGONAL:
            s = tl.where(n[None, :] <= row[:, None], s, float("-inf"))
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


@kernel("scale", "first", "sequences")
def _prompt(
    q_ptr,  # [T, H, P]
    rope_ptr,  # [T, H, R]
    kv_ptr,  # [T, H, P + V]
    rotated_ptr,  # [T, R], rows LATENT_ROW apart
    starts_ptr,
    out_ptr,  # [T, H * V]
    weight_ptr,  # [T, H] float32, if WEIGHTS
    scale,
    first,  # sequence; those before it decode
    sequences,
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
    WEIGHTS: tl.constexpr,
    M: tl.constexpr,
    BN: tl.constexpr,  # divides M
    PRECISION: tl.constexpr,
):
    """One tile of queries of one head. The last tiles go first: they are the longest."""
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    h = tl.program_id(0)
    _, q_start, queries, tiles = sequence_of(tile, starts_ptr, first, sequences, M)
    query = (tile - tiles) * M
    if query < queries:
        KV_ROW: tl.constexpr = H * (P + V)
        m = query + tl.arange(0, M)
        p = tl.arange(0, PP)
        r = tl.arange(0, RP)
        v = tl.arange(0, VP)
        origin = q_start.to(tl.int64)  # tokens times heads times sizes can pass 2**31
        t = origin + m
        real = m[:, None] < queries
        q_at = q_ptr + t[:, None] * Q_ROW + h * Q_HEAD + p[None, :]
        q = tl.load(q_at, mask=real & (p[None, :] < P), other=0.0)
        rope_at = rope_ptr + t[:, None] * ROPE_ROW + h * ROPE_HEAD + r[None, :]
        q_rope = tl.load(rope_at, mask=real & (r[None, :] < R), other=0.0)
        best = tl.full([M], -1e30, tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, VP], tl.float32)
        keys = kv_ptr + origin * KV_ROW + h * (P + V)
        rotated = rotated_ptr + origin * LATENT_ROW
        acc, best, total = _sweep(
            acc, best, total, q, q_rope, keys, rotated, 0, query, query, queries, scale,
            P, V, R, PP, VP, RP, KV_ROW, LATENT_ROW, M, BN, False, PRECISION,
        )  # fmt: skip
        end = tl.minimum(query + M, queries)
        acc, best, total = _sweep(
            acc, best, total, q, q_rope, keys, rotated, query, end, query, queries, scale,
            P, V, R, PP, VP, RP, KV_ROW, LATENT_ROW, M, BN, True, PRECISION,
        )  # fmt: skip
        acc = acc / total[:, None]
        to = out_ptr + (t[:, None] * H + h) * V + v[None, :]
        tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=real & (v[None, :] < V))
        if WEIGHTS:
            tl.store(weight_ptr + t * H + h, best + tl.log2(total), mask=m < queries)


@kernel()
def _join(
    out_ptr,  # [T, H * V], what the step's own tokens gave; and in the end everything
    own_ptr,  # [T, H] float32
    past_ptr,  # [T, S, V], what tokens before the step gave
    weight_ptr,  # [T, S] float32
    H: tl.constexpr,
    FIRST: tl.constexpr,  # head; S heads from it on
    S: tl.constexpr,
    SP: tl.constexpr,  # powers of two
    V: tl.constexpr,
    VP: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SP)
    v = tl.arange(0, VP)
    real = i < S
    own = tl.load(own_ptr + t * H + FIRST + i, mask=real, other=0.0)
    past = tl.load(weight_ptr + t * S + i, mask=real, other=float("-inf"))
    highest = tl.maximum(own, past)
    own = tl.exp2(own - highest)
    past = tl.exp2(past - highest)
    share = (past / (own + past))[:, None]
    both = real[:, None] & (v[None, :] < V)
    at = out_ptr + (t * H + FIRST + i[:, None]) * V + v[None, :]
    a = tl.load(at, mask=both, other=0.0).to(tl.float32)
    b = tl.load(past_ptr + (t * S + i[:, None]) * V + v[None, :], mask=both, other=0.0)
    b = tl.where(share > 0, b.to(tl.float32), 0.0)  # without a past its sum is anything
    tl.store(at, (a + (b - a) * share).to(out_ptr.dtype.element_ty), mask=both)


def prompt(
    out: Tensor,
    weight: Tensor | None,
    q: Tensor,
    q_rope: Tensor,
    kv: Tensor,
    rotated: Tensor,
    q_starts: Tensor,
    log_scale: float,
    first: int,
    tile: Tile | None = None,
) -> None:
    """The sequences from `first` on; all but q_starts: of their tokens. weight: to join by."""
    tokens, heads, plain = q.shape
    rotation = q_rope.shape[2]
    value = kv.shape[2] - plain
    tile = tile or tile_of(q.dtype.itemsize)
    sequences = q_starts.shape[0] - 1
    _prompt(
        (heads, tokens // tile.rows + (sequences - first), 1),
        (q, q_rope, kv, rotated, q_starts, out, weight),
        (log_scale, first, sequences),
        (
            heads,
            plain,
            value,
            rotation,
            *(max(16, triton.next_power_of_2(size)) for size in (plain, value, rotation)),
            q.stride(0),
            q.stride(1),
            q_rope.stride(0),
            q_rope.stride(1),
            rotated.stride(0),
            weight is not None,
            tile.rows,
            tile.latents,
            precision(q.dtype),
        ),
        warps=tile.warps,
        stages=tile.stages,
    )


def join(out: Tensor, own: Tensor, past: Tensor, weight: Tensor, first_head: int) -> None:
    """Add to out [T, H * V] what the past gave some of its heads [T, S, V], by the weights."""
    tokens, some, value = past.shape
    widths = (triton.next_power_of_2(some), value, triton.next_power_of_2(value))
    consts = (own.shape[1], first_head, some, *widths)
    _join((tokens, 1, 1), (out, own, past, weight), (), consts)


def tile_of(itemsize: int) -> Tile:
    """128 rows are two warpgroups' worth."""
    return Tile(32, 32, 4, 2) if itemsize == 4 else Tile(128, 64, 8, 3)

"""Fused decode attention of rows with drafts: head norms, rotation, cache write and attention.

As paged_attention_fused, for the packs of paged_attention_drafts. The keys of a sequence are those
that earlier steps have stored, which are split into ranges, and those of the step's own rows. The
program with the last range of a pack norms and rotates all of these up to the pack's last row,
attends to them from registers, and stores those of the pack: no program reads what another of the
kernel writes. So the first tile of the rest is loaded before the wait, under the same condition.

Axes: S rows, K kv heads, G query heads of one KV head, D head size, B block size, M = PACK * G.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.kv_cache import has_dense_heads
from quire.kernels.gpu.attention import paged_attention_fused
from quire.kernels.gpu.attention.kv_codes import CodeLayout
from quire.kernels.gpu.attention.norm_rope_write import QKNorm
from quire.kernels.gpu.attention.online_softmax import (
    begin_sums,
    dot_qk,
    online_softmax_step,
    scale_and_softcap,
)
from quire.kernels.gpu.attention.paged_attention_decode import (
    attend_range,
    find_program,
    load_tile,
    split_range,
)
from quire.kernels.gpu.attention.paged_attention_drafts import (
    MAX_CHAIN,
    MAX_PARTS,
    find_pack,
    pack_rows,
    store_or_merge_pack,
)
from quire.kernels.gpu.attention.paged_attention_fused import (
    norm_and_rotate,
    norm_weights,
    rotation_partner,
)
from quire.kernels.gpu.attention.split_plan import (
    AttentionExtras,
    allocate_split_workspace,
    plan_decode,
)
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import launch_dependents, wait_for_previous_kernel


@triton.jit
def _load_turns(angles_ptr, positions, real, D: tl.constexpr, R: tl.constexpr,
                INTERLEAVED: tl.constexpr):  # fmt: skip
    """Cosines and signed sines [M, D] of tokens whose positions are at [M] pointers."""
    d = tl.arange(0, D)
    position = tl.load(positions, mask=real, other=0).to(tl.int64)
    half = d // 2 if INTERLEAVED else d % (R // 2)
    angles = angles_ptr + position[:, None] * R + half[None, :]
    turns = (d < R)[None, :] & real[:, None]
    cos = tl.load(angles, turns, 1.0)
    sin = tl.load(angles + R // 2, turns, 0.0)
    low = d % 2 == 0 if INTERLEAVED else d < R // 2
    return cos, tl.where(low[None, :], -sin, sin)


@triton.jit
def _load_pairs(x_ptr, places, real, D: tl.constexpr, R: tl.constexpr,
                INTERLEAVED: tl.constexpr):  # fmt: skip
    """Heads at `places` unchanged, [M, D], and the same with each channel's pair in its place."""
    d = tl.arange(0, D)
    a = tl.load(x_ptr + places[:, None] + d[None, :], mask=real[:, None], other=0.0)
    partner = rotation_partner(d, D, R, INTERLEAVED)
    return a, tl.load(x_ptr + places[:, None] + partner[None, :], mask=real[:, None], other=0.0)


@triton.jit
def _attend(q, k, v, at, end, live, acc, total, top, scale, softcap, window,
            WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, IEEE: tl.constexpr):  # fmt: skip
    """Absorb keys at positions `at`, [N], which row m sees if they are before end[m]."""
    dot = dot_qk(q, k, at, False, IEEE)
    scores = scale_and_softcap(dot, scale, softcap, SOFTCAP)
    seen = live[None, :] & (at[None, :] < end[:, None])
    if WINDOW:
        seen = seen & (at[None, :] >= end[:, None] - window)
    scores = tl.where(seen, scores, float("-inf"))
    return online_softmax_step(scores, v, at, acc, total, top, False, IEEE)


@kernel("scale", "softcap", "window", "splits", "q_eps", "k_eps", "q_offset", "k_offset")
def fused_draft_kernel(
    q_ptr,  # [S, K * G, D], the projection's output
    k_ptr,  # [S, K, D]
    v_ptr,  # [S, K, D]
    positions_ptr,  # [S] int32
    angles_ptr,  # [P, R] fp32
    q_weight,  # [D], if NORM
    k_weight,
    slots_ptr,  # [S] int64
    cache_ptr,  # [N, 2, K, B, D], heads HEAD apart
    tables_ptr,  # [M, W]
    rows_ptr,  # [S] row of the table
    contexts_ptr,  # [S]
    out_ptr,  # [S, K * G, D]
    part_ptr,  # [S, K, splits, G, D] fp32, if SPLIT
    stats_ptr,  # [S, K, splits, 2, G] fp32: maximum, sum
    done_ptr,  # [S * K] int32, zeros before and after
    sinks_ptr,  # [K * G]
    scale,
    softcap,
    window,
    splits,
    q_eps,
    k_eps,
    q_offset,
    k_offset,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,  # leading channels that are rotated; the rest turn by nothing
    B: tl.constexpr,
    HEAD: tl.constexpr,
    Q_T: tl.constexpr,
    Q_H: tl.constexpr,
    K_T: tl.constexpr,
    K_H: tl.constexpr,
    V_T: tl.constexpr,
    V_H: tl.constexpr,
    W: tl.constexpr,  # of a row of the table
    PACK: tl.constexpr,  # power of two
    BACK: tl.constexpr,
    M: tl.constexpr,  # power of two >= max(PACK * G, 16)
    TILE: tl.constexpr,  # keys a turn
    CHUNK: tl.constexpr,  # keys in a stretch, at least
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    IEEE: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    kh, s, split, sequences = find_program(splits, K)
    if PDL:
        launch_dependents()
    # Before the wait: data of this step's first kernels, and keys of earlier steps.
    row, context, place, count = find_pack(s, sequences, rows_ptr, contexts_ptr, PACK, BACK)
    old = tl.maximum(context - 1 - place, 0)  # keys of earlier steps
    first, start, stop, used = split_range(
        old, window - 1 - place, split, splits, CHUNK, TILE, SPLIT, WINDOW
    )
    if (count == 0) | (split >= used):
        if PDL:
            wait_for_previous_kernel()
        return
    table = tables_ptr + row.to(tl.int64) * W
    at = start + tl.arange(0, TILE)
    live = (at >= first) & (at < stop)
    k_tile, v_tile, _, _ = load_tile(
        cache_ptr, cache_ptr, table, kh, at, live, K, D, B, HEAD, 0, 0, 0, 0, D
    )
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    member = m // G
    g = m % G
    real = member < count
    t = s.to(tl.int64) + member
    end = context + member  # of the keys that a row sees
    cos, turn = _load_turns(angles_ptr, positions_ptr + t, real, D, R, INTERLEAVED)
    q_own, q_other = norm_weights(q_weight, q_offset, D, R, NORM, INTERLEAVED)
    # keys of this step up to the pack's last row, 16 at a time; loads are one turn ahead
    fresh = tl.where((split == used - 1) & (context > 0), place + count, 0)
    j = tl.arange(0, 16)
    of = s.to(tl.int64) - place + j
    k_cos, k_turn = _load_turns(angles_ptr, positions_ptr + of, j < fresh, D, R, INTERLEAVED)
    slot = tl.load(slots_ptr + of, mask=j < fresh, other=-1)
    k_own, k_other = norm_weights(k_weight, k_offset, D, R, NORM, INTERLEAVED)
    if PDL:
        wait_for_previous_kernel()
    q, twins = _load_pairs(q_ptr, t * Q_T + (kh * G + g) * Q_H, real, D, R, INTERLEAVED)
    k_ptr += kh * K_H
    v_ptr += kh * V_H
    k, k_twins = _load_pairs(k_ptr, of * K_T, j < fresh, D, R, INTERLEAVED)
    v = tl.load(v_ptr + (of * V_T)[:, None] + d[None, :], mask=(j < fresh)[:, None], other=0.0)
    q = norm_and_rotate(q, twins, q_own, q_other, cos, turn, q_eps, D, NORM)
    acc, total, top = begin_sums(M, D)
    for low in range(0, fresh, 16):  # noqa: B007
        k = norm_and_rotate(k, k_twins, k_own, k_other, k_cos, k_turn, k_eps, D, NORM)
        where = cache_ptr + (slot // B * (2 * K * HEAD) + slot % B * D + kh * HEAD)[:, None]
        stores = ((j < fresh) & (j >= place) & (slot >= 0))[:, None]
        tl.store(where + d[None, :], k.to(cache_ptr.dtype.element_ty), mask=stores)
        tl.store(where + K * HEAD + d[None, :], v.to(cache_ptr.dtype.element_ty), mask=stores)
        acc, total, top = _attend(
            q, k, v, old + j, end, j < fresh, acc, total, top, scale, softcap, window, WINDOW,
            SOFTCAP, IEEE,
        )  # fmt: skip
        j += 16
        of += 16
        k_cos, k_turn = _load_turns(angles_ptr, positions_ptr + of, j < fresh, D, R, INTERLEAVED)
        slot = tl.load(slots_ptr + of, mask=j < fresh, other=-1)
        k, k_twins = _load_pairs(k_ptr, of * K_T, j < fresh, D, R, INTERLEAVED)
        v = tl.load(v_ptr + (of * V_T)[:, None] + d[None, :], mask=(j < fresh)[:, None], other=0.0)
    acc, total, top = _attend(
        q, k_tile, v_tile, at, end, live, acc, total, top, scale, softcap, window, WINDOW, SOFTCAP,
        IEEE,
    )  # fmt: skip
    acc, total, top = attend_range(
        acc, total, top, q, cache_ptr, cache_ptr, table, kh, first, start + TILE, stop, 0, top, top,
        scale, softcap, K, D, B, HEAD, 0, 0, 0, 0, D, TILE, STAGES, SOFTCAP, False, 0, IEEE,
        end - window if WINDOW else None, end,
    )  # fmt: skip
    store_or_merge_pack(
        acc, total, top, part_ptr, stats_ptr, done_ptr, out_ptr, sinks_ptr, s, kh, t * K + kh,
        real, g, split, used, splits, K, G, D, M, D, SPLIT, SINKS, WARPS,
    )  # fmt: skip


def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    norms: tuple[QKNorm, QKNorm] | None,
    slots: Tensor,
    cache: Tensor,
) -> bool:
    """Whether one kernel can do it: a cache in q's dtype, and no more rows than one looks back."""
    group = q.shape[1] // k.shape[1]
    return (
        cache.dtype == q.dtype
        and has_dense_heads(cache)
        and q.shape[0] <= MAX_CHAIN
        and pack_rows(group) > 1
        and paged_attention_fused.supports(
            q, k, v, positions, cos_sin, interleaved, norms, slots, cache
        )
    )


def launch(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    norms: tuple[QKNorm, QKNorm] | None,
    slots: Tensor,
    cache: Tensor,
    tables: Tensor,
    contexts: Tensor,
    extras: AttentionExtras,
    measured: bool = False,
) -> None:
    """Fill out [S, H, D] and the cache. q, k: before their norms, if there are norms.

    extras: with rows, and no more than paged_attention_fused takes.
    """
    rows, heads, size = q.shape
    kv_heads, block = cache.shape[2:4]
    group = heads // kv_heads
    pack = pack_rows(group)
    cut = plan_decode(q, cache, tables, cdiv(rows, pack), extras)
    cut = cut._replace(splits=max(1, min(cut.splits, MAX_PARTS // rows)))
    tile = max(16, next_power_of_2(pack * group))
    warps = max(cut.warps, tile // 8 if tile > 16 else 1)  # of registers for the sums
    q_norm, k_norm = norms or (QKNorm(q, 0.0, 0.0), QKNorm(k, 0.0, 0.0))
    pdl = not fused_draft_kernel.interpreted
    fused_draft_kernel(
        (rows * kv_heads * cut.splits, 1, 1),
        (
            q, k, v, positions, cos_sin, q_norm.weight, k_norm.weight, slots, cache, tables,
            extras.rows, contexts, out,
            *allocate_split_workspace(q, kv_heads, rows, cut, extras.counters), extras.sinks,
        ),
        (
            extras.scale, extras.softcap or 0.0, extras.window or 0, cut.splits,
            q_norm.eps, k_norm.eps, q_norm.offset, k_norm.offset,
        ),
        (
            kv_heads, group, size, cos_sin.shape[1], block, CodeLayout.of(cache, None).head,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], tables.stride(0), pack, MAX_CHAIN,
            tile, cut.tile_keys, cut.min_chunk, cut.may_split, cut.stages, norms is not None,
            interleaved, extras.window is not None, extras.softcap is not None,
            extras.sinks is not None, q.dtype == torch.float32, warps, pdl,
        ),
        warps=warps,
        pdl=pdl,
    )  # fmt: skip

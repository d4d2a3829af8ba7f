"""One decode step of a layer's attention from the raw qkv product: norms of heads, rotation, the
new key and value filed, and attention, in one launch.

Every program turns its own queries (a few hundred values; cheaper than a launch). The program
whose stretch ends with the newest token turns that key too, files it, and starts its softmax from
it: the newest token is not read back. All other keys were filed by earlier steps, so they are
brought into L2 before the kernel waits for the one before it.

Rounded where the separate ops round. Not here: whether they may be left out (quire.kernels.fuse).

Axes: S sequences, K kv heads, G query heads of one KV head, D head size, B block size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.norm_rope_write import HeadNorm
from quire.kernels.gpu.paged_attention_cut import Cut, Extras, decode_cut, workspace
from quire.kernels.gpu.paged_attention_decode import deliver, stretch, sweep
from quire.kernels.gpu.paged_attention_scores import LOWEST, bent
from quire.kernels.gpu.start import kernel
from quire.kernels.gpu.wait import let_go, prefetch, wait_for_forerunner

_E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def _turned(x_ptr, weight_ptr, angles_ptr, h, real, eps, offset, STRIDE: tl.constexpr,
            D: tl.constexpr, DP: tl.constexpr, NORM: tl.constexpr,
            INTERLEAVED: tl.constexpr):  # fmt: skip
    """Heads h of x, [M, DP]: normalised, rounded, rotated, rounded. D is DP."""
    d = tl.arange(0, DP)
    half = d // 2 if INTERLEAVED else d % (D // 2)
    low = d % 2 == 0 if INTERLEAVED else d < D // 2
    twin = d ^ 1 if INTERLEAVED else (d + D // 2) % D
    cos = tl.load(angles_ptr + half)
    sin = tl.load(angles_ptr + D // 2 + half)
    dtype = x_ptr.dtype.element_ty
    a = tl.load(x_ptr + h[:, None] * STRIDE + d[None, :], mask=real, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + h[:, None] * STRIDE + twin[None, :], mask=real, other=0.0).to(tl.float32)
    if NORM:
        shrink = tl.rsqrt(tl.sum(a * a, 1) / D + eps)[:, None]
        mine = offset + tl.load(weight_ptr + d).to(tl.float32)
        other = offset + tl.load(weight_ptr + twin).to(tl.float32)
        a = (a * shrink * mine[None, :]).to(dtype).to(tl.float32)
        b = (b * shrink * other[None, :]).to(dtype).to(tl.float32)
    turn = tl.where(low, -sin, sin)
    return (a * cos[None, :] + b * turn[None, :]).to(dtype)


@triton.jit
def _filed(x, scale, where, live, FP8: tl.constexpr):
    """Store one head's key or value [1, D]; returns it as it will be read back."""
    if FP8:
        x = tl.clamp(x.to(tl.float32) / scale, -_E4M3_MAX, _E4M3_MAX)
    stored = x.to(where.dtype.element_ty)
    tl.store(where, stored, mask=live)
    return stored


@triton.jit
def _fetch(cache_ptr, table, kh, start, stop, BLOCKS: tl.constexpr, K: tl.constexpr,
           D: tl.constexpr, B: tl.constexpr, BYTES: tl.constexpr):  # fmt: skip
    """Bring the first BLOCKS blocks of a stretch into L2."""
    for i in tl.static_range(BLOCKS):
        at = start + i * B
        if at < stop:
            block = tl.load(table + at // B).to(tl.int64)
            base = cache_ptr + block * (2 * K * B * D) + kh * (B * D)
            prefetch(base, BYTES)
            prefetch(base + K * B * D, BYTES)


@kernel("scale", "softcap", "k_scale", "v_scale", "window", "splits", "q_eps", "k_eps",
        "q_offset", "k_offset")  # fmt: skip
def fused_kernel(
    q_ptr,  # [S, K * G, D] as the product left it
    k_ptr,  # [S, K, D]
    v_ptr,  # [S, K, D]
    positions_ptr,  # [S] int32
    angles_ptr,  # [P, D] fp32
    q_weight,  # [D], if NORM
    k_weight,
    slots_ptr,  # [S] int64
    cache_ptr,  # [N, 2, K, B, D]
    tables_ptr,  # [M, W]
    rows_ptr,  # [S], if HAS_ROWS
    contexts_ptr,  # [S]
    out_ptr,  # [S, K * G, D]
    part_ptr,
    stats_ptr,
    done_ptr,
    sinks_ptr,
    scale,
    softcap,
    k_scale,
    v_scale,
    window,
    splits,
    q_eps,
    k_eps,
    q_offset,
    k_offset,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    Q_T: tl.constexpr,
    Q_H: tl.constexpr,
    K_T: tl.constexpr,
    K_H: tl.constexpr,
    V_T: tl.constexpr,
    V_H: tl.constexpr,
    W: tl.constexpr,
    GP: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    FP8: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
    BLOCKS: tl.constexpr,  # to fetch early
    BYTES: tl.constexpr,  # of one head's keys in a block
):
    pid = tl.program_id(0)
    kh = pid % K
    split = pid // K % splits
    s = pid // (K * splits)
    if PDL:
        let_go()
    context = tl.load(contexts_ptr + s)
    row = s
    if HAS_ROWS:
        row = tl.load(rows_ptr + s)
    table = tables_ptr + row.to(tl.int64) * W
    first, start, stop, used = stretch(context, window, split, splits, TILE, CHUNK, SPLIT, WINDOW)
    if PDL:
        if split < used:
            _fetch(cache_ptr, table, kh, start, stop, BLOCKS, K, D, B, BYTES)
        wait_for_forerunner()
    if split >= used:
        return
    t = s.to(tl.int64)
    g = tl.arange(0, GP)
    d = tl.arange(0, D)
    angles = angles_ptr + tl.load(positions_ptr + t).to(tl.int64) * D
    q = _turned(q_ptr + t * Q_T, q_weight, angles, kh * G + g, (g < G)[:, None], q_eps, q_offset,
                Q_H, D, D, NORM, INTERLEAVED)  # fmt: skip
    acc = tl.zeros([GP, D], tl.float32)
    total = tl.zeros([GP], tl.float32)
    top = tl.full([GP], LOWEST, tl.float32)
    if (split == used - 1) & (context > 0):
        one = tl.arange(0, 1)
        slot = tl.load(slots_ptr + t)
        k = _turned(k_ptr + t * K_T, k_weight, angles, kh + one, (one == 0)[:, None], k_eps,
                    k_offset, K_H, D, D, NORM, INTERLEAVED)  # fmt: skip
        v = tl.load(v_ptr + t * V_T + (kh + one)[:, None] * V_H + d[None, :])
        where = cache_ptr + (slot // B * (2 * K * B) + slot % B) * D + kh * (B * D)
        where += one[:, None] + d[None, :]
        k = _filed(k, k_scale, where, slot >= 0, FP8).to(q.dtype).to(tl.float32)
        v = _filed(v, v_scale, where + K * B * D, slot >= 0, FP8).to(q.dtype).to(tl.float32)
        top = bent(tl.sum(q.to(tl.float32) * k, 1), scale, softcap, SOFTCAP)
        total += 1.0
        acc += v
        stop -= 1
    acc, total, top = sweep(
        acc, total, top, q, cache_ptr, table, kh, first, start, stop, context - 1, top, scale,
        softcap, K, D, B, D, TILE, STAGES, SOFTCAP, False, IEEE,
    )  # fmt: skip
    if FP8:
        acc = acc * v_scale
    deliver(
        acc, total, top, part_ptr, stats_ptr, done_ptr, out_ptr, sinks_ptr, s, kh, split, used,
        splits, K, G, D, GP, D, SPLIT, SINKS,
    )  # fmt: skip


def extras_of(
    q: Tensor,
    contexts: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    rows: Tensor | None = None,
    decodes: int = 0,
    max_context: int | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    counters: Tensor | None = None,
) -> Extras | None:
    """What paged_attention was asked for; None: it is not one query a sequence, or has ALiBi."""
    if not decodes == q.shape[0] == contexts.shape[0] or alibi is not None:
        return None
    return Extras(
        scale, window, softcap, sinks, None, rows, max_context, k_scale, v_scale, counters
    )


def takes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    norms: tuple[HeadNorm, HeadNorm] | None,
    slots: Tensor,
    cache: Tensor,
) -> bool:
    """Whether one kernel can do it: whole heads rotated, of a power of two channels."""
    size = q.shape[2]
    if cos_sin.shape[1] != size or size & (size - 1) or size < 16 or v.shape != k.shape:
        return False
    if k.dtype != q.dtype or v.dtype != q.dtype or not cache.is_contiguous():
        return False
    if q.stride(2) != 1 or k.stride(2) != 1 or v.stride(2) != 1:
        return False
    if cache.dtype not in (q.dtype, torch.float8_e4m3fn):
        return False
    return slots.dtype == torch.int64 and slots.is_contiguous()


def launch(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    norms: tuple[HeadNorm, HeadNorm] | None,
    slots: Tensor,
    cache: Tensor,
    tables: Tensor,
    contexts: Tensor,
    extras: Extras,
    cut: Cut | None = None,
) -> None:
    """Fill out [S, H, D] and the cache. q, k: before their norms, if there are norms."""
    rows, heads, size = q.shape
    kv_heads, block = cache.shape[2:4]
    group = heads // kv_heads
    fp8 = cache.dtype == torch.float8_e4m3fn
    how = extras.on(cache)
    k_scale, v_scale = how.k_scale, how.v_scale
    q_norm, k_norm = norms or (HeadNorm(q, 0.0, 0.0), HeadNorm(k, 0.0, 0.0))
    cut = cut or decode_cut(q, cache, tables, rows, how)
    pdl = not fused_kernel.interpreted
    fused_kernel(
        (rows * kv_heads * cut.splits, 1, 1),
        (
            q, k, v, positions, cos_sin, q_norm.weight, k_norm.weight, slots, cache, tables,
            how.rows, contexts, out, *workspace(q, kv_heads, rows, cut.splits, how.counters),
            how.sinks,
        ),
        (
            how.scale * k_scale, how.softcap or 0.0, k_scale, v_scale, how.window or 0, cut.splits,
            q_norm.eps, k_norm.eps, q_norm.offset, k_norm.offset,
        ),
        (
            kv_heads, group, size, block, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
            tables.stride(0), max(16, triton.next_power_of_2(group)), cut.tile, cut.chunk,
            cut.splits > 1, cut.stages, norms is not None, interleaved, how.rows is not None,
            how.window is not None, how.softcap is not None, how.sinks is not None, fp8,
            q.dtype == torch.float32, pdl, max(1, min(cut.chunk // block, 8)),
            block * size * cache.element_size(),
        ),
        warps=cut.warps,
        pdl=pdl,
    )  # fmt: skip

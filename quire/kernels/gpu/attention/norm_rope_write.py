"""Norm, rotation and cache write in one pass over the qkv product.

    q' = rope(norm(q))    k' = rope(norm(k)) -> the cache, and [T, K, D]    v -> the cache

Rounded where the separate ops round, so the values are the same. A program has one token and a
group of heads: of queries, or of keys with their values. quire.kernels.framework.lazy_fusion
decides whether the separate ops may be left out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.kv_cache import has_dense_heads
from quire.kernels.gpu.attention.kv_codes import (
    CodeLayout,
    find_scales,
    magnitude_bits,
    scale_pointers,
    takes,
    to_codes,
)
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel


class QKNorm(NamedTuple):
    """An rms_norm over each head."""

    weight: Tensor
    eps: float
    offset: float


@triton.jit
def _load_normed_halves(x_ptr, w_ptr, h, live, low, high, eps, offset, STRIDE: tl.constexpr,
            D: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    """Both halves of some heads, fp32, normalised and rounded as the norm's output is."""
    a = tl.load(x_ptr + h * STRIDE + low, live, 0.0).to(tl.float32)
    b = tl.load(x_ptr + h * STRIDE + high, live, 0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        dtype = x_ptr.dtype.element_ty
        a = (a * scale * (offset + tl.load(w_ptr + low).to(tl.float32))).to(dtype).to(tl.float32)
        b = (b * scale * (offset + tl.load(w_ptr + high).to(tl.float32))).to(dtype).to(tl.float32)
    return a, b


@triton.jit
def _store_halves(a, b, low, high, place, scales, live_heads, live, given, CODE: tl.constexpr,
            SCALES: tl.constexpr):  # fmt: skip
    """Store heads of which a, b [M, HALF] are the channels low and high. scales: [M] pointers."""
    if CODE != 0:
        bits = tl.maximum(magnitude_bits(a), magnitude_bits(b))
        scale = find_scales(bits, given, scales, live_heads, CODE, SCALES)
        a, b = to_codes(a, scale, CODE), to_codes(b, scale, CODE)
    dtype = place.dtype.element_ty
    tl.store(place + low, a.to(dtype), live)
    tl.store(place + high, b.to(dtype), live)


@kernel("q_eps", "k_eps", "q_offset", "k_offset", "k_scale", "v_scale")
def _norm_rope_write(
    q_ptr,  # [T, H, D], heads anywhere
    k_ptr,  # [T, K, D]
    v_ptr,  # [T, K, D]
    positions_ptr,  # [T] int32
    table_ptr,  # [P, R] fp32
    q_weight,  # [D], read only if NORM
    k_weight,
    slots_ptr,  # [T] int64, negative: not written
    cache_ptr,  # [N, 2, K, B, D], heads HEAD apart
    scales_ptr,  # [N, 2, K, B] or [2, K], if SCALES
    q_out,  # [T, H, D] packed
    k_out,  # [T, K, D] packed
    q_eps,
    k_eps,
    q_offset,
    k_offset,
    k_scale,
    v_scale,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,  # leading channels that are rotated; the rest turn by nothing
    B: tl.constexpr,
    Q_T: tl.constexpr,
    Q_H: tl.constexpr,
    K_T: tl.constexpr,
    K_H: tl.constexpr,
    V_T: tl.constexpr,
    V_H: tl.constexpr,
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEAD: tl.constexpr,
    S_N: tl.constexpr,
    S_H: tl.constexpr,
    S_T: tl.constexpr,
    CODE: tl.constexpr,
    SCALES: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)  # T * H * D can pass 2**31
    part = tl.program_id(1)
    HALF: tl.constexpr = D // 2
    i = tl.arange(0, HALF)[None, :]
    if INTERLEAVED:
        low, high = 2 * i, 2 * i + 1
    elif R == D:
        low, high = i, i + HALF
    else:  # pairs of the rotated part, then pairs of the rest
        low = tl.where(i < R // 2, i, i + R // 2)
        high = tl.where(i < R // 2, i + R // 2, i + HALF)
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    angles = table_ptr + tl.load(positions_ptr + t).to(tl.int64) * R + i
    if R == D:
        cos, sin = tl.load(angles), tl.load(angles + HALF)
    else:
        cos = tl.load(angles, i < R // 2, 1.0)
        sin = tl.load(angles + R // 2, i < R // 2, 0.0)
    dtype = q_ptr.dtype.element_ty
    parts: tl.constexpr = (H + HEADS - 1) // HEADS
    if part < parts:
        h = (part * HEADS + tl.arange(0, HEADS))[:, None]
        live = (h < H) & (i < HALF)
        a, b = _load_normed_halves(q_ptr + t * Q_T, q_weight, h, live, low, high, q_eps, q_offset,
                       Q_H, D, NORM)  # fmt: skip
        out = q_out + t * (H * D) + h * D
        tl.store(out + low, (a * cos - b * sin).to(dtype), live)
        tl.store(out + high, (b * cos + a * sin).to(dtype), live)
    else:
        one = (part - parts) * HEADS + tl.arange(0, HEADS)
        h = one[:, None]
        live = (h < K) & (i < HALF)
        slot = tl.load(slots_ptr + t)
        a, b = _load_normed_halves(k_ptr + t * K_T, k_weight, h, live, low, high, k_eps, k_offset,
                       K_H, D, NORM)  # fmt: skip
        first, second = (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)
        out = k_out + t * (K * D) + h * D
        tl.store(out + low, first, live)
        tl.store(out + high, second, live)
        v_low = tl.load(v_ptr + t * V_T + h * V_H + i, live, 0.0)
        v_high = tl.load(v_ptr + t * V_T + h * V_H + i + HALF, live, 0.0)
        live = live & (slot >= 0)
        mine = (one < K) & (slot >= 0)
        place = cache_ptr + slot // B * (2 * K * HEAD) + slot % B * D + h * HEAD
        scales = scale_pointers(scales_ptr, slot, one, B, S_N, S_H, S_T, SCALES)
        _store_halves(first, second, low, high, place, scales, mine, live, k_scale, CODE, SCALES)
        _store_halves(v_low, v_high, i, i + HALF, place + K * HEAD, scales + K * S_H, mine, live,
                      v_scale, CODE, SCALES)  # fmt: skip


def supports(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, cache: Tensor, slots: Tensor
) -> bool:
    """Whether one kernel can do it: heads of a power of two channels."""
    size = q.shape[2]
    if size & (size - 1) or v.shape != k.shape:
        return False
    if v.dtype != k.dtype or v.stride(2) != 1 or not has_dense_heads(cache):
        return False
    if not takes(cache, k.dtype):
        return False
    return slots.dtype == torch.int64 and slots.is_contiguous()


def launch(
    outs: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    norms: tuple[QKNorm, QKNorm] | None,
    cache: Tensor,
    slots: Tensor,
    k_scale: float,
    v_scale: float,
    scales: Tensor | None,
    head_scales: Tensor | None,
) -> None:
    """Fill outs = (q', k') and the cache. q, k: before their norms if there are norms."""
    rows, heads, size = q.shape
    kv_heads, block = k.shape[1], cache.shape[3]
    each = min(next_power_of_2(heads), 32 if rows >= 256 else 4)
    q_norm, k_norm = norms or (QKNorm(q, 0.0, 0.0), QKNorm(k, 0.0, 0.0))
    _norm_rope_write(
        (rows, cdiv(heads, each) + cdiv(kv_heads, each), 1),
        (
            q, k, v, positions, cos_sin, q_norm.weight, k_norm.weight, slots, cache,
            head_scales if scales is None else scales, *outs,
        ),
        (q_norm.eps, k_norm.eps, q_norm.offset, k_norm.offset, k_scale, v_scale),
        (
            heads, kv_heads, size, cos_sin.shape[1], block,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
            norms is not None, interleaved, *CodeLayout.of(cache, scales, head_scales), each,
            PDL_ENABLED,
        ),
        warps=max(1, min(4, each * size // 512)),
        pdl=PDL_ENABLED,
    )  # fmt: skip

"""MLA write kernel: finishes queries and latents of a step and stores the latents.

Part 0 of a token is its latent, the others are heads. A program reads the token's row of the angle
table once for all its heads; nothing is read twice.

Axes: as in quire.kernels.mla_write; BH heads of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2

HEADS = 16
"""Heads of one program: a few kilobytes."""


@triton.jit
def _rotate_rows(
    x_ptr,
    to_ptr,
    cos,
    sin,
    real,  # [ROWS, 1]
    X_STEP: tl.constexpr,
    TO_STEP: tl.constexpr,
    ROWS: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Turn ROWS rows of R channels, X_STEP apart, and store them TO_STEP apart."""
    n = tl.arange(0, ROWS)[:, None]
    dtype = to_ptr.dtype.element_ty
    if PAIRS and 2 * HALF == R:  # neighbours are read and written together
        r = tl.arange(0, R)[None, :]
        x = tl.load(x_ptr + n * X_STEP + r, mask=real, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (ROWS, HALF, 2)))
        turned = tl.join(a * cos - b * sin, b * cos + a * sin)
        tl.store(to_ptr + n * TO_STEP + r, tl.reshape(turned, (ROWS, R)).to(dtype), mask=real)
    else:
        i = tl.arange(0, HALF)[None, :]
        both = real & (i < R // 2)
        near = 1 if PAIRS else R // 2
        at = i * 2 if PAIRS else i
        a = tl.load(x_ptr + n * X_STEP + at, mask=both, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + n * X_STEP + at + near, mask=both, other=0.0).to(tl.float32)
        tl.store(to_ptr + n * TO_STEP + at, (a * cos - b * sin).to(dtype), mask=both)
        tl.store(to_ptr + n * TO_STEP + at + near, (b * cos + a * sin).to(dtype), mask=both)


@kernel("eps")
def _mla_write_kernel(
    q_ptr,
    kv_ptr,
    weight_ptr,
    positions_ptr,
    table_ptr,
    cache_ptr,
    slots_ptr,
    q_out_ptr,
    latent_ptr,
    eps,
    H: tl.constexpr,
    L: tl.constexpr,
    L_WIDTH: tl.constexpr,  # power of two >= L
    R: tl.constexpr,
    HALF: tl.constexpr,  # power of two >= R / 2
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    KV_ROW: tl.constexpr,
    BH: tl.constexpr,
    PAIRS: tl.constexpr,  # (2i, 2i + 1) turn together, else (i, i + R/2)
):
    t = tl.program_id(0).to(tl.int64)  # T * H * R can pass 2**31
    part = tl.program_id(1)
    i = tl.arange(0, HALF)[None, :]
    pair = i < R // 2
    position = tl.load(positions_ptr + t).to(tl.int64)
    cos = tl.load(table_ptr + position * R + i, mask=pair, other=0.0)
    sin = tl.load(table_ptr + position * R + R // 2 + i, mask=pair, other=0.0)
    if part > 0:
        h = (part - 1) * BH
        real = h + tl.arange(0, BH)[:, None] < H
        x_at = q_ptr + t * Q_ROW + h * Q_HEAD
        _rotate_rows(
            x_at, q_out_ptr + (t * H + h) * R, cos, sin, real, Q_HEAD, R, BH, R, HALF, PAIRS
        )
    else:
        c = tl.arange(0, L_WIDTH)
        live = c < L
        x = tl.load(kv_ptr + t * KV_ROW + c, mask=live, other=0.0).to(tl.float32)
        w = tl.load(weight_ptr + c, mask=live, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / L + eps) * w
        slot = tl.load(slots_ptr + t)
        filed = slot >= 0
        latent_at = latent_ptr + t * (L + R)
        row_ptr = cache_ptr + slot * (L + R)  # blocks are contiguous, so slots are
        tl.store(latent_at + c, x.to(latent_ptr.dtype.element_ty), mask=live)
        tl.store(row_ptr + c, x.to(cache_ptr.dtype.element_ty), mask=live & filed)
        one = tl.full([1, 1], 1, tl.int1)
        rotated = kv_ptr + t * KV_ROW + L
        _rotate_rows(rotated, latent_at + L, cos, sin, one, R, R, 1, R, HALF, PAIRS)
        _rotate_rows(rotated, row_ptr + L, cos, sin, one & filed, R, R, 1, R, HALF, PAIRS)


def outputs(
    q: Tensor,
    kv: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
    interleaved: bool = True,
) -> tuple[Tensor, Tensor]:
    """(queries [T, H, R], latents [T, L + R])."""
    same = q.dtype == kv.dtype == cache.dtype
    if not same or q.stride(2) != 1 or kv.stride(1) != 1 or not cache.is_contiguous():
        return NotImplemented
    return (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(kv.shape, dtype=q.dtype, device=q.device),
    )


def launch(
    outs: tuple[Tensor, Tensor],
    q: Tensor,
    kv: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
    interleaved: bool = True,
) -> None:
    tokens, heads, rotated = q.shape
    latent = weight.shape[0]
    if tokens == 0:
        return
    _mla_write_kernel(
        (tokens, 1 + cdiv(heads, HEADS), 1),
        (q, kv, weight, positions, cos_sin, cache, slots, *outs),
        (eps,),
        (
            heads,
            latent,
            next_power_of_2(latent),
            rotated,
            next_power_of_2(rotated // 2),
            q.stride(0),
            q.stride(1),
            kv.stride(0),
            HEADS,
            interleaved,
        ),
        warps=4,
    )

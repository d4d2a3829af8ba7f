"""Queries and latents of a step finished and filed: one program a token and part.

Part 0 of a token is its latent, the others are heads. A program reads the token's row of the angle
table once for all its heads; nothing is read twice.

Axes: as in quire.kernels.mla_write; BH heads of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.start import kernel

HEADS = 16
"""Heads of one program: a few kilobytes."""


@triton.jit
def _turn(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


@kernel("eps")
def _finish(
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
    NEAR: tl.constexpr,  # from a channel to the one that turns with it
    STEP: tl.constexpr,  # from a pair to the next
):
    t = tl.program_id(0).to(tl.int64)  # T * H * R can pass 2**31
    part = tl.program_id(1)
    i = tl.arange(0, HALF)
    pair = i < R // 2
    position = tl.load(positions_ptr + t).to(tl.int64)
    cos = tl.load(table_ptr + position * R + i, mask=pair, other=0.0)
    sin = tl.load(table_ptr + position * R + R // 2 + i, mask=pair, other=0.0)
    dtype = q_out_ptr.dtype.element_ty
    if part > 0:
        h = (part - 1) * BH + tl.arange(0, BH)
        real = (h[:, None] < H) & pair[None, :]
        q_at = q_ptr + t * Q_ROW + h[:, None] * Q_HEAD + i[None, :] * STEP
        q_a = tl.load(q_at, mask=real, other=0.0).to(tl.float32)
        q_b = tl.load(q_at + NEAR, mask=real, other=0.0).to(tl.float32)
        q_a, q_b = _turn(q_a, q_b, cos[None, :], sin[None, :])
        q_to = q_out_ptr + (t * H + h[:, None]) * R + i[None, :] * STEP
        tl.store(q_to, q_a.to(dtype), mask=real)
        tl.store(q_to + NEAR, q_b.to(dtype), mask=real)
    else:
        c = tl.arange(0, L_WIDTH)
        live = c < L
        x = tl.load(kv_ptr + t * KV_ROW + c, mask=live, other=0.0).to(tl.float32)
        w = tl.load(weight_ptr + c, mask=live, other=0.0).to(tl.float32)
        x = (x * tl.rsqrt(tl.sum(x * x, 0) / L + eps) * w).to(dtype)
        at = kv_ptr + t * KV_ROW + L + i * STEP
        a = tl.load(at, mask=pair, other=0.0).to(tl.float32)
        b = tl.load(at + NEAR, mask=pair, other=0.0).to(tl.float32)
        a, b = _turn(a, b, cos, sin)
        to = latent_ptr + t * (L + R)
        tl.store(to + c, x, mask=live)
        tl.store(to + L + i * STEP, a.to(dtype), mask=pair)
        tl.store(to + L + i * STEP + NEAR, b.to(dtype), mask=pair)
        slot = tl.load(slots_ptr + t)
        filed = slot >= 0
        room = cache_ptr + slot * (L + R)  # blocks are contiguous, so slots are
        tl.store(room + c, x, mask=live & filed)
        tl.store(room + L + i * STEP, a.to(dtype), mask=pair & filed)
        tl.store(room + L + i * STEP + NEAR, b.to(dtype), mask=pair & filed)


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
    near, step = (1, 2) if interleaved else (rotated // 2, 1)
    _finish(
        (tokens, 1 + triton.cdiv(heads, HEADS), 1),
        (q, kv, weight, positions, cos_sin, cache, slots, *outs),
        (eps,),
        (
            heads,
            latent,
            triton.next_power_of_2(latent),
            rotated,
            triton.next_power_of_2(rotated // 2),
            q.stride(0),
            q.stride(1),
            kv.stride(0),
            HEADS,
            near,
            step,
        ),
        warps=4,
    )

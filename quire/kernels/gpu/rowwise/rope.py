"""RoPE kernel: one launch rotates queries and keys; a program has a token's heads."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2

_HEADS = 32  # heads a program turns at most


@triton.jit
def _rotate_heads(
    x_ptr,  # the token's heads
    y_ptr,  # [heads, D] out, packed
    cos,  # [HALF]
    sin,
    first,  # head the program starts at
    heads,
    STRIDE: tl.constexpr,  # of a head in x
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,  # power of two >= R / 2
    REST: tl.constexpr,  # power of two >= D - R, 0 if that is 0
):
    h = (first + tl.arange(0, HEADS))[:, None]
    i = tl.arange(0, HALF)[None, :]
    live = (h < heads) & (i < R // 2)
    low = 2 * i if INTERLEAVED else i
    high = 2 * i + 1 if INTERLEAVED else i + R // 2
    a = tl.load(x_ptr + h * STRIDE + low, live, 0.0).to(tl.float32)
    b = tl.load(x_ptr + h * STRIDE + high, live, 0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    tl.store(y_ptr + h * D + low, (a * cos[None, :] - b * sin[None, :]).to(dtype), live)
    tl.store(y_ptr + h * D + high, (b * cos[None, :] + a * sin[None, :]).to(dtype), live)
    if REST:
        j = R + tl.arange(0, REST)[None, :]
        live = (h < heads) & (j < D)
        tl.store(y_ptr + h * D + j, tl.load(x_ptr + h * STRIDE + j, live, 0.0), live)


@kernel()
def _rope(
    q_ptr,  # [T, H, D], heads anywhere
    k_ptr,  # [T, K, D], heads anywhere
    positions_ptr,  # [T] int32
    table_ptr,  # [P, R] fp32
    q_out,  # [T, H, D] packed
    k_out,  # [T, K, D] packed
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    Q_T: tl.constexpr,
    Q_H: tl.constexpr,
    K_T: tl.constexpr,
    K_H: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)  # T * H * D can pass 2**31
    part = tl.program_id(1)
    i = tl.arange(0, HALF)
    angles = table_ptr + tl.load(positions_ptr + t).to(tl.int64) * R + i
    cos = tl.load(angles, i < R // 2, 0.0)
    sin = tl.load(angles + R // 2, i < R // 2, 0.0)
    parts: tl.constexpr = (H + HEADS - 1) // HEADS
    if part < parts:
        _rotate_heads(q_ptr + t * Q_T, q_out + t * H * D, cos, sin, part * HEADS, H,
              Q_H, D, R, INTERLEAVED, HEADS, HALF, REST)  # fmt: skip
    else:
        _rotate_heads(k_ptr + t * K_T, k_out + t * K * D, cos, sin, (part - parts) * HEADS, K,
              K_H, D, R, INTERLEAVED, HEADS, HALF, REST)  # fmt: skip


def supports(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> bool:
    if q.stride(2) != 1 or k.stride(2) != 1 or k.dtype != q.dtype:
        return False
    if positions.dtype != torch.int32 or not positions.is_contiguous():
        return False
    return cos_sin.dtype == torch.float32 and cos_sin.is_contiguous()


def outputs(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False
) -> Any:
    if not supports(q, k, positions, cos_sin):
        return NotImplemented
    return (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(k.shape, dtype=k.dtype, device=k.device),
    )


def launch(
    outs: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool = False,
) -> None:
    rows, heads, size = q.shape
    kv_heads, rotated = k.shape[1], cos_sin.shape[1]
    each = min(_HEADS, next_power_of_2(heads))
    rest = size - rotated
    _rope(
        (rows, cdiv(heads, each) + cdiv(kv_heads, each), 1),
        (q, k, positions, cos_sin, *outs),
        (),
        (
            heads, kv_heads, size, rotated, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
            interleaved, each, next_power_of_2(rotated // 2),
            next_power_of_2(rest) if rest else 0,
        ),
        warps=max(1, min(4, each * rotated // 512)),
    )  # fmt: skip

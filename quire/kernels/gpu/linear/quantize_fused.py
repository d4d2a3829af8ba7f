"""Fused quantization: a norm or a gated activation that returns its rows in e4m3 or bytes.

The row is rounded to the model's dtype first, as if it went through memory, so fusing
changes no bit of q except where the norm's own sum differs. It saves a write and a read of the row:
of the gated activation, two passes of three.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.fp8_weight import Fp8Weight
from quire.kernels.formats.int8_weight import Int8Weight
from quire.kernels.gpu.elementwise.activations import activate
from quire.kernels.gpu.linear import fp8_linear, gemv_bytes, int8_linear, quantize_int8
from quire.kernels.gpu.linear.quantize_fp8 import (
    empty_quantized,
    num_warps,
    store_groups,
    store_row,
    use_pdl,
)
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2
from quire.kernels.gpu.runtime.pdl import launch_dependents, wait_for_previous_kernel


@kernel("s_step", "eps", "offset")
def _rms_norm_quantize_kernel(
    x_ptr,  # [T, E]
    res_ptr,  # [T, E], read only if ADD
    w_ptr,  # [E]
    y_ptr,  # [T, E] out, written only if KEEP
    r_ptr,  # [T, E] out, written only if ADD
    q_ptr,  # [T, E] out
    s_ptr,  # [T] out, or [GROUPS, T]
    s_step,
    eps,
    offset,
    E: tl.constexpr,
    X_ROW: tl.constexpr,
    RES_ROW: tl.constexpr,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    GROUPS: tl.constexpr,  # 0: one scale a row
    INT8: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two >= E
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)  # T * E can pass 2**31
    e = tl.arange(0, WIDTH)
    live = e < E
    w = offset + tl.load(w_ptr + e, mask=live, other=0.0).to(tl.float32)
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + t * X_ROW + e, mask=live, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(res_ptr + t * RES_ROW + e, mask=live, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(r_ptr + t * E + e, rounded, mask=live)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / E + eps)
    y = (x * scale * w).to(dtype)
    if KEEP:
        tl.store(y_ptr + t * E + e, y, mask=live)
    wide = tl.where(live, y.to(tl.float32), 0.0)
    if INT8:
        quantize_int8.store_row(wide, e, live, q_ptr + t * E, s_ptr, t)
    elif GROUPS:
        store_groups(wide, e, live, q_ptr + t * E, s_ptr + t, s_step, GROUPS, WIDTH // 128)
    else:
        store_row(wide, e, live, q_ptr + t * E, s_ptr, t)


@kernel("s_step")
def _act_mul_quantize_kernel(
    x_ptr,  # [T, 2F]
    q_ptr,  # [T, F] out
    s_ptr,  # [T] out, or [GROUPS, T]
    s_step,
    F: tl.constexpr,
    X_ROW: tl.constexpr,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,  # 0: one scale a row
    INT8: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two >= F
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    t = tl.program_id(0).to(tl.int64)  # T * 2F can pass 2**31
    f = tl.arange(0, WIDTH)
    live = f < F
    gate = tl.load(x_ptr + t * X_ROW + f, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + t * X_ROW + F + f, mask=live, other=0.0).to(tl.float32)
    y = (activate(gate, KIND) * up).to(x_ptr.dtype.element_ty).to(tl.float32)
    if INT8:
        quantize_int8.store_row(y, f, live, q_ptr + t * F, s_ptr, t)
    elif GROUPS:
        store_groups(y, f, live, q_ptr + t * F, s_ptr + t, s_step, GROUPS, WIDTH // 128)
    else:
        store_row(y, f, live, q_ptr + t * F, s_ptr, t)


def supports(x: Tensor, weight: object, bias: Tensor | None) -> bool:
    """Whether the kernel that computes rows may quantize them for this weight."""
    if not isinstance(weight, Fp8Weight | Int8Weight) or not gemv_bytes.quantizes(weight):
        return False
    return isinstance(weight, Fp8Weight) or (x.dim() == 2 and x.stride(1) == 1)


def empty_rows(x: Tensor, weight: Fp8Weight | Int8Weight) -> tuple[Tensor, Tensor]:
    """Buffers for the rows of x [T, I], quantized for a weight, and for their scales."""
    if isinstance(weight, Fp8Weight):
        return empty_quantized(x.shape[0], x.shape[1], weight.block_size, x.device)
    q, scale, _ = quantize_int8.outputs(x)
    return q, scale


def multiply(
    out: Tensor,
    rows: tuple[Tensor, Tensor],
    weight: Fp8Weight | Int8Weight,
    bias: Tensor | None,
) -> None:
    """Fill out [T, O] with the product of such rows, once they are filled."""
    if isinstance(weight, Fp8Weight):
        fp8_linear.scaled_mm(out, *rows, weight, bias)
    else:
        int8_linear.multiply(out, *rows, None, weight, bias)


def rms_norm_quantize(
    rows: tuple[Tensor, Tensor],
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    offset: float,
    y: Tensor | None,
    r: Tensor | None,
) -> None:
    """rms_norm(x, weight, eps, residual, offset) into rows = (q, scale), r, and y if given."""
    q, scale = rows
    tokens, size = x.shape
    if not tokens:
        return
    step, groups = (scale.stride(0), scale.shape[0]) if scale.dim() == 2 else (0, 0)
    width = max(128, next_power_of_2(size))
    res_row = 0 if residual is None else residual.stride(0)
    add, keep = residual is not None, y is not None
    pdl = use_pdl(tokens)
    consts = (size, x.stride(0), res_row, add, keep, groups, q.dtype == torch.int8, width, pdl)
    tensors = (x, residual, weight, y, r, q, scale)
    _rms_norm_quantize_kernel(
        (tokens, 1, 1), tensors, (step, eps, offset), consts, num_warps(width), pdl=pdl
    )


def act_mul_quantize(rows: tuple[Tensor, Tensor], x: Tensor, kind: str) -> None:
    """act_mul(x, kind) into rows = (q, scale)."""
    q, scale = rows
    tokens, size = q.shape
    if not tokens:
        return
    step, groups = (scale.stride(0), scale.shape[0]) if scale.dim() == 2 else (0, 0)
    width = max(128, next_power_of_2(size))
    pdl = use_pdl(tokens)
    consts = (size, x.stride(0), kind, groups, q.dtype == torch.int8, width, pdl)
    _act_mul_quantize_kernel(
        (tokens, 1, 1), (x, q, scale), (step,), consts, num_warps(width), pdl=pdl
    )

"""LayerNorm kernel: a program holds whole rows and reads them once."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.rowwise.rms_norm import empty_rows, launch_shape, row_strides, supports
from quire.kernels.gpu.runtime.fast_launch import kernel


@kernel("rows", "eps")
def _layer_norm(
    x_ptr,  # [T, H, E], rows anywhere
    res_ptr,  # [T, E], read only if ADD
    w_ptr,  # [H, E]
    b_ptr,  # [E], read only if BIAS
    y_ptr,  # [T, H, E] out, packed
    r_ptr,  # [T, E] out, packed, written only if ADD
    rows,  # T * H
    eps,
    E: tl.constexpr,
    H: tl.constexpr,
    X_T: tl.constexpr,  # strides of x and of the residual
    X_H: tl.constexpr,
    RES_T: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= E
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)  # T * E can pass 2**31
    e = tl.arange(0, BLOCK)[None, :]
    live = (row < rows)[:, None] & (e < E)
    dtype = x_ptr.dtype.element_ty
    t, h = row // H, row % H
    x = tl.load(x_ptr + (t * X_T + h * X_H)[:, None] + e, live, 0.0).to(tl.float32)
    if ADD:
        x += tl.load(res_ptr + (t * RES_T)[:, None] + e, live, 0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(r_ptr + row[:, None] * E + e, rounded, live)
        x = rounded.to(tl.float32)
    centred = tl.where(live, x - (tl.sum(x, 1) / E)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / E + eps)
    if H > 1:
        w = tl.load(w_ptr + (h * E)[:, None] + e, live, 0.0)
    else:
        w = tl.load(w_ptr + e, e < E, 0.0)
    y = centred * scale[:, None] * w.to(tl.float32)
    if BIAS:
        y += tl.load(b_ptr + e, e < E, 0.0).to(tl.float32)
    tl.store(y_ptr + row[:, None] * E + e, y.to(dtype), live)


def outputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Any:
    if weight.shape != x.shape[1:] or not supports(x, (weight, bias), residual):
        return NotImplemented
    if x.dim() == 3 and (bias is not None or residual is not None):
        return NotImplemented
    y = empty_rows(x)
    return y, (x if residual is None else torch.empty_like(y))


def launch(
    outs: tuple[Tensor, Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
) -> None:
    y, r = outs
    heads, x_t, x_h = row_strides(x)  # type: ignore[misc]
    add = residual is not None
    res_t = residual.stride(0) if residual is not None else 0
    rows, size = x.shape[0] * heads, x.shape[-1]
    programs, each, block, warps = launch_shape(rows, size)
    _layer_norm(
        (programs, 1, 1),
        (x, residual, weight, bias, y, r if add else None),
        (rows, eps),
        (size, heads, x_t, x_h, res_t, add, bias is not None, each, block),
        warps=warps,
    )

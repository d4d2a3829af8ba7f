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
    x_ptr,  # [T, E], rows anywhere
    res_ptr,  # [T, E], read only if ADD
    w_ptr,  # [E]
    b_ptr,  # [E], read only if BIAS
    y_ptr,  # [T, E] out, packed
    r_ptr,  # [T, E] out, packed, written only if ADD
    rows,  # T
    eps,
    E: tl.constexpr,
    X_T: tl.constexpr,  # stride of x and of the residual
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
    x = tl.load(x_ptr + (row * X_T)[:, None] + e, live, 0.0).to(tl.float32)
    if ADD:
        x += tl.load(res_ptr + (row * RES_T)[:, None] + e, live, 0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(r_ptr + row[:, None] * E + e, rounded, live)
        x = rounded.to(tl.float32)
    centred = tl.where(live, x - (tl.sum(x, 1) / E)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / E + eps)
    y = centred * scale[:, None] * tl.load(w_ptr + e, e < E, 0.0).to(tl.float32)
    if BIAS:
        y += tl.load(b_ptr + e, e < E, 0.0).to(tl.float32)
    tl.store(y_ptr + row[:, None] * E + e, y.to(dtype), live)


def outputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Any:
    if x.dim() != 2 or not supports(x, (weight, bias), residual):
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
    _, x_t, _ = row_strides(x)  # type: ignore[misc]
    add = residual is not None
    res_t = residual.stride(0) if residual is not None else 0
    programs, each, block, warps = launch_shape(*x.shape)
    _layer_norm(
        (programs, 1, 1),
        (x, residual, weight, bias, y, r if add else None),
        (x.shape[0], eps),
        (x.shape[1], x_t, res_t, add, bias is not None, each, block),
        warps=warps,
    )

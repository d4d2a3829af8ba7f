"""RMSNorm kernel: a program holds whole rows, so memory is read and written once.

A program has several small rows (heads), or launch and tail would cost more than the bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel

MAX_SIZE = 32768
"""Longest row one program can hold in registers."""

_ELEMENTS = 2048  # of a program: enough loads in flight, and several programs on a multiprocessor


@kernel("rows", "eps", "offset")
def _rms_norm(
    x_ptr,  # [T, H, E], rows anywhere
    res_ptr,  # [T, H, E], read only if ADD
    w_ptr,  # [E]
    y_ptr,  # [T, H, E] out, packed
    r_ptr,  # [T, H, E] out, packed, written only if ADD
    rows,  # T * H
    eps,
    offset,
    E: tl.constexpr,
    H: tl.constexpr,
    X_T: tl.constexpr,  # strides of x and of the residual
    X_H: tl.constexpr,
    RES_T: tl.constexpr,
    RES_H: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= E
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)  # T * H * E can pass 2**31
    t, h = row // H, row % H
    e = tl.arange(0, BLOCK)[None, :]
    live = (row < rows)[:, None] & (e < E)
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + (t * X_T + h * X_H)[:, None] + e, live, 0.0).to(tl.float32)
    if ADD:
        x += tl.load(res_ptr + (t * RES_T + h * RES_H)[:, None] + e, live, 0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(r_ptr + row[:, None] * E + e, rounded, live)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / E + eps)
    w = offset + tl.load(w_ptr + e, e < E, 0.0).to(tl.float32)
    tl.store(y_ptr + row[:, None] * E + e, (x * scale[:, None] * w).to(dtype), live)


def row_strides(x: Tensor) -> tuple[int, int, int] | None:
    """(H, stride of T, stride of H) of [T, E] or [T, H, E]; None for another form."""
    shape, strides = x.shape, x.stride()
    if strides[-1] != 1:
        return None
    if len(shape) == 2:
        return 1, strides[0], 0
    return (shape[1], strides[0], strides[1]) if len(shape) == 3 else None


def supports(x: Tensor, others: tuple[Tensor | None, ...], residual: Tensor | None) -> bool:
    """Whether a norm of these can run here: one dtype, last axes contiguous, rows not too long."""
    if x.shape[-1] > MAX_SIZE or row_strides(x) is None:
        return False
    if any(t is not None and (t.dtype != x.dtype or not t.is_contiguous()) for t in others):
        return False
    if residual is None:
        return True
    same = residual.dtype == x.dtype and residual.shape == x.shape
    return same and row_strides(residual) is not None


def empty_rows(x: Tensor) -> Tensor:
    """A packed buffer [T, E] like x. empty_like costs the host a third of what empty does."""
    if x.is_contiguous():
        return torch.empty_like(x)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def launch_shape(rows: int, size: int) -> tuple[int, int, int, int]:
    """(programs, ROWS, BLOCK, warps): rows of a step must not end in few programs only."""
    block = next_power_of_2(size)
    each = max(1, min(_ELEMENTS // block, next_power_of_2(rows) // 128))
    warps = max(1, min(16, each * block // 512))
    return cdiv(rows, each), each, block, warps


def outputs(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> Any:
    if not supports(x, (weight,), residual):
        return NotImplemented
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if x.dim() == 3 else empty_rows(x)
    return y, (x if residual is None else torch.empty_like(y))


def launch(
    outs: tuple[Tensor, Tensor],
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    offset: float = 0.0,
) -> None:
    y, r = outs
    heads, x_t, x_h = row_strides(x)  # type: ignore[misc]
    add = residual is not None
    _, res_t, res_h = row_strides(residual) if add else (1, 0, 0)  # type: ignore[arg-type, misc]
    rows, size = x.shape[0] * heads, x.shape[-1]
    programs, each, block, warps = launch_shape(rows, size)
    _rms_norm(
        (programs, 1, 1),
        (x, residual, weight, y, r if add else None),
        (rows, eps, offset),
        (size, heads, x_t, x_h, res_t, res_h, add, each, block, PDL_ENABLED),
        warps=warps,
        pdl=PDL_ENABLED,
    )

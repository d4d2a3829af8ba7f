"""FP8 quantization of rows: a program reads a row once, finds its scale and writes e4m3.

A row stays in registers between finding the largest magnitude and rounding, so the pass costs three
bytes an element. `store_row` and `store_groups` also end the kernels that compute
the row themselves (quantize_fused.py). The division is exact: results equal the CPU's bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.fp8_weight import BLOCK_SIZE, E4M3
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2
from quire.kernels.gpu.runtime.pdl import launch_dependents, wait_for_previous_kernel

MAX_INPUTS = 32768
"""Inputs of the widest row that a program holds."""


@triton.jit
def scale_of(largest):
    """As quire.kernels.formats.fp8_weight.scale_of; and its inverse."""
    scale = tl.div_rn(tl.maximum(largest, 1e-10), 448.0)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def store_row(x, e, live, q_ptr, s_ptr, t):
    """Quantize one row x [BLOCK], float32, zero where not live. q_ptr: of the row."""
    scale, inverse = scale_of(tl.max(tl.abs(x), 0))
    q = (x * inverse).to(tl.float8e4nv, fp_downcast_rounding="rtne")
    tl.store(q_ptr + e, q, mask=live)
    tl.store(s_ptr + t, scale)


@triton.jit
def store_groups(x, e, live, q_ptr, s_ptr, s_step, GROUPS: tl.constexpr, G: tl.constexpr):
    """Quantize one row x [G * 128] by 128s. s_ptr: of the row's first scale, s_step to the next."""
    tile = tl.reshape(x, (G, 128))
    scale, inverse = scale_of(tl.max(tl.abs(tile), 1))
    q = tl.reshape(tile * inverse[:, None], (G * 128,))
    tl.store(q_ptr + e, q.to(tl.float8e4nv, fp_downcast_rounding="rtne"), mask=live)
    g = tl.arange(0, G)
    tl.store(s_ptr + g.to(tl.int64) * s_step, scale, mask=g < GROUPS)


@kernel("s_step")
def _rows(
    x_ptr,  # [T, I], rows X_ROW apart
    q_ptr,  # [T, I] out
    s_ptr,  # [T] out, or [GROUPS, T], s_step apart
    s_step,
    I: tl.constexpr,
    X_ROW: tl.constexpr,
    GROUPS: tl.constexpr,  # 0: one scale a row
    WIDTH: tl.constexpr,  # power of two >= I
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    t = tl.program_id(0).to(tl.int64)  # T * I can pass 2**31
    e = tl.arange(0, WIDTH)
    live = e < I
    x = tl.load(x_ptr + t * X_ROW + e, mask=live, other=0.0).to(tl.float32)
    if GROUPS:
        store_groups(x, e, live, q_ptr + t * I, s_ptr + t, s_step, GROUPS, WIDTH // 128)
    else:
        store_row(x, e, live, q_ptr + t * I, s_ptr, t)


@kernel()
def _rows_static(
    x_ptr,  # [T, I], rows X_ROW apart
    static_ptr,  # [1]
    q_ptr,  # [T, I] out
    s_ptr,  # [T] out
    I: tl.constexpr,
    X_ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    t = tl.program_id(0).to(tl.int64)  # T * I can pass 2**31
    e = tl.arange(0, WIDTH)
    live = e < I
    scale = tl.load(static_ptr)
    x = tl.load(x_ptr + t * X_ROW + e, mask=live, other=0.0).to(tl.float32)
    x = tl.clamp(x * tl.div_rn(1.0, scale), -448.0, 448.0)
    tl.store(q_ptr + t * I + e, x.to(tl.float8e4nv, fp_downcast_rounding="rtne"), mask=live)
    tl.store(s_ptr + t, scale)


def outputs(x: Tensor, block: int = 0, static: Tensor | None = None) -> tuple[Tensor, Tensor]:
    rows, inputs = x.shape
    if inputs > MAX_INPUTS or x.stride(1) != 1:
        return NotImplemented
    return empty_quantized(rows, inputs, block, x.device)


def empty_quantized(
    rows: int, inputs: int, block: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Buffers for quantized rows and their scales. By groups, with space for `padded` rows."""
    if not block:
        q = torch.empty(rows, inputs, dtype=E4M3, device=device)
        return q, torch.empty(rows, dtype=torch.float32, device=device)
    groups, most = -(-inputs // BLOCK_SIZE), padded_rows(rows)
    q = torch.empty(most, inputs, dtype=E4M3, device=device)
    scale = torch.empty(groups, most, dtype=torch.float32, device=device)
    return (q, scale) if most == rows else (q[:rows], scale[:, :rows])


def padded_rows(rows: int) -> int:
    """Rows that the tensor cores' block product takes: their scales are in lines of 16 bytes."""
    return -(-rows // 4) * 4


def launch(
    outs: tuple[Tensor, Tensor], x: Tensor, block: int = 0, static: Tensor | None = None
) -> None:
    (q, scale), (rows, inputs) = outs, x.shape
    if not rows:
        return
    width = max(BLOCK_SIZE, next_power_of_2(inputs))
    grid, x_row, warps, pdl = (rows, 1, 1), x.stride(0), num_warps(width), use_pdl(rows)
    if static is not None:
        _rows_static(grid, (x, static, q, scale), (), (inputs, x_row, width, pdl), warps, pdl=pdl)
    else:
        step, groups = (scale.stride(0), scale.shape[0]) if block else (0, 0)
        consts = (inputs, x_row, groups, width, pdl)
        _rows(grid, (x, q, scale), (step,), consts, warps, pdl=pdl)


def num_warps(width: int) -> int:
    """32 numbers per thread: four 16-byte loads in flight, and registers to hold them."""
    return min(max(width // 1024, 1), 16)


def use_pdl(rows: int) -> bool:
    """Whether a pass starts while the kernel before it ends: only where it saves launch time."""
    return rows <= 512 and not _rows.interpreted

"""Gate kernel: numbers times the SiLU or the sigmoid of a gate, whose rows and heads may be
anywhere."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.recurrent.step_tokens import sigmoid
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel

_BLOCK = 1024


@kernel()
def _open_gate(
    x_ptr,  # [T, C], packed
    gate_ptr,  # [T, C / D, D]
    y_ptr,  # [T, C] out
    C: tl.constexpr,
    D: tl.constexpr,
    GATE_T: tl.constexpr,
    GATE_H: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    t = tl.program_id(0).to(tl.int64)  # T * C can pass 2**31
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = t * GATE_T + c // D * GATE_H + c % D
    gate = tl.load(gate_ptr + at, c < C, 0.0).to(tl.float32)
    x = tl.load(x_ptr + t * C + c, c < C, 0.0).to(tl.float32)
    opened = sigmoid(gate)
    if SILU:
        opened *= gate
    tl.store(y_ptr + t * C + c, (x * opened).to(y_ptr.dtype.element_ty), c < C)


def open_gate(out: Tensor, x: Tensor, gate: Tensor, *, silu: bool) -> None:
    """x: [T, C], packed. gate: [T, heads, C / heads], the last axis contiguous."""
    tokens, channels = x.shape
    sizes = (channels, gate.shape[2], gate.stride(0), gate.stride(1), silu, _BLOCK, PDL_ENABLED)
    grid = (tokens, cdiv(channels, _BLOCK), 1)
    _open_gate(grid, (x, gate, out), (), sizes, pdl=PDL_ENABLED)

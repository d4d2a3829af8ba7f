"""Gated norm kernel: a program holds whole groups of channels, and memory is read once."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.recurrent.step_tokens import sigmoid
from quire.kernels.gpu.rowwise.rms_norm import MAX_SIZE, launch_shape
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel


@kernel("rows", "eps")
def _gated_norm(
    x_ptr,  # [T, G, E] float32
    gate_ptr,  # [T, G, E], rows anywhere
    w_ptr,  # [E], or [G, E]
    y_ptr,  # [T, G, E] out
    rows,  # T * G
    eps,
    E: tl.constexpr,
    G: tl.constexpr,
    GATE_T: tl.constexpr,
    W_G: tl.constexpr,  # E, or 0 for one weight of all groups
    FIRST: tl.constexpr,  # the gate is before the norm
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= E
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    t, g = row // G, row % G
    e = tl.arange(0, BLOCK)[None, :]
    live = (row < rows)[:, None] & (e < E)
    kind = y_ptr.dtype.element_ty
    x = tl.load(x_ptr + row[:, None] * E + e, live, 0.0).to(tl.float32)
    gate = tl.load(gate_ptr + (t * GATE_T + g * E)[:, None] + e, live, 0.0).to(tl.float32)
    w = tl.load(w_ptr + (g * W_G)[:, None] + e, live, 0.0).to(tl.float32)
    opened = gate * sigmoid(gate)
    if FIRST:
        x *= opened
    scale = tl.rsqrt(tl.sum(x * x, 1) / E + eps)
    y = (x * scale[:, None]).to(kind).to(tl.float32) * w
    if not FIRST:
        y = y.to(kind).to(tl.float32) * opened
    tl.store(y_ptr + row[:, None] * E + e, y.to(kind), live)


def outputs(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, size: int, gate_first: bool
) -> Any:
    packed = x.is_contiguous() and weight.is_contiguous()
    if not packed or gate.stride(1) != 1 or size > MAX_SIZE:
        return NotImplemented
    return torch.empty(x.shape, dtype=weight.dtype, device=x.device)


def launch(
    out: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    size: int,
    gate_first: bool,
) -> None:
    tokens, channels = x.shape
    groups = channels // size
    programs, each, block, warps = launch_shape(tokens * groups, size)
    step = 0 if len(weight) == size else size
    _gated_norm(
        (programs, 1, 1),
        (x, gate, weight, out),
        (tokens * groups, eps),
        (size, groups, gate.stride(0), step, gate_first, each, block, PDL_ENABLED),
        warps=warps,
        pdl=PDL_ENABLED,
    )

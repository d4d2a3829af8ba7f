"""Gated add kernel: x + sigmoid(gate) * shared, one gate per row."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv

_BLOCK = 1024  # two 16-byte loads for each of 128 threads


@kernel()
def _gated_add(
    x_ptr,  # [T, E]
    shared_ptr,  # [T, E]
    gate_ptr,  # [T, 1]
    y_ptr,  # [T, E] out
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)  # T * E can pass 2**31
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + t).to(tl.float32)
    x = tl.load(x_ptr + t * E + e, e < E, 0.0).to(tl.float32)
    shared = tl.load(shared_ptr + t * E + e, e < E, 0.0).to(tl.float32)
    y = x + shared / (1.0 + tl.exp(-gate))
    tl.store(y_ptr + t * E + e, y.to(y_ptr.dtype.element_ty), e < E)


def outputs(x: Tensor, shared: Tensor, gate: Tensor) -> Any:
    if not (x.is_contiguous() and shared.is_contiguous() and gate.is_contiguous()):
        return NotImplemented
    return torch.empty_like(x)


def launch(out: Tensor, x: Tensor, shared: Tensor, gate: Tensor) -> None:
    rows, size = x.shape
    grid = (rows, cdiv(size, _BLOCK), 1)
    _gated_add(grid, (x, shared, gate, out), (), (size, _BLOCK))

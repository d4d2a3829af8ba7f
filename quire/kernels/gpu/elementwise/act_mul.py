"""Gated activation kernel: act(gate) * up over the halves of each row."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.elementwise.activations import activate
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel

_BLOCK = 1024  # two 16-byte loads for each of 128 threads


@kernel()
def _act_mul(
    x_ptr,  # [T, 2F]
    y_ptr,  # [T, F] out, packed
    F: tl.constexpr,
    X_T: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    t = tl.program_id(0).to(tl.int64)  # T * 2F can pass 2**31
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + t * X_T + f, f < F, 0.0).to(tl.float32)
    up = tl.load(x_ptr + t * X_T + F + f, f < F, 0.0).to(tl.float32)
    tl.store(y_ptr + t * F + f, (activate(gate, KIND) * up).to(x_ptr.dtype.element_ty), f < F)


def outputs(x: Tensor, kind: str) -> Any:
    if x.dim() != 2 or x.stride(1) != 1:
        return NotImplemented
    return torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype, device=x.device)


def launch(out: Tensor, x: Tensor, kind: str) -> None:
    rows, size = out.shape
    grid = (rows, cdiv(size, _BLOCK), 1)
    _act_mul(grid, (x, out), (), (size, x.stride(0), kind, _BLOCK, PDL_ENABLED), pdl=PDL_ENABLED)

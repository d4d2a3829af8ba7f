"""Weighted inputs kernel: rows times their weights, and the ones that are left of those."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv

_BLOCK = 1024  # two 16-byte loads for each of 128 threads


@kernel()
def _weighted_inputs(
    x_ptr,  # [T, E]
    weights_ptr,  # [T, 1] float32
    y_ptr,  # [T, E] out
    ones_ptr,  # [T, 1] out
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)  # T * E can pass 2**31
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weights_ptr + t)
    x = tl.load(x_ptr + t * E + e, e < E, 0.0).to(tl.float32)
    tl.store(y_ptr + t * E + e, (weight * x).to(y_ptr.dtype.element_ty), e < E)
    tl.store(ones_ptr + t, 1.0)


def outputs(x: Tensor, weights: Tensor) -> Any:
    if not (x.is_contiguous() and weights.is_contiguous()):
        return NotImplemented
    return torch.empty_like(x), torch.empty_like(weights)


def launch(out: tuple[Tensor, Tensor], x: Tensor, weights: Tensor) -> None:
    rows, size = x.shape
    grid = (rows, cdiv(size, _BLOCK), 1)
    _weighted_inputs(grid, (x, weights, *out), (), (size, _BLOCK))

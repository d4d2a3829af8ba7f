"""Activation kernel: act(x), element by element."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.elementwise.activations import activate
from quire.kernels.gpu.runtime.fast_launch import Grid, kernel
from quire.kernels.gpu.runtime.int_math import cdiv

BLOCK = 1024  # one 16-byte load for each of 128 threads


@kernel("units")
def _act(x_ptr, y_ptr, units, UNIT: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < units.to(tl.int64) * UNIT
    x = tl.load(x_ptr + i, live, 0.0).to(tl.float32)
    tl.store(y_ptr + i, activate(x, KIND).to(x_ptr.dtype.element_ty), live)


def flat_grid(n: int) -> tuple[Grid, int, int]:
    """(grid, units, UNIT): a length in units of 16 keeps the masked loads 16 bytes wide."""
    unit = 16 if n % 16 == 0 else 1
    return (cdiv(n, BLOCK), 1, 1), n // unit, unit


def outputs(x: Tensor, kind: str) -> Any:
    return torch.empty_like(x) if x.is_contiguous() else NotImplemented


def launch(out: Tensor, x: Tensor, kind: str) -> None:
    grid, units, unit = flat_grid(x.numel())
    _act(grid, (x, out), (units,), (unit, kind, BLOCK))

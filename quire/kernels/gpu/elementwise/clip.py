"""Clip kernel: x between -limit and limit, element by element."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.elementwise.act import BLOCK, flat_grid
from quire.kernels.gpu.runtime.fast_launch import kernel


@kernel("units", "limit")
def _clip(x_ptr, y_ptr, units, limit, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < units.to(tl.int64) * UNIT
    x = tl.load(x_ptr + i, live, 0.0).to(tl.float32)
    tl.store(y_ptr + i, tl.clamp(x, -limit, limit).to(x_ptr.dtype.element_ty), live)


def outputs(x: Tensor, limit: float) -> Any:
    return torch.empty_like(x) if x.is_contiguous() else NotImplemented


def launch(out: Tensor, x: Tensor, limit: float) -> None:
    grid, units, unit = flat_grid(x.numel())
    _clip(grid, (x, out), (units, limit), (unit, BLOCK))

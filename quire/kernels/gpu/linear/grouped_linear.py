"""Grouped linear: the product of x and a weight of two to eight bits, by the number of rows.

    up to 16        grouped_small_m.py, which lazy fusion also takes with the activation after it
    up to 64        grouped_gemm.py: codes are decoded in the registers that multiply
                    large matrices of 4 bits on Hopper, from 9: grouped_gemm_wgmma.py, the same
    up to 2,048     4 bits in groups of 128 on Hopper, but small matrices of up to 128 rows:
                    grouped_gemm_tiles.py, decoded in the registers that multiply
    up to 768       grouped_gemm_hopper.py: some warps decode for others; elsewhere grouped_gemm.py
    more            grouped_widen.py into a scratch as large as the layer, then the library

Rows in float32, which are for checking only, are always multiplied by the library. Where the
columns of a weight are permuted, those of x are gathered first.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.tiled_weight import TiledWeight
from quire.kernels.gpu.linear import grouped_gemm, grouped_widen
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel

HALF = (torch.bfloat16, torch.float16)

_MOST_ROWS = 768
_BLOCK = 1024


@kernel()
def _gather_columns(
    x_ptr,  # [T, I]
    perm_ptr,  # [I] int32
    y_ptr,  # [T, I] out
    I: tl.constexpr,
    X_T: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(perm_ptr + i, i < I, 0)
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    tl.store(y_ptr + t * I + i, tl.load(x_ptr + t * X_T + column), i < I)


def gather_columns(x: Tensor, perm: Tensor) -> Tensor:
    """x[:, perm]: [T, I]."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (x.shape[0], cdiv(x.shape[1], _BLOCK), 1)
    consts = (x.shape[1], x.stride(0), _BLOCK, PDL_ENABLED)
    _gather_columns(grid, (x, perm, y), (), consts, pdl=PDL_ENABLED)
    return y


def outputs(x: Tensor, weight: object, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, TiledWeight):
        return NotImplemented
    if x.dim() != 2 or x.stride(1) != 1 or (x.dtype in HALF and x.dtype != weight.dtype):
        return NotImplemented
    return torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)


def launch(out: Tensor, x: Tensor, weight: TiledWeight, bias: Tensor | None = None) -> None:
    if not x.shape[0]:
        return
    if weight.perm is not None:
        x = gather_columns(x, weight.perm)
    small, hopper, wgmma, tiles = gluon_modules(x)
    if wgmma is not None and wgmma.supports(x, weight):
        wgmma.launch(out, x, weight, bias)
    elif small is not None and small.supports(x, weight, bias):
        small.launch(out, x, weight, bias)
    elif tiles is not None and tiles.supports(x, weight):
        tiles.launch(out, x, weight, bias)
    elif x.dtype not in HALF or x.shape[0] > _fused_rows(weight):
        plain = grouped_widen.widen(weight, x.dtype)
        if bias is None:
            torch.mm(x, plain.t(), out=out)
        else:
            torch.addmm(bias, x, plain.t(), out=out)
    elif x.shape[0] > grouped_gemm.SMALL_M and hopper is not None and hopper.supports(x, weight):
        hopper.launch(out, x, weight, bias)
    else:
        grouped_gemm.launch(out, x, weight, bias)


def _fused_rows(weight: TiledWeight) -> int:
    """Rows up to which decoding in the product costs less than widening the layer once.

    Blocks of more slices than those of 4 and 8 bits leave no room for tiles of many rows.
    """
    return _MOST_ROWS if weight.slices == 4 else grouped_gemm.SMALL_M


def gluon_modules(x: Tensor) -> tuple[Any, Any, Any, Any]:
    """The kernels that need Gluon: for few rows, for more, and two for 4 bits; None: not here."""
    return (None,) * 4 if x.is_cpu else _import_gluon_modules()


@functools.cache
def _import_gluon_modules() -> tuple[Any, Any, Any, Any]:
    try:
        return tuple(
            import_module(f"quire.kernels.gpu.linear.{name}")
            for name in (
                "grouped_small_m",
                "grouped_gemm_hopper",
                "grouped_gemm_wgmma",
                "grouped_gemm_tiles",
            )
        )  # type: ignore[return-value]
    except ImportError:
        return (None,) * 4

"""Up to 64 rows times a weight matrix: calls the kernel that was fastest when measured.

    bands             small_m_bands.py: two to eight rows; the norm before and the residual after
    Gluon             small_m_plans.py: up to 32 rows, where it was faster when measured
    few bits          grouped_small_m.py: weights of two to eight bits
    one row           gemv.py, or gemv_bytes.py over weights in e4m3 or bytes: whole rows
                      of W in registers
    small weights     gemv_rows.py: they are loaded before a pipeline through shared memory fills.
                      Good while the sums, one per row, take no longer than the loads
    other weights     small_m_gemm.py: tensor cores, faster than cuBLAS up to about eight rows
    more rows         cuBLAS; lazy fusion holds them for adapters (gpu/lora/adapted_linear.py)

Several rows over weights in e4m3 or bytes are quantized first (quantize_fused.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.formats.fp8_weight import Fp8Weight
from quire.kernels.formats.int8_weight import Int8Weight
from quire.kernels.formats.tiled_weight import TiledWeight
from quire.kernels.gpu.linear import (
    gemv,
    gemv_bytes,
    gemv_rows,
    grouped_linear,
    linear,
    quantize_fused,
    small_m_gemm,
    small_m_plans,
)
from quire.kernels.gpu.linear.gemv import AddedResidual, FusedActivation, FusedNorm

MAX_ROWS = 8
"""Rows of the largest step that these kernels multiply."""

MAX_HELD_ROWS = 64
"""Rows of the largest product of a plain weight that lazy fusion holds."""

_SMALL_WEIGHT = 4_500_000  # numbers of a weight
_SMALL_WEIGHT_ROWS = 4


def supports(x: Tensor, weight: object, bias: Tensor | None) -> bool:
    """Whether lazy fusion may hold this product: half precision, packed, few rows or bytes."""
    if not x.shape[0]:
        return False
    if isinstance(weight, Fp8Weight | Int8Weight):
        body = gemv_bytes if x.shape[0] == 1 else quantize_fused
        return body.supports(x, weight, bias)
    if isinstance(weight, TiledWeight):
        small, *_ = grouped_linear.gluon_modules(x)
        few = x.shape[0] <= MAX_ROWS and weight.perm is None
        return few and small is not None and small.supports(x, weight, bias)
    if x.shape[0] == 1:
        return gemv.supports(x, weight, bias)
    if not isinstance(weight, Tensor) or x.shape[0] > MAX_HELD_ROWS:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or x.dtype != weight.dtype:
        return False
    if x.stride(1) != 1 or x.stride(0) % 8 or not weight.is_contiguous() or weight.shape[1] % 8:
        return False
    return bias is None or bias.is_contiguous()


def fuses_norm(x: Tensor, weight: object, squares: Tensor | None) -> bool:
    """Whether the product can begin with the norm of its rows. squares: partial sums of those that
    the norm needs, if there are any; without them one row only."""
    if x.shape[0] == 1:
        return not isinstance(weight, TiledWeight)
    if squares is None or not isinstance(weight, Tensor):
        return False
    # whether an activation follows is not decided yet
    return all(
        small_m_plans.find_bands(x.shape[0], weight, pair, True) is not None
        for pair in (False, True)
    )


def adds_residual(x: Tensor, weight: object) -> bool:
    """Whether the product can add a residual to its result, and up the squares of the sum, for a
    norm inside of the next product."""
    if not isinstance(weight, Tensor) or x.shape[0] > small_m_plans.MAX_NORMED_ROWS:
        return False
    return small_m_plans.find_bands(x.shape[0], weight, False, False) is not None


def added_residual(residual: Tensor, r: Tensor) -> AddedResidual:
    """Return what a product adds, with space for the squares. r: where the sum will be."""
    return AddedResidual(residual, r, small_m_plans.empty_squares(r))


def fuses_act(x: Tensor, weight: object) -> bool:
    """Whether an activation can be computed with the product."""
    if x.shape[0] > MAX_ROWS and isinstance(weight, Tensor):
        return small_m_plans.find_plan(x.shape[0], weight, True) is not None
    bytes_ = isinstance(weight, Fp8Weight | Int8Weight)
    return x.shape[0] == 1 or (x.shape[0] <= MAX_ROWS and not bytes_)


def multiplies_rows(weight: Tensor, rows: int) -> bool:
    """Whether a product without an activation is that of gemv_rows.py."""
    return weight.numel() <= _SMALL_WEIGHT and rows <= _SMALL_WEIGHT_ROWS


def launch(
    z: Tensor,
    x: Tensor,
    weight: Tensor | Fp8Weight | Int8Weight | TiledWeight,
    bias: Tensor | None = None,
    norm: FusedNorm | None = None,
    act: FusedActivation | None = None,
    memory_idle: bool = False,
    added: AddedResidual | None = None,
) -> None:
    """z [T, O] = x @ weight.T + bias; fills the results of norm (see fuses_norm), act and added
    (see adds_residual) too.

    memory_idle: the previous kernel leaves memory idle (as attention), so weights may load early.
    """
    if isinstance(weight, Fp8Weight | Int8Weight):
        gemv_bytes.launch(z, x, weight, bias, norm, act, memory_idle)
    elif isinstance(weight, TiledWeight):
        grouped_linear.gluon_modules(x)[0].launch(z, x, weight, bias, act)
    elif x.shape[0] == 1:
        gemv.launch(z, x, weight, bias, norm, act, memory_idle)
    elif bands := small_m_plans.find_bands(x.shape[0], weight, act is not None, norm is not None):
        small_m_plans.launch_bands(z, x, weight, bias, bands, norm, act, added)
    elif plan := small_m_plans.find_plan(x.shape[0], weight, act is not None):
        small_m_plans.launch(z, x, weight, bias, act, plan)
    elif x.shape[0] > MAX_ROWS:
        linear.launch(z, x, weight, bias)
    elif act is None and multiplies_rows(weight, x.shape[0]):
        gemv_rows.launch(z, x, weight, bias)
    else:
        small_m_gemm.launch(z, x, weight, bias, act)

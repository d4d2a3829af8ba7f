"""Two to eight rows times a plain weight: which of the two ways, as measured.

Small weights are gone before a pipeline through shared memory has filled: their rows are loaded
whole (gpu/gemv_rows.py), as long as the sums, once a row, do not take longer than the loads. All
others go through the tensor cores (gpu/skinny.py), which beats the library up to about eight rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.gpu.linear import gemv_rows, small_m_gemm
from quire.kernels.gpu.linear.gemv import FusedActivation, FusedNorm

MAX_ROWS = 8
"""Rows of the largest step that goes one of these ways."""

_SMALL_WEIGHT = 4_500_000  # numbers of a weight
_SMALL_WEIGHT_ROWS = 4


def supports(x: Tensor, weight: object, bias: Tensor | None) -> bool:
    """Whether these rows can go this way: half precision, packed, few."""
    if not isinstance(weight, Tensor) or not 1 < x.shape[0] <= MAX_ROWS:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or x.dtype != weight.dtype:
        return False
    if x.stride(1) != 1 or x.stride(0) % 8 or not weight.is_contiguous() or weight.shape[1] % 8:
        return False
    return bias is None or bias.is_contiguous()


def launch(
    z: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: FusedNorm | None = None,
    act: FusedActivation | None = None,
    quiet: bool = False,
) -> None:
    """z [T, O] = x @ weight.T + bias; fills act's result too. As gemv.launch; norm: never here."""
    assert norm is None, "the norm of several rows is launched before"
    small = act is None and weight.numel() <= _SMALL_WEIGHT and x.shape[0] <= _SMALL_WEIGHT_ROWS
    if small:
        gemv_rows.launch(z, x, weight, bias)
    else:
        small_m_gemm.launch(z, x, weight, bias, act)

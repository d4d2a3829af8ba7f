"""One row times a weight in e4m3: which rows gemv_bytes.py multiplies."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.formats.fp8_weight import BLOCK_SIZE, Fp8Weight
from quire.kernels.gpu.linear.gemv import MAX_INPUTS
from quire.kernels.gpu.linear.gemv_bytes import launch

__all__ = ["launch", "supports"]


def supports(x: Tensor, weight: object, bias: Tensor | None) -> bool:
    """Whether this kernel multiplies this row: half precision, packed, no static scale."""
    if not isinstance(weight, Fp8Weight) or weight.input_scale is not None or x.shape[0] != 1:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or x.stride(1) != 1:
        return False
    outputs, inputs = weight.shape
    if inputs > MAX_INPUTS or inputs % 16 or (weight.block_size and outputs % (2 * BLOCK_SIZE)):
        return False
    return bias is None or bias.is_contiguous()

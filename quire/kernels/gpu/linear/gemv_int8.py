"""One row times a weight in bytes: which rows gemv_bytes.py multiplies."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.formats.int8_weight import Int8Weight
from quire.kernels.gpu.linear.gemv import MAX_INPUTS
from quire.kernels.gpu.linear.gemv_bytes import launch

__all__ = ["launch", "quantizes", "supports"]


def supports(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> bool:
    """Whether this kernel multiplies this row: half precision, packed, a scale of its own."""
    if not quantizes(weight) or x.shape[0] != 1 or x.stride(1) != 1:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or x.shape[1] % 16:
        return False
    return x.shape[1] <= MAX_INPUTS and (bias is None or bias.is_contiguous())


def quantizes(weight: Int8Weight) -> bool:
    """Whether rows for this weight have scales of their own and no zero point."""
    return weight.symmetric and weight.input_scale is None and weight.data.is_contiguous()

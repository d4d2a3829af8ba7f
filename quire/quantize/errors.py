"""Relative squared errors of quantized matrices."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.formats.fp8_weight import Fp8Weight
from quire.kernels.formats.weight_codes import WeightCodes


def weight_error(weight: Tensor, made: WeightCodes | Fp8Weight) -> float:
    """sum((w - quantized)^2) / sum(w^2), in float32; 0 for a matrix of zeros."""
    wide = weight.float()
    whole = float(wide.square().sum())
    return float((wide - made.dequantize()).square().sum()) / whole if whole else 0.0


def output_error(weight: Tensor, quantized: Tensor, gram: Tensor) -> float:
    """The same of outputs x @ w.T, over inputs x with gram = x.T @ x [I, I]."""
    wide = weight.float()
    difference = wide - quantized
    whole = float(((wide @ gram) * wide).sum())
    return float(((difference @ gram) * difference).sum()) / whole if whole else 0.0

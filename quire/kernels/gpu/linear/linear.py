"""Matrix product: cuBLAS for plain weights, into a tensor that exists already.

Lazy fusion takes few rows to small_m_linear.py; weights in e4m3 have fp8_linear.py, those in
bytes int8_linear.py, those of two to eight bits grouped_linear.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.kernels.formats.fp8_weight import Fp8Weight
from quire.kernels.formats.int8_weight import Int8Weight
from quire.kernels.formats.tiled_weight import TiledWeight
from quire.kernels.gpu.linear import fp8_linear, grouped_linear, int8_linear


def outputs(x: Tensor, weight: Any, bias: Tensor | None = None) -> Any:
    if isinstance(weight, Fp8Weight):
        return fp8_linear.outputs(x, weight, bias)
    if isinstance(weight, Int8Weight):
        return int8_linear.outputs(x, weight, bias)
    if isinstance(weight, TiledWeight):
        return grouped_linear.outputs(x, weight, bias)
    if not isinstance(weight, Tensor) or x.dtype != weight.dtype or x.dim() != 2:
        return NotImplemented
    return torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)


def launch(out: Tensor, x: Tensor, weight: Any, bias: Tensor | None = None) -> None:
    if isinstance(weight, Fp8Weight):
        fp8_linear.launch(out, x, weight, bias)
    elif isinstance(weight, Int8Weight):
        int8_linear.launch(out, x, weight, bias)
    elif isinstance(weight, TiledWeight):
        grouped_linear.launch(out, x, weight, bias)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)

"""Scale kernel of routes: the weight of each chosen expert times the expert's factor."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2


@kernel()
def _scale_routes(weights_ptr, ids_ptr, factors_ptr, y_ptr, K: tl.constexpr, KP: tl.constexpr):
    k = tl.arange(0, KP)
    at = tl.program_id(0).to(tl.int64) * K + k
    expert = tl.load(ids_ptr + at, k < K, 0)
    factor = tl.load(factors_ptr + expert).to(tl.float32)
    tl.store(y_ptr + at, tl.load(weights_ptr + at, k < K, 0.0) * factor, k < K)


def outputs(weights: Tensor, ids: Tensor, factors: Tensor) -> Any:
    if not (weights.is_contiguous() and ids.is_contiguous() and factors.is_contiguous()):
        return NotImplemented
    return torch.empty_like(weights)


def launch(out: Tensor, weights: Tensor, ids: Tensor, factors: Tensor) -> None:
    rows, k = weights.shape
    _scale_routes((rows, 1, 1), (weights, ids, factors, out), (), (k, next_power_of_2(k)))

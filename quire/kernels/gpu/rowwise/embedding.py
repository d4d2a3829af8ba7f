"""Embedding kernel: rows of the embedding table, one program per piece of a row."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.embedding import round_to_dtype
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv

_BLOCK = 2048


@kernel("scale")
def _embedding(
    ids_ptr,  # [T] int32
    w_ptr,  # [V, E]
    y_ptr,  # [T, E] out
    scale,
    E: tl.constexpr,
    W_V: tl.constexpr,  # stride of a row
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + t).to(tl.int64)  # V * E can pass 2**31
    x = tl.load(w_ptr + row * W_V + e, e < E, 0.0)
    if SCALED:
        x = (x.to(tl.float32) * scale).to(w_ptr.dtype.element_ty)
    tl.store(y_ptr + t * E + e, x, e < E)


def outputs(ids: Tensor, weight: Any, scale: float = 1.0) -> Any:
    if not isinstance(weight, Tensor) or weight.stride(1) != 1:
        return NotImplemented
    if ids.dtype != torch.int32 or not ids.is_contiguous():
        return NotImplemented
    return torch.empty((ids.shape[0], weight.shape[1]), dtype=weight.dtype, device=weight.device)


def launch(out: Tensor, ids: Tensor, weight: Tensor, scale: float = 1.0) -> None:
    rows, size = out.shape
    scaled = scale != 1.0
    _embedding(
        (rows, cdiv(size, _BLOCK), 1),
        (ids, weight, out),
        (round_to_dtype(scale, weight.dtype) if scaled else 1.0,),
        (size, weight.stride(0), scaled, _BLOCK),
    )

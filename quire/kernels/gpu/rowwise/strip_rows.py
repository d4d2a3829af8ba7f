"""Kernel of embeddings within one rank's strip of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv

_BLOCK = 2048


@kernel("first", "count")
def _strip_rows(
    x_ptr,  # [T, E]
    ids_ptr,  # [T] int32
    y_ptr,  # [T, E] out
    first,
    count,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    local = tl.load(ids_ptr + t) - first
    here = (local >= 0) & (local < count)
    x = tl.load(x_ptr + t * E + e, (e < E) & here, 0.0)
    tl.store(y_ptr + t * E + e, x, e < E)


def outputs(rows: Tensor, ids: Tensor, first: int, count: int) -> Any:
    if ids.dtype != torch.int32 or not ids.is_contiguous() or not rows.is_contiguous():
        return NotImplemented
    return torch.empty_like(rows)


def launch(out: Tensor, rows: Tensor, ids: Tensor, first: int, count: int) -> None:
    tokens, size = rows.shape
    grid = (tokens, cdiv(size, _BLOCK), 1)
    _strip_rows(grid, (rows, ids, out), (first, count), (size, _BLOCK))

"""Kernel of token ids within one rank's strip of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv

_BLOCK = 1024


@kernel("tokens", "first", "count")
def _strip_ids(ids_ptr, local_ptr, tokens, first, count, BLOCK: tl.constexpr):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    local = tl.load(ids_ptr + t, t < tokens, 0) - first
    tl.store(local_ptr + t, tl.where((local >= 0) & (local < count), local, 0), t < tokens)


def outputs(ids: Tensor, first: int, count: int) -> Any:
    if ids.dtype != torch.int32 or not ids.is_contiguous():
        return NotImplemented
    return torch.empty_like(ids)


def launch(out: Tensor, ids: Tensor, first: int, count: int) -> None:
    tokens = ids.shape[0]
    _strip_ids((cdiv(tokens, _BLOCK), 1, 1), (ids, out), (tokens, first, count), (_BLOCK,))

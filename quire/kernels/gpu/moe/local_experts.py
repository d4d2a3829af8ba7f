"""Local experts kernel: looks up where the chosen experts are, and counts them."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv

_BLOCK = 256


@kernel("pairs")
def _local_experts(
    id_ptr,  # [T, TOP]
    place_ptr,  # [X, MOST]
    copy_ptr,  # [X]
    load_ptr,  # [X] int64, or None
    y_ptr,  # [T, TOP] out
    pairs,
    TOP: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(id_ptr + at, at < pairs, -1)
    known = expert >= 0
    copies = tl.load(copy_ptr + expert, known, 1)
    place = tl.load(place_ptr + expert * MOST + at // TOP % copies, known, -1)
    tl.store(y_ptr + at, place, at < pairs)
    if load_ptr is not None:
        tl.atomic_add(load_ptr + expert, known.to(tl.int64), known, sem="relaxed")


def outputs(ids: Tensor, place: Tensor, copies: Tensor, load: Tensor | None = None) -> Any:
    return torch.empty_like(ids) if ids.is_contiguous() else NotImplemented


def launch(
    out: Tensor, ids: Tensor, place: Tensor, copies: Tensor, load: Tensor | None = None
) -> None:
    pairs = ids.numel()
    grid = (cdiv(pairs, _BLOCK), 1, 1)
    consts = (ids.shape[1], place.shape[1], _BLOCK)
    if pairs:
        _local_experts(grid, (ids, place, copies, load, out), (pairs,), consts)

"""Segment pooling kernel: a program per segment and piece of a row; tokens a few at a time."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.segment_pool import PoolMode

_COLUMNS = 64
_TOKENS = 16


@kernel()
def _segment_pool(
    x_ptr,  # [T, E]
    begins_ptr,  # [N] int32
    ends_ptr,  # [N] int32
    offsets_ptr,  # [N] int32
    out_ptr,  # [N, E] out
    E: tl.constexpr,
    X_T: tl.constexpr,  # stride of a row
    MAX: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin, end = tl.load(begins_ptr + n), tl.load(ends_ptr + n)
    offset = tl.load(offsets_ptr + n)
    rows = tl.arange(0, TOKENS)
    if MAX:
        kept = tl.full((TOKENS, COLUMNS), float("-inf"), tl.float32)
    else:
        kept = tl.zeros((TOKENS, COLUMNS), tl.float64)
    nan = tl.zeros((TOKENS, COLUMNS), tl.int32)
    at = begin
    while at < end:
        t = (at + rows)[:, None]
        inside = (t < end) & (e[None, :] < E)
        x = tl.load(x_ptr + t.to(tl.int64) * X_T + e[None, :], inside, 0.0).to(tl.float32)
        if MAX:
            nan |= (x != x).to(tl.int32)
            kept = tl.where(inside & (x > kept), x, kept)
        elif WEIGHTED:
            weight = (offset + 1 + t - begin).to(tl.float64)
            kept += tl.where(inside, x.to(tl.float64) * weight, 0.0)
        else:
            kept += x.to(tl.float64)
        at += TOKENS
    if MAX:
        best = tl.max(kept, 0)
        best = tl.where(tl.max(nan, 0) > 0, float("nan"), best)
        tl.store(out_ptr + n * E + e, best, e < E)
    else:
        tl.store(out_ptr + n * E + e, tl.sum(kept, 0), e < E)


def outputs(x: Tensor, begins: Tensor, ends: Tensor, offsets: Tensor, mode: PoolMode) -> Tensor:
    if x.stride(1) != 1:
        return NotImplemented
    dtype = torch.float32 if mode == "max" else torch.float64
    return torch.empty((len(begins), x.shape[1]), dtype=dtype, device=x.device)


def launch(
    out: Tensor, x: Tensor, begins: Tensor, ends: Tensor, offsets: Tensor, mode: PoolMode
) -> None:
    segments, size = out.shape
    if not segments:
        return
    _segment_pool(
        (segments, cdiv(size, _COLUMNS), 1),
        (x, begins, ends, offsets, out),
        (),
        (size, x.stride(0), mode == "max", mode == "weighted", _TOKENS, _COLUMNS),
    )

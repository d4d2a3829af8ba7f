"""MLA slice on the GPU: the splits of mla_decode, and a merge that keeps the sum of the
exponentials.

Axes: as in quire.kernels.mla_slice; X splits.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.mla.mla_decode import (
    MAX_SPLITS,
    MIN_SPLIT_LATENTS,
    attend_splits,
    merge_splits,
)
from quire.kernels.gpu.runtime.fast_launch import kernel


@kernel("splits")
def merge_slice_kernel(
    part_ptr,  # [S, X, H, L] float32
    weight_ptr,  # [S, X, H] float32
    contexts_ptr,  # [S]
    out_ptr,  # [H, S, L + 1] float32
    splits,
    H: tl.constexpr,
    L: tl.constexpr,
    BN: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    BX: tl.constexpr,  # parts at a time
    BL: tl.constexpr,  # channels of a program
):
    """Sum the parts of one head, each by its share of all."""
    s = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0)
    c = tl.program_id(2) * BL + tl.arange(0, BL)
    acc, total, highest = merge_splits(
        part_ptr, weight_ptr, contexts_ptr, s, h, c, splits, H, L, BN, MOST, LEAST, BX
    )
    where = (h * tl.num_programs(1) + s) * (L + 1)
    tl.store(out_ptr + where + c, acc)
    tl.store(out_ptr + where + L, tl.where(total > 0, highest + tl.log2(total), -1e30))


def outputs(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    contexts: Tensor,
    scale: float,
    latent: int,
    rows: Tensor | None = None,
) -> Tensor:
    """[H, S, L + 1]. The latent's sizes must be powers of two, all of one dtype."""
    for size in (latent, q.shape[2] - latent):
        if size < 16 or size & (size - 1):
            return NotImplemented
    if latent > 512 or not cache.is_contiguous() or cache.dtype != q.dtype or q.stride(-1) != 1:
        return NotImplemented
    return torch.empty((q.shape[1], len(q), latent + 1), dtype=torch.float32, device=q.device)


def launch(
    out: Tensor,
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    contexts: Tensor,
    scale: float,
    latent: int,
    rows: Tensor | None = None,
) -> None:
    plain, rotated, count = q[..., :latent], q[..., latent:], len(q)
    where = (cache, tables, contexts, scale * math.log2(math.e), rows, count)
    found = attend_splits(plain, rotated, *where)
    heads = q.shape[1]
    wide = latent if count * heads >= 1024 else min(latent, 128)
    merge_slice_kernel(
        (heads, count, latent // wide),
        (found.part, found.weight, contexts, out),
        (found.splits,),
        (heads, latent, found.tile.latents, MAX_SPLITS, MIN_SPLIT_LATENTS, 8, wide),
    )

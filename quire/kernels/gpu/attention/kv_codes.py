"""Codes of 8 bits in the KV cache, for the kernels that write it. See quire.kernels.kv_write.

    SCALES 0    the layer's scale of keys, or of values
    SCALES 1    given for each head
    SCALES 2    measured for each token and head, and stored

All functions are inlined. Divisions are exact and codes are rounded to nearest even: results equal
the CPU's bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.kv_cache import head_step
from quire.kernels.kv_write import CODES, scale_args

_INFINITY_BITS = tl.constexpr(0x7F800000)
_ROUNDS = tl.constexpr(12582912.0)  # 1.5 * 2**23: what is added to it is an integer


class CodeLayout(NamedTuple):
    """Constants of a kernel that follow from a cache [N, 2, K, B, D] and its scales."""

    head: int  # elements from head to head
    block_scales: int  # steps of scales, in elements: from block to block
    head_scales: int
    token_scales: int
    code: int  # 0: no codes, 1: int8, 2: e4m3, 3: e5m2
    scales: int  # SCALES

    @classmethod
    def of(
        cls, cache: Tensor, scales: Tensor | None, head_scales: Tensor | None = None
    ) -> CodeLayout:
        """scales: [N, 2, K, B], measured by a kernel that writes. head_scales: [2, K]."""
        steps = scale_args(scales, head_scales)[1:]
        kind = 2 if scales is not None else 1 if head_scales is not None else 0
        return cls(head_step(cache), *steps, CODES.get(cache.dtype, 0), kind)


def takes(cache: Tensor, dtype: torch.dtype) -> bool:
    """Whether fused kernels write this cache of keys in `dtype`."""
    return cache.dtype == dtype or cache.dtype in CODES


@triton.jit
def scale_pointers(scales_ptr, slot, head, B: tl.constexpr, S_N: tl.constexpr, S_H: tl.constexpr,
                   S_T: tl.constexpr, SCALES: tl.constexpr):  # fmt: skip
    """Pointers to the scales of heads [M] of the token in a slot; what is not read without scales.

    K heads further on there are those of its values.
    """
    where = head
    if SCALES != 0:
        where = scales_ptr + slot // B * S_N + slot % B * S_T + head * S_H
    return where


@triton.jit
def magnitude_bits(x):
    """Bits of the largest magnitude of each row of x [M, D]; a NaN is larger than all."""
    return tl.max(x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def find_scales(bits, given, where, live, CODE: tl.constexpr, SCALES: tl.constexpr):
    """Scales [M] of rows with these bits; stored at `where` if they are measured."""
    if SCALES == 2:
        limit: tl.constexpr = 127.0 if CODE == 1 else 448.0 if CODE == 2 else 57344.0
        scale = tl.div_rn(bits.to(tl.float32, bitcast=True), limit)
        scale = tl.where(bits >= _INFINITY_BITS, float("nan"), scale)
        tl.store(where, scale, mask=live)
    elif SCALES == 1:
        scale = tl.load(where, mask=live, other=1.0)
    else:
        scale = tl.zeros_like(bits).to(tl.float32) + given
    return scale


@triton.jit
def to_codes(x, scale, CODE: tl.constexpr):
    """x [M, D] as float32 numbers that the dtype of the codes has; x itself without codes."""
    if CODE != 0:
        limit: tl.constexpr = 127.0 if CODE == 1 else 448.0 if CODE == 2 else 57344.0
        x = tl.div_rn(x.to(tl.float32), tl.where(scale == 0.0, 1.0, scale)[:, None])
        finite = tl.minimum(tl.maximum(x, -limit), limit)
        if CODE == 1:
            x = tl.where(x == x, finite + _ROUNDS - _ROUNDS, 0.0)
        else:
            x = tl.where(x == x, finite, x)
    return x

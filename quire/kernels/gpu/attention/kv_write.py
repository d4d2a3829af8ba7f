"""KV write kernel: stores new keys and values in the paged cache, one program per token."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.kv_cache import has_dense_heads
from quire.kernels.gpu.attention.kv_codes import (
    CodeLayout,
    find_scales,
    magnitude_bits,
    scale_pointers,
    to_codes,
)
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2

_MAX_NUMBERS = 65536
"""Keys of a token that a program holds, heads and channels rounded up to powers of two."""


@triton.jit
def _write(x_ptr, cache_ptr, scales_ptr, row, i, given, live, CODE: tl.constexpr,
           SCALES: tl.constexpr):  # fmt: skip
    """Heads [KP, DP] of one token. Pointers: of x [KP, DP], of the cache, of the scales [KP]."""
    x = tl.load(x_ptr, mask=live, other=0.0)
    if CODE != 0:
        scale = find_scales(magnitude_bits(x), given, scales_ptr, row, CODE, SCALES)
        x = to_codes(x, scale, CODE)
    tl.store(cache_ptr + i, x.to(cache_ptr.dtype.element_ty), mask=live)


@kernel("k_scale", "v_scale")
def _kv_write(
    k_ptr,  # [T, K, D]
    v_ptr,  # [T, K, D]
    cache_ptr,  # [N, 2, K, B, D], heads HEAD apart
    slots_ptr,  # [T] int64
    scales_ptr,  # [N, 2, K, B] or [2, K], if SCALES
    k_scale,
    v_scale,
    K_T: tl.constexpr,
    K_H: tl.constexpr,
    V_T: tl.constexpr,
    V_H: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    KP: tl.constexpr,  # powers of two >= K and D
    DP: tl.constexpr,
    HEAD: tl.constexpr,
    S_N: tl.constexpr,
    S_H: tl.constexpr,
    S_T: tl.constexpr,
    CODE: tl.constexpr,
    SCALES: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)  # T * K * D can pass 2**31
    slot = tl.load(slots_ptr + t)
    if slot >= 0:
        h = tl.arange(0, KP)
        head, d = h[:, None], tl.arange(0, DP)[None, :]
        live = (head < K) & (d < D)
        block, offset = slot // B, slot % B
        where = cache_ptr + block * (2 * K * HEAD) + offset * D
        scales = scale_pointers(scales_ptr, slot, h, B, S_N, S_H, S_T, SCALES)
        _write(k_ptr + t * K_T + head * K_H + d, where, scales, h < K,
               head * HEAD + d, k_scale, live, CODE, SCALES)  # fmt: skip
        _write(v_ptr + t * V_T + head * V_H + d, where, scales + K * S_H, h < K,
               (K + head) * HEAD + d, v_scale, live, CODE, SCALES)  # fmt: skip


def outputs(k: Tensor, v: Tensor, cache: Tensor, *_: Any, **__: Any) -> None:
    """Nothing to allocate. NotImplemented for layouts the kernel does not read."""
    strided = k.stride(2) == 1 and v.stride(2) == 1 and has_dense_heads(cache)
    if not strided or next_power_of_2(k.shape[1]) * next_power_of_2(k.shape[2]) > _MAX_NUMBERS:
        return NotImplemented
    return None


def launch(
    outs: None,
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    slots: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    scales: Tensor | None = None,
    head_scales: Tensor | None = None,
) -> None:
    """Start the write of k, v [T, K, D]."""
    tokens, heads, size = k.shape
    if not tokens:
        return
    rows, width = next_power_of_2(heads), next_power_of_2(size)
    _kv_write(
        (tokens, 1, 1),
        (k, v, cache, slots, head_scales if scales is None else scales),
        (k_scale, v_scale),
        (
            *k.stride()[:2], *v.stride()[:2], heads, cache.shape[3], size, rows, width,
            *CodeLayout.of(cache, scales, head_scales),
        ),
        warps=min(max(rows * width // 256, 1), 8),
    )  # fmt: skip

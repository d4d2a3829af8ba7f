"""KV write kernel: stores new keys and values in the paged cache, one program per token.

An fp8 cache stores x / scale, clamped to what e4m3 can hold.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2

_E4M3_MAX = tl.constexpr(448.0)


@kernel("k_scale", "v_scale")
def _kv_write(
    k_ptr,  # [T, K, D]
    v_ptr,  # [T, K, D]
    cache_ptr,  # [N, 2, K, B, D]
    slots_ptr,  # [T] int64
    k_scale,
    v_scale,
    K_T: tl.constexpr,
    K_H: tl.constexpr,
    V_T: tl.constexpr,
    V_H: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= K * D
    FP8: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)  # T * K * D can pass 2**31
    slot = tl.load(slots_ptr + t)
    if slot >= 0:
        i = tl.arange(0, BLOCK)
        head, d = i // D, i % D
        live = i < K * D
        k = tl.load(k_ptr + t * K_T + head * K_H + d, mask=live, other=0.0)
        v = tl.load(v_ptr + t * V_T + head * V_H + d, mask=live, other=0.0)
        if FP8:
            k = tl.clamp(k.to(tl.float32) / k_scale, -_E4M3_MAX, _E4M3_MAX)
            v = tl.clamp(v.to(tl.float32) / v_scale, -_E4M3_MAX, _E4M3_MAX)
        dtype = cache_ptr.dtype.element_ty
        where = cache_ptr + (slot // B * (2 * K * B) + slot % B) * D + head * (B * D) + d
        tl.store(where, k.to(dtype), mask=live)
        tl.store(where + K * B * D, v.to(dtype), mask=live)


def outputs(
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    slots: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Nothing to allocate. NotImplemented for layouts the kernel does not read."""
    strided = k.stride(2) == 1 and v.stride(2) == 1 and cache.is_contiguous()
    if not strided or k.shape[1] * k.shape[2] > 65536:
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
) -> None:
    """Start the write of k, v [T, K, D]."""
    tokens, heads, size = k.shape
    if not tokens:
        return
    block = next_power_of_2(heads * size)
    _kv_write(
        (tokens, 1, 1),
        (k, v, cache, slots),
        (k_scale, v_scale),
        (
            *k.stride()[:2], *v.stride()[:2], heads, cache.shape[3], size, block,
            cache.dtype == torch.float8_e4m3fn,
        ),
        warps=min(max(block // 256, 1), 8),
    )  # fmt: skip

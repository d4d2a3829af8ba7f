"""KV write stores new keys and values in the paged cache.

    slot = block * B + offset in the block; a negative slot is padding and is skipped
    a cache of 8 bits holds codes: x / scale, rounded, cut at the limits of the dtype

The scale is one of the layer, or of each head, or is measured for each token and head and stored.

Axes: T tokens in the step, K kv heads, D head size, N blocks in the pool, B block size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.formats.kv_cache import (
    CODE_LIMITS,
    allocate_blocks,
    encode,
    encode_per_token,
    has_dense_heads,
    head_step,
)
from quire.kernels.framework.op import op
from quire.kernels.native.library import DTYPES, WRITE, NativeOp

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, k, d, b, dtype, cached, kind in [
        (1, 2, 64, 16, torch.float32, torch.float32, ""),
        (7, 1, 80, 16, torch.bfloat16, torch.bfloat16, ""),
        (33, 8, 128, 8, torch.bfloat16, torch.bfloat16, ""),
        (5, 2, 20, 1, torch.float32, torch.float32, ""),
        (4, 2, 32, 16, torch.float16, torch.float16, ""),
        (4, 2, 32, 16, torch.float32, torch.bfloat16, ""),
        (6, 2, 32, 16, torch.bfloat16, E4M3, "layer"),
        (6, 2, 32, 16, torch.float32, E5M2, "layer"),
        (6, 2, 32, 16, torch.bfloat16, INT8, "layer"),
        (6, 2, 32, 16, torch.float32, INT8, "head"),
        (9, 3, 80, 4, torch.bfloat16, E4M3, "head"),
        (5, 2, 20, 1, torch.float32, INT8, "token"),
        (33, 8, 128, 16, torch.bfloat16, INT8, "token"),
        (9, 3, 80, 4, torch.float16, E4M3, "token"),
        (9, 2, 32, 16, torch.float32, E4M3, "token"),
    ]:
        qkv = torch.randn(t, 4 * k, d, device=device).to(dtype)
        shape, scales = (9, 2, k, b, d), None
        cache = torch.randn(shape, device=device).to(cached)
        if kind == "token":
            cache, scales = allocate_blocks(shape, cached, device)
        slots = torch.randperm(9 * b, device=device)[:t].contiguous()
        slots[t // 2] = -1 if t > 1 else slots[0]
        case: dict[str, Any] = {
            "k": qkv[:, :k],
            "v": qkv[:, k : 2 * k],
            "cache": cache,
            "slots": slots,
        }
        if kind == "layer":
            case |= {"k_scale": 0.5, "v_scale": 2e-3}
        if kind == "head":
            case["head_scales"] = 0.01 + torch.rand(2, k, device=device) / 50
        if kind == "token":
            case["k"][0] = 0.0
            case["scales"] = scales
        yield case


CODES = {INT8: 1, E4M3: 2, E5M2: 3}
"""Dtypes of codes, by their number on the C++ side."""
_run = NativeOp(WRITE, "q" * 20 + "dd")


def _native(
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    slots: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    scales: Tensor | None = None,
    head_scales: Tensor | None = None,
) -> None:
    if k.dtype not in DTYPES or v.dtype != k.dtype:
        return NotImplemented
    if cache.dtype != k.dtype and cache.dtype not in CODES:
        return NotImplemented
    if slots.dtype != torch.int64 or not slots.is_contiguous() or not has_dense_heads(cache):
        return NotImplemented
    item, ks, vs = k.element_size(), k.stride(), v.stride()
    if ks[2] != 1 or vs[2] != 1:
        return NotImplemented
    blocks, _, heads, block, size = cache.shape
    _run(
        k.data_ptr(), v.data_ptr(), ks[0] * item, ks[1] * item, vs[0] * item, vs[1] * item,
        cache.data_ptr(), slots.data_ptr(), k.shape[0], blocks, heads, block, size,
        DTYPES[k.dtype], CODES.get(cache.dtype, 0), head_step(cache) * cache.element_size(),
        *scale_args(scales, head_scales), k_scale, v_scale,
    )  # fmt: skip
    return None


def scale_args(
    scales: Tensor | None, head_scales: Tensor | None = None
) -> tuple[int, int, int, int]:
    """Address of scales, and their steps in floats from block to block, head and token.

    From keys to values it is K heads. Only scales of tokens have a step from token to token.
    """
    if scales is not None:
        return scales.data_ptr(), scales.stride(0), head_step(scales), scales.stride(3)
    if head_scales is not None:
        return head_scales.data_ptr(), 0, 1, 0
    return 0, 0, 0, 0


@op(cases=_cases, native=_native, gpu="attention.kv_write")
def kv_write(
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    slots: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    scales: Tensor | None = None,
    head_scales: Tensor | None = None,
) -> None:
    """Write the keys and values of T tokens into their slots, in place.

    k, v: [T, K, D], may be strided. cache: [N, 2, K, B, D]; heads may be apart. slots: [T] int64.
    No two slots are equal, other than the negative ones. Only for a cache of 8 bits: k_scale and
    v_scale; or head_scales [2, K] float32; or scales [N, 2, K, B] float32, measured and written.
    """
    live = slots >= 0
    where = slots[live]
    block, offset = where // cache.shape[3], where % cache.shape[3]
    for side, x, scale in ((0, k[live], k_scale), (1, v[live], v_scale)):
        if cache.dtype not in CODE_LIMITS:
            cache[block, side, :, offset] = x.to(cache.dtype)
        elif scales is not None:
            codes, measured = encode_per_token(x, cache.dtype)
            cache[block, side, :, offset] = codes
            scales[block, side, :, offset] = measured
        else:
            given = scale if head_scales is None else head_scales[side][None, :, None]
            cache[block, side, :, offset] = encode(x, given, cache.dtype)

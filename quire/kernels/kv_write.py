"""KV write stores new keys and values in the paged cache.

    slot = block * B + offset in the block; a negative slot is padding and is skipped
    an fp8 cache holds x / scale, clamped to +-448, the most e4m3 can hold

Axes: T tokens in the step, K kv heads, D head size, N blocks in the pool, B block size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.framework.op import op
from quire.kernels.native.library import DTYPES, WRITE, NativeOp


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, k, d, b, dtype, cached in [
        (1, 2, 64, 16, torch.float32, torch.float32),
        (7, 1, 80, 16, torch.bfloat16, torch.bfloat16),
        (33, 8, 128, 8, torch.bfloat16, torch.bfloat16),
        (5, 2, 20, 1, torch.float32, torch.float32),
        (4, 2, 32, 16, torch.float16, torch.float16),
        (4, 2, 32, 16, torch.float32, torch.bfloat16),
        (6, 2, 32, 16, torch.bfloat16, torch.float8_e4m3fn),
    ]:
        qkv = torch.randn(t, 4 * k, d, device=device).to(dtype)
        cache = torch.randn(9, 2, k, b, d, device=device).to(cached)
        slots = torch.randperm(9 * b, device=device)[:t].contiguous()
        slots[t // 2] = -1 if t > 1 else slots[0]
        case = {"k": qkv[:, :k], "v": qkv[:, k : 2 * k], "cache": cache, "slots": slots}
        yield case if cached != torch.float8_e4m3fn else case | {"k_scale": 0.5, "v_scale": 2e-3}


_E4M3_MAX = 448.0
_run = NativeOp(WRITE, "q" * 13)


def _native(
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    slots: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    if k.dtype not in DTYPES or v.dtype != k.dtype or cache.dtype != k.dtype:
        return NotImplemented
    if slots.dtype != torch.int64 or not slots.is_contiguous() or not cache.is_contiguous():
        return NotImplemented
    item, ks, vs = k.element_size(), k.stride(), v.stride()
    if ks[2] != 1 or vs[2] != 1:
        return NotImplemented
    blocks, _, heads, block, size = cache.shape
    _run(
        k.data_ptr(), v.data_ptr(), ks[0] * item, ks[1] * item, vs[0] * item, vs[1] * item,
        cache.data_ptr(), slots.data_ptr(), k.shape[0], blocks, heads, block, size * item,
    )  # fmt: skip
    return None


@op(cases=_cases, native=_native, gpu="attention.kv_write")
def kv_write(
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    slots: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write the keys and values of T tokens into their slots, in place.

    k, v: [T, K, D], may be strided. cache: [N, 2, K, B, D]. slots: [T] int64.
    No two slots are equal, other than the negative ones. The scales are for an fp8 cache.
    """
    live = slots >= 0
    where = slots[live]
    block, offset = where // cache.shape[3], where % cache.shape[3]
    cache[block, 0, :, offset] = _to_cache_dtype(k[live], k_scale, cache.dtype)
    cache[block, 1, :, offset] = _to_cache_dtype(v[live], v_scale, cache.dtype)


def _to_cache_dtype(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    if dtype != torch.float8_e4m3fn:
        return x.to(dtype)
    return (x.float() / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(dtype)

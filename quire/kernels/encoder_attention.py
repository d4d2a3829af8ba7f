"""Encoder attention: every token of a source attends to all of it. Sources are packed; no cache.

    source s owns rows [starts[s], starts[s + 1]) of q, k and v
    position i sees all positions, or the first key_counts[s]; with a window w those j of them for
             which |i - j| <= w - 1
    score = bend(q . k * scale) - slope * |i - j| + bias of the key's distance, cut at +-R
    bend    softcap * tanh(x / softcap), or nothing;  slope: ALiBi, one per head, or nothing

Axes: T tokens of all sources, S sources, H query heads, K kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.framework.op import op
from quire.kernels.native.library import DTYPES, empty
from quire.kernels.paged_attention import (
    ScoreModifiers,
    attention_weights,
    native_score_args,
    native_takes,
    run_attention,
)


def _case(
    device: torch.device,
    lengths: list[int],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    reach: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    alibi: bool = False,
    key_counts: list[int] | None = None,
) -> dict[str, Any]:
    """shape: (H, K, D). q, k and v are views of one projection."""
    heads, kv_heads, size = shape
    qkv = torch.randn(sum(lengths), heads + 2 * kv_heads, size, device=device).to(dtype)
    q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    bias = torch.randn(heads, 2 * reach + 1, device=device) if reach else None
    case = {"q": q, "k": k, "v": v, "starts": starts, "longest": max(lengths)}
    case |= {"scale": size**-0.5, "position_bias": bias, "window": window, "softcap": softcap}
    slopes = 0.5 ** torch.arange(1, heads + 1, device=device).float()
    case |= {"alibi": slopes if alibi else None, "key_counts": None}
    if key_counts is not None:
        case["key_counts"] = torch.tensor(key_counts, dtype=torch.int32, device=device)
    return case


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    bf16, fp32 = torch.bfloat16, torch.float32
    yield _case(device, [1, 7, 40], (4, 2, 16), fp32)
    yield _case(device, [33, 2, 70], (4, 4, 16), fp32, reach=12)
    yield _case(device, [5, 130], (2, 2, 32), bf16, reach=64)
    yield _case(device, [90], (4, 1, 80), bf16)
    yield _case(device, [600, 9], (4, 4, 64), bf16, reach=128)
    yield _case(device, [20, 3], (2, 2, 32), torch.float16, reach=5)
    yield _case(device, [70, 1, 64, 300], (2, 2, 16), fp32, window=9)
    yield _case(device, [200, 150], (4, 2, 32), bf16, window=65, softcap=5.0)
    yield _case(device, [9, 1300], (2, 1, 16), fp32, window=100)
    yield _case(device, [130, 2, 65], (6, 2, 32), fp32, alibi=True)
    yield _case(device, [400, 31], (8, 8, 64), bf16, alibi=True)
    yield _case(device, [1200, 3, 64], (3, 3, 32), fp32)
    yield _case(device, [12, 64, 30, 17], (4, 2, 128), bf16)
    yield _case(device, [32, 7, 90, 32], (4, 2, 32), fp32, key_counts=[9, 0, 33, 32])
    yield _case(device, [200, 32], (4, 4, 64), bf16, key_counts=[130, 1])
    yield _case(device, [64, 200], (2, 2, 32), fp32, window=70, alibi=True, key_counts=[20, 150])


def _native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    position_bias: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    key_counts: Tensor | None = None,
) -> Tensor:
    ints = (starts,) if key_counts is None else (starts, key_counts)
    if not native_takes(q, (k, v), ints, (alibi, position_bias)):
        return NotImplemented
    y, item = empty(q.shape, q.dtype), q.element_size()
    run_attention(
        q.data_ptr(), q.stride(0), q.stride(1), 0, 0, starts.data_ptr(),
        0 if key_counts is None else key_counts.data_ptr(), y.data_ptr(),
        0, starts.shape[0] - 1, q.shape[1], k.shape[1], q.shape[2], 0, 0, DTYPES[q.dtype],
        window or 0, *native_score_args(alibi, position_bias), k.data_ptr(), v.data_ptr(),
        k.stride(0) * item, k.stride(1) * item, v.stride(0) * item, v.stride(1) * item,
        0, 0, 0, 0, 0, 0, 0, scale, softcap or 0.0, 1.0,
    )  # fmt: skip
    return y


@op(cases=_cases, native=_native, gpu="attention.encoder_attention")
def encoder_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    position_bias: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    key_counts: Tensor | None = None,
) -> Tensor:
    """Attend every token to the tokens of its source.

    q: [T, H, D], k, v: [T, K, D], may be strided. starts: [S + 1] int32. longest: tokens of the
    longest source. position_bias: [H, 2 R + 1] float32. alibi: [H] float32. key_counts:
    [S] int32, keys of each source, its first ones; 0, or None: all. Every token must see one.
    Returns a new [T, H, D] in q.dtype; rows of no source hold anything.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    modifiers = ScoreModifiers(softcap, None, alibi, position_bias)
    counts = [0] * (len(starts) - 1) if key_counts is None else key_counts.tolist()
    for low, high, count in zip(starts.tolist(), starts.tolist()[1:], counts):
        at = torch.arange(high - low, device=q.device)
        seen = (at[:, None] - at[None]).abs() < (window or high - low)
        seen &= at[None] < (count or high - low)
        keys, values = (x[low:high].transpose(0, 1).float() for x in (k, v))  # [K, n, D]
        weights = attention_weights(q[low:high], keys, seen, scale, modifiers)
        y = torch.einsum("kgrn,knd->rkgd", weights, values)
        out[low:high] = y.reshape(out[low:high].shape).to(q.dtype)
    return out

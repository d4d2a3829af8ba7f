"""Encoder attention: every token of a source attends to all of it. Sources are packed; no cache.

    source s owns rows [starts[s], starts[s + 1]) of q, k and v
    score = q . k * scale + bias of the key's distance, cut at +-R

Axes: T tokens of all sources, S sources, H query heads, K kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.framework.op import op
from quire.kernels.paged_attention import ScoreModifiers, attention_native, attention_weights


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    bf16, fp32 = torch.bfloat16, torch.float32
    for lengths, heads, kv_heads, size, dtype, reach in [
        ([1, 7, 40], 4, 2, 16, fp32, 0),
        ([33, 2, 70], 4, 4, 16, fp32, 12),
        ([5, 130], 2, 2, 32, bf16, 64),
        ([90], 4, 1, 80, bf16, 0),
        ([600, 9], 4, 4, 64, bf16, 128),
        ([20, 3], 2, 2, 32, torch.float16, 5),
    ]:
        qkv = torch.randn(sum(lengths), heads + 2 * kv_heads, size, device=device).to(dtype)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        bias = torch.randn(heads, 2 * reach + 1, device=device) if reach else None
        case = {"q": q, "k": k, "v": v, "starts": starts, "longest": max(lengths)}
        yield case | {"scale": size**-0.5, "position_bias": bias}


def _native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    position_bias: Tensor | None = None,
) -> Tensor:
    """Keys and values as a cache with blocks of one token."""
    cache = torch.stack((k, v), dim=1).unsqueeze(3)  # [T, 2, K, 1, D]
    tables = starts[:-1, None] + torch.arange(longest, dtype=torch.int32)
    return attention_native(
        q, cache, tables, starts, starts.diff(), scale, position_bias=position_bias,
        bidirectional=True,
    )  # fmt: skip


@op(cases=_cases, native=_native, gpu="attention.encoder_attention")
def encoder_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    position_bias: Tensor | None = None,
) -> Tensor:
    """Attend every token to all tokens of its source.

    q: [T, H, D], k, v: [T, K, D], may be strided. starts: [S + 1] int32. longest: tokens of the
    longest source. position_bias: [H, 2 R + 1] float32. Returns a new [T, H, D] in q.dtype.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    modifiers = ScoreModifiers(None, None, None, position_bias)
    for low, high in zip(starts.tolist(), starts.tolist()[1:]):
        everything = torch.ones(high - low, high - low, dtype=torch.bool, device=q.device)
        keys, values = (x[low:high].transpose(0, 1).float() for x in (k, v))  # [K, n, D]
        weights = attention_weights(q[low:high], keys, everything, scale, modifiers)
        y = torch.einsum("kgrn,knd->rkgd", weights, values)
        out[low:high] = y.reshape(out[low:high].shape).to(q.dtype)
    return out

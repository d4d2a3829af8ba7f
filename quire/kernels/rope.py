"""Rotary position embedding rotates pairs of query and key channels by an angle of the position.

    pairs (i, i + R/2)        the usual halves ("neox")
    pairs (2i, 2i + 1)        interleaved (GPT-J, original Llama)

The angles come from a table, which applies every scaling rule (linear, yarn, llama3, ...).

Axes: T tokens in the step, H query heads, K kv heads, D head size, R rotated channels,
P positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.framework.op import op
from quire.kernels.native.library import DTYPES, ROPE, NativeOp, empty


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, h, k, d, r, dtype in [
        (1, 4, 2, 64, 64, torch.float32),
        (7, 4, 2, 128, 128, torch.bfloat16),
        (5, 3, 1, 80, 32, torch.bfloat16),
        (3, 2, 2, 16, 16, torch.float32),
        (65, 16, 8, 128, 128, torch.bfloat16),
        (3, 2, 2, 32, 32, torch.float16),
        (4, 2, 2, 20, 10, torch.float32),
        (3, 4, 0, 16, 16, torch.bfloat16),
    ]:
        angles = torch.outer(torch.arange(100.0), 0.5 ** torch.arange(r // 2))
        table = torch.cat([angles.cos(), angles.sin()], -1).to(device)
        qkv = torch.randn(t, h + 2 * k, d, device=device).to(dtype)
        positions = torch.randint(0, 100, (t,), device=device, dtype=torch.int32)
        for interleaved in (False, True):
            yield {
                "q": qkv[:, :h],
                "k": qkv[:, h : h + k],
                "positions": positions,
                "cos_sin": table,
                "interleaved": interleaved,
            }


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    size = 2 * cos.shape[-1]
    turned, rest = x[..., :size].float(), x[..., size:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


_run = NativeOp(ROPE, "q" * 18)


def _native(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    code, qs, ks = DTYPES.get(q.dtype), q.stride(), k.stride()
    if code is None or k.dtype != q.dtype or qs[2] != 1 or ks[2] != 1:
        return NotImplemented
    if cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
        return NotImplemented
    if positions.dtype != torch.int32 or not positions.is_contiguous():
        return NotImplemented
    rows, heads, size = q.shape
    limit, rotated = cos_sin.shape
    new_q, new_k = empty(q.shape, q.dtype), empty(k.shape, k.dtype)
    _run(
        q.data_ptr(), k.data_ptr(), qs[0], ks[0], qs[1], ks[1],
        new_q.data_ptr(), new_k.data_ptr(), heads, k.shape[1],
        positions.data_ptr(), cos_sin.data_ptr(),
        rows, size, rotated, limit, interleaved, code,
    )  # fmt: skip
    return new_q, new_k


@op(cases=_cases, native=_native, gpu="rowwise.rope")
def rope(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate the first R of D channels of every query and key head.

    q: [T, H, D], k: [T, K, D], may be strided views of a fused qkv; K may be 0. positions: [T]
    int32. cos_sin: [P, R] float32, row = (R/2 cosines | R/2 sines). Returns (q, k), new tensors.
    """
    cos, sin = cos_sin[positions.long()][:, None].chunk(2, -1)  # [T, 1, R/2]
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)

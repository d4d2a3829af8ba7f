"""MLA write finishes a step's queries and latents, and stores the latents in the cache.

    compressed part   normed (RMS) and written
    rotated part      turned by the token's position and written
    queries           their rotated parts are turned alike

One op, because all three are short and read the same row of the angle table.

Axes: T tokens in the step, H query heads, L compressed size, R rotated size, N blocks,
B block size, P positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.framework.op import op


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, h, latent, r, block, dtype in [
        (1, 4, 32, 16, 16, torch.float32),
        (7, 3, 24, 6, 4, torch.float32),
        (9, 16, 64, 16, 16, torch.bfloat16),
        (5, 2, 32, 32, 16, torch.float16),
    ]:
        angles = torch.outer(torch.arange(100.0), 0.5 ** torch.arange(r // 2))
        slots = torch.randperm(5 * block, device=device)[:t].contiguous()
        slots[t // 2] = -1 if t > 1 else slots[0]
        for interleaved in (True, False):
            yield {
                "q": torch.randn(t, h, 8 + r, device=device).to(dtype)[..., 8:],
                "kv": torch.randn(t, 5 + latent + r, device=device).to(dtype)[:, 5:],
                "weight": torch.randn(latent, device=device).to(dtype),
                "eps": 1e-6,
                "positions": torch.randint(0, 100, (t,), device=device, dtype=torch.int32),
                "cos_sin": torch.cat([angles.cos(), angles.sin()], -1).to(device),
                "cache": torch.zeros(5, 1, 1, block, latent + r, device=device).to(dtype),
                "slots": slots,
                "interleaved": interleaved,
            }


@op(cases=_cases, gpu="mla.mla_write")
def mla_write(
    q: Tensor,
    kv: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
    interleaved: bool = True,
) -> tuple[Tensor, Tensor]:
    """Returns (queries' rotated parts [T, H, R], latents [T, L + R] as stored), new tensors.

    q: [T, H, R], the parts to rotate; kv: [T, L + R]; both may be strided views. weight: [L].
    positions: [T] int32. cos_sin: [P, R] float32, row = (R/2 cosines | R/2 sines).
    cache: [N, 1, 1, B, L + R]. slots: [T] int64, block * B + offset; negative: not stored.
    interleaved: pairs (2i, 2i + 1) turn together, else (i, i + R/2).
    """
    cos, sin = cos_sin[positions.long()].chunk(2, -1)  # [T, R/2]
    wide = kv[:, : len(weight)].float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    turned = _rotate(kv[:, len(weight) :], cos, sin, interleaved)
    latents = torch.cat((normed.to(kv.dtype), turned), -1)
    live = slots >= 0
    where = slots[live]
    cache[where // cache.shape[3], 0, 0, where % cache.shape[3]] = latents[live].to(cache.dtype)
    return _rotate(q, cos[:, None], sin[:, None], interleaved), latents


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    wide = x.float()
    if interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)
    a, b = wide.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

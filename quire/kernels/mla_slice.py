"""MLA slice: queries in the space of latents attend to the latents of their sequence that are here.

The result is that of quire.kernels.attention_slices, whose values are latents.

Axes: S queries, one of a sequence each; H query heads, L latent size, R rotated size, N blocks,
B block size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.attention_slices import LOWEST_SUM
from quire.kernels.framework.op import op
from quire.kernels.native.op_tape import refuse_recording


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for heads, latent, rotated, block, dtype, shuffled in (
        (4, 32, 16, 16, torch.float32, False),
        (16, 64, 16, 16, torch.bfloat16, True),
        (3, 20, 6, 4, torch.float32, True),
    ):
        contexts = [33, 1, 0, 130, 7]
        width = max(-(-c // block) for c in contexts)
        tables = torch.randperm(len(contexts) * width).view(-1, width).int()
        cache = torch.randn(len(contexts) * width, 1, 1, block, latent + rotated)
        order = torch.randperm(len(contexts)) if shuffled else None
        yield {
            "q": torch.randn(len(contexts), heads, latent + rotated, device=device).to(dtype),
            "cache": cache.to(device, dtype),
            "tables": (tables if order is None else tables[order]).to(device),
            "contexts": torch.tensor(contexts, dtype=torch.int32, device=device),
            "scale": (latent + rotated) ** -0.5,
            "latent": latent,
            "rows": None if order is None else order.argsort().int().to(device),
        }


@op(cases=_cases, gpu="mla.mla_slice")
def mla_slice(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    contexts: Tensor,
    scale: float,
    latent: int,
    rows: Tensor | None = None,
) -> Tensor:
    """Attend each query, [S, H, L + R] with its rotated part last: a result, [H, S, L + 1].

    cache: [N, 1, 1, B, L + R]. tables: [S, W], or [M, W] with rows [S]. contexts: [S] int32,
    latents here. latent: L.
    """
    refuse_recording("attention to slices")
    out = torch.zeros(q.shape[1], len(q), latent + 1, device=q.device)
    out[..., -1] = LOWEST_SUM
    for s, context in enumerate(contexts.tolist()):
        if not context:
            continue
        used = tables[s if rows is None else int(rows[s]), : -(-context // cache.shape[3])].long()
        held = cache[used].flatten(0, 3)[:context].float()  # [n, L + R]
        scores = q[s].float() @ held.T * scale
        total = scores.logsumexp(-1)
        out[:, s, :latent] = (scores - total[:, None]).exp() @ held[:, :latent]
        out[:, s, latent] = total * math.log2(math.e)
    return out

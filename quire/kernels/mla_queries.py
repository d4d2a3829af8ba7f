"""Bring queries into the latent space: each head multiplies its own by its own matrix.

A key of head h would be up[h] @ latent; so q . key = (q @ up[h]) . latent, and no key is ever made.

Axes: T tokens in the step, H query heads, P size of a query without its rotated part, L latent
size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.op import op


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, h, p, r, v, latent, dtype in [
        (1, 4, 16, 16, 8, 32, torch.float32),
        (7, 3, 20, 6, 12, 24, torch.float32),
        (5, 16, 32, 16, 32, 64, torch.bfloat16),
        (33, 2, 32, 16, 16, 64, torch.float16),
    ]:
        both = torch.randn(t, h, p + r, device=device).to(dtype)
        up = (torch.randn(h, p + v, latent, device=device) / p**0.5).to(dtype)
        yield {"q": both[..., :p], "up": up[:, :p]}


@op(cases=_cases, gpu=True)
def mla_queries(q: Tensor, up: Tensor) -> Tensor:
    """q: [T, H, P], up: [H, P, L], views with a last axis of stride 1. Returns a new [T, H, L]."""
    return torch.einsum("thp,hpl->thl", q.float(), up.float()).to(q.dtype)

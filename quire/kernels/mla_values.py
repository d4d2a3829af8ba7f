"""Bring attention's outputs out of the latent space: each head multiplies by its own matrix.

A value of head h would be up[h] @ latent; the sum of weighted values is up[h] @ (the sum of
weighted latents), and no value is ever made.

Axes: T tokens in the step, H query heads, L latent size, V size of a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.op import op


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, h, p, v, latent, dtype in [
        (1, 4, 16, 8, 32, torch.float32),
        (7, 3, 20, 12, 24, torch.float32),
        (5, 16, 32, 32, 64, torch.bfloat16),
        (33, 2, 32, 16, 64, torch.float16),
    ]:
        mixed = torch.randn(t, h, latent, device=device).to(dtype)
        up = (torch.randn(h, p + v, latent, device=device) / latent**0.5).to(dtype)
        yield {"mixed": mixed, "up": up[:, p:]}


@op(cases=_cases, gpu=True)
def mla_values(mixed: Tensor, up: Tensor) -> Tensor:
    """mixed: [T, H, L], up: [H, V, L], last axes of stride 1. Returns a new [T, H * V]."""
    return torch.einsum("thl,hvl->thv", mixed.float(), up.float()).to(mixed.dtype).flatten(1)

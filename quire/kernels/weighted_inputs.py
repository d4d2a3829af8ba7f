"""Weighted inputs: scales what an expert reads, in place of what it makes (Llama 4).

    y = w * x        in fp32, then x.dtype;  the weights that are left are 1

Axes: T tokens in the step, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.framework.op import op


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, e, dtype in [
        (1, 64, torch.float32),
        (7, 101, torch.bfloat16),
        (33, 2100, torch.bfloat16),
        (2, 64, torch.float16),
    ]:
        yield {
            "x": torch.randn(t, e, device=device).to(dtype),
            "weights": torch.rand(t, 1, device=device),
        }


@op(cases=_cases, gpu="elementwise.weighted_inputs")
def weighted_inputs(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """x: [T, E]. weights: [T, 1] float32. Returns (weighted [T, E], ones [T, 1])."""
    return (weights * x.float()).to(x.dtype), torch.ones_like(weights)

"""Gated add: adds the output of a shared expert, weighted by its gate.

    y = x + sigmoid(gate) * shared        in fp32, then x.dtype

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
        (33, 1000, torch.bfloat16),
        (2, 64, torch.float16),
    ]:
        yield {
            "x": torch.randn(t, e, device=device).to(dtype),
            "shared": torch.randn(t, e, device=device).to(dtype),
            "gate": torch.randn(t, 1, device=device).to(dtype),
        }


@op(cases=_cases, gpu="elementwise.gated_add")
def gated_add(x: Tensor, shared: Tensor, gate: Tensor) -> Tensor:
    """x, shared: [T, E], gate: [T, 1], one dtype. Returns a new [T, E]."""
    return (x.float() + gate.float().sigmoid() * shared.float()).to(x.dtype)

"""Two element-wise ops: the residual add that no norm follows, and the soft cap of logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.op import op

_SHAPES = [
    (1, 64, torch.float32),
    (7, 101, torch.bfloat16),
    (33, 1000, torch.bfloat16),
    (2, 64, torch.float16),
]


def _add_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, e, dtype in _SHAPES:
        x = torch.randn(t, e, device=device).to(dtype)
        y = torch.randn(t, e, device=device).to(dtype)
        yield {"x": x, "y": y}


def _softcap_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, e, dtype in _SHAPES:
        yield {"x": 40 * torch.randn(t, e, device=device).to(dtype), "cap": 30.0}


@op(cases=_add_cases)
def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, of one shape and dtype, as a new tensor."""
    return (x.float() + y.float()).to(x.dtype)


@op(cases=_softcap_cases)
def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), as a new tensor: logits that may not pass +-cap."""
    return (cap * torch.tanh(x.float() / cap)).to(x.dtype)

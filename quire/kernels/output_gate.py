"""Output gate: what attention puts out, times the sigmoid of a gate; and a plain product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.framework.op import op


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for dtype in (torch.float32, torch.bfloat16):
        wide = torch.randn(5, 4, 2, 8, device=device, dtype=dtype)
        yield {"x": torch.randn(5, 32, device=device, dtype=dtype), "gate": wide[:, :, 1]}


@op(cases=_cases)
def output_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x [T, H * D], gate [T, H, D], strided views allowed -> [T, H * D]."""
    return (x.float() * gate.reshape(x.shape).float().sigmoid()).to(x.dtype)


def _pairs(device: torch.device) -> Iterator[dict[str, Any]]:
    for dtype in (torch.float32, torch.bfloat16):
        wide = torch.randn(5, 32, device=device, dtype=dtype)
        yield {"x": wide[:, :16], "y": wide[:, 16:]}


@op(cases=_pairs)
def product(x: Tensor, y: Tensor) -> Tensor:
    """x and y [T, C], strided views allowed -> [T, C]."""
    return x * y

"""Gated RMS norm: the norm of each group of channels, and a gate before or after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.framework.op import op


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for dtype, size, before in (
        (torch.float32, 32, True),
        (torch.float32, 8, False),
        (torch.bfloat16, 16, True),
    ):
        yield {
            "x": torch.randn(5, 32, device=device),
            "gate": torch.randn(5, 32, device=device, dtype=dtype),
            "weight": torch.randn(32 if before else 8, device=device, dtype=dtype),
            "eps": 1e-5,
            "size": size,
            "gate_first": before,
        }


@op(cases=_cases)
def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, size: int, gate_first: bool
) -> Tensor:
    """x and gate [T, C] -> [T, C] in the weight's dtype. size: channels of a group.

    weight: of all channels, or of one group. gate_first: the norm is that of gated values.
    """
    y, opened = x.float(), F.silu(gate.float())
    if gate_first:
        y = y * opened
    groups = y.unflatten(-1, (-1, size))
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    if weight.shape[0] == size:
        groups = groups.to(weight.dtype).float() * weight.float()
        y = groups.flatten(-2)
    else:
        y = groups.flatten(-2).to(weight.dtype).float() * weight.float()
    return (y if gate_first else y.to(weight.dtype).float() * opened).to(weight.dtype)

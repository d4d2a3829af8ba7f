"""Scan gate: what a scan puts out, times the SiLU of a gate, where no norm is between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.framework.op import op


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for dtype in (torch.float32, torch.bfloat16):
        wide = torch.randn(5, 64, device=device, dtype=dtype)
        yield {"x": torch.randn(5, 32, device=device), "gate": wide[:, :32]}


@op(cases=_cases)
def scan_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x float32 and gate [T, C], a strided view allowed -> [T, C] in the gate's dtype."""
    return (x * F.silu(gate.float())).to(gate.dtype)

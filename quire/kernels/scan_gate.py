"""Scan gate: what a scan puts out, times the SiLU of a gate, where no norm is between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.framework.op import op
from quire.kernels.native.library import DTYPES, GATED_NORM, NativeOp, empty


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for dtype in (torch.float32, torch.bfloat16):
        wide = torch.randn(5, 64, device=device, dtype=dtype)
        yield {"x": torch.randn(5, 32, device=device), "gate": wide[:, :32]}


_run = NativeOp(GATED_NORM, "qqqqqqqqqqqd")


def _native(x: Tensor, gate: Tensor) -> Tensor:
    code, (tokens, channels) = DTYPES.get(gate.dtype), x.shape
    if code is None or x.dtype != torch.float32 or gate.stride(1) != 1 or not x.is_contiguous():
        return NotImplemented
    y = empty(x.shape, gate.dtype)
    _run(
        x.data_ptr(), gate.data_ptr(), gate.stride(0), 0, y.data_ptr(), tokens, channels,
        channels, channels, True, code, 0.0,
    )  # fmt: skip
    return y


@op(cases=_cases, native=_native, gpu="recurrent.scan_gate")
def scan_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x float32 and gate [T, C], a strided view allowed -> [T, C] in the gate's dtype."""
    return (x * F.silu(gate.float())).to(gate.dtype)

"""Gated RMS norm: the norm of each group of channels, and a gate before or after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.framework.op import op
from quire.kernels.native.library import DTYPES, GATED_NORM, NativeOp, empty


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for dtype, size, before in (
        (torch.float32, 32, True),
        (torch.float32, 8, False),
        (torch.bfloat16, 16, True),
        (torch.bfloat16, 8, False),
    ):
        yield {
            "x": torch.randn(5, 32, device=device),
            "gate": torch.randn(5, 64, device=device, dtype=dtype)[:, :32],
            "weight": torch.randn(32 if before else 8, device=device, dtype=dtype),
            "eps": 1e-5,
            "size": size,
            "gate_first": before,
        }


_run = NativeOp(GATED_NORM, "qqqqqqqqqqqd")


def _native(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, size: int, gate_first: bool
) -> Tensor:
    code = DTYPES.get(weight.dtype)
    if code is None or gate.dtype != weight.dtype or x.dtype != torch.float32:
        return NotImplemented
    if gate.stride(1) != 1 or not x.is_contiguous() or not weight.is_contiguous():
        return NotImplemented
    y = empty(x.shape, weight.dtype)
    _run(
        x.data_ptr(), gate.data_ptr(), gate.stride(0), weight.data_ptr(), y.data_ptr(), *x.shape,
        size, len(weight), gate_first, code, eps,
    )  # fmt: skip
    return y


@op(cases=_cases, native=_native, gpu="recurrent.gated_norm")
def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, size: int, gate_first: bool
) -> Tensor:
    """x and gate [T, C] -> [T, C] in the weight's dtype. size: channels of a group.

    weight: of all channels, or of one group. gate_first: the norm is that of gated values.
    """
    y, opened = x.float(), F.silu(gate.float())
    groups = (y * opened if gate_first else y).unflatten(-1, (-1, size))
    factor = torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    return scaled_gated_values(x, gate, factor, weight, gate_first)


def sum_gated_squares(x: Tensor, gate: Tensor, gate_first: bool) -> Tensor:
    """Return the sum of the squares that the norm is of: [T]. All channels are of one group."""
    y = x.float()
    return (y * F.silu(gate.float()) if gate_first else y).square().sum(-1)


def scaled_gated_values(
    x: Tensor, gate: Tensor, factor: Tensor, weight: Tensor, gate_first: bool
) -> Tensor:
    """Return what gated_rms_norm() does, [T, C]. factor [T, groups, 1]: of the groups' values."""
    y, opened = x.float(), F.silu(gate.float())
    if gate_first:
        y = y * opened
    groups = y.unflatten(-1, (factor.shape[1], -1)) * factor
    groups = groups.to(weight.dtype).float() * weight.float().unflatten(-1, (-1, groups.shape[-1]))
    y = groups.flatten(-2)
    return (y if gate_first else y.to(weight.dtype).float() * opened).to(weight.dtype)

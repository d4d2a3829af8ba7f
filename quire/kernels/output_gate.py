"""Output gate: what attention puts out, times the sigmoid of a gate; and a plain product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.act import NATIVE_CODES, run_elementwise
from quire.kernels.framework.op import op
from quire.kernels.native.library import DTYPES, GATE, NativeOp, empty


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for dtype in (torch.float32, torch.bfloat16):
        wide = torch.randn(5, 4, 2, 8, device=device, dtype=dtype)
        yield {"x": torch.randn(5, 32, device=device, dtype=dtype), "gate": wide[:, :, 1]}


run_gate = NativeOp(GATE, "qqqqqqqqqqq")


def _native(x: Tensor, gate: Tensor) -> Tensor:
    code = DTYPES.get(x.dtype)
    if code is None or gate.dtype != x.dtype or gate.stride(2) != 1 or not x.is_contiguous():
        return NotImplemented
    y = empty(x.shape, x.dtype)
    run_gate(
        x.data_ptr(), gate.data_ptr(), gate.stride(0), gate.stride(1), 0, y.data_ptr(),
        *gate.shape, 0, code,
    )  # fmt: skip
    return y


@op(cases=_cases, native=_native, gpu="recurrent.output_gate")
def output_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x [T, H * D], gate [T, H, D], strided views allowed -> [T, H * D]."""
    return (x.float() * gate.reshape(x.shape).float().sigmoid()).to(x.dtype)


def _pairs(device: torch.device) -> Iterator[dict[str, Any]]:
    for dtype in (torch.float32, torch.bfloat16):
        wide = torch.randn(5, 32, device=device, dtype=dtype)
        yield {"x": wide[:, :16], "y": wide[:, 16:]}


def _product_native(x: Tensor, y: Tensor) -> Tensor:
    code = DTYPES.get(x.dtype)
    if code is None or y.dtype != x.dtype or x.stride(1) != 1 or y.stride(1) != 1:
        return NotImplemented
    out = empty(x.shape, x.dtype)
    run_elementwise(
        x.data_ptr(), y.data_ptr(), x.stride(0), y.stride(0), out.data_ptr(), *x.shape,
        NATIVE_CODES["same"], code, 0.0,
    )  # fmt: skip
    return out


@op(cases=_pairs, native=_product_native)
def product(x: Tensor, y: Tensor) -> Tensor:
    """x and y [T, C], strided views allowed -> [T, C]."""
    return x * y

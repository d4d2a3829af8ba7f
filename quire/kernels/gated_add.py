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
from quire.kernels.native.library import DTYPES, empty
from quire.kernels.output_gate import run_gate


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


def _native(x: Tensor, shared: Tensor, gate: Tensor) -> Tensor:
    code = DTYPES.get(x.dtype)
    if code is None or any(t.dtype != x.dtype for t in (shared, gate)):
        return NotImplemented
    if not x.is_contiguous() or not shared.is_contiguous():
        return NotImplemented
    rows, size = x.shape
    y = empty(x.shape, x.dtype)
    run_gate(
        shared.data_ptr(), gate.data_ptr(), gate.stride(0), 0, x.data_ptr(), y.data_ptr(), rows, 1,
        size, 1, code,
    )  # fmt: skip
    return y


@op(cases=_cases, native=_native, gpu="elementwise.gated_add")
def gated_add(x: Tensor, shared: Tensor, gate: Tensor) -> Tensor:
    """x, shared: [T, E], gate: [T, 1], one dtype. Returns a new [T, E]."""
    return (x.float() + gate.float().sigmoid() * shared.float()).to(x.dtype)

"""Gated activation kernel of two tensors: act(gate) * up."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.elementwise.act import BLOCK
from quire.kernels.gpu.elementwise.activations import activate
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv


@kernel()
def _gated_act(
    gate_ptr,  # [T, F]
    up_ptr,  # [T, F]
    y_ptr,  # [T, F] out, packed
    F: tl.constexpr,
    GATE_T: tl.constexpr,
    UP_T: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)  # T * F can pass 2**31
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + t * GATE_T + f, f < F, 0.0).to(tl.float32)
    up = tl.load(up_ptr + t * UP_T + f, f < F, 0.0).to(tl.float32)
    y = activate(gate, KIND) * up
    tl.store(y_ptr + t * F + f, y.to(gate_ptr.dtype.element_ty), f < F)


def outputs(gate: Tensor, up: Tensor, kind: str) -> Any:
    if gate.stride(1) != 1 or up.stride(1) != 1 or up.dtype != gate.dtype:
        return NotImplemented
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


def launch(out: Tensor, gate: Tensor, up: Tensor, kind: str) -> None:
    rows, size = out.shape
    _gated_act(
        (rows, cdiv(size, BLOCK), 1),
        (gate, up, out),
        (),
        (size, gate.stride(0), up.stride(0), kind, BLOCK),
    )

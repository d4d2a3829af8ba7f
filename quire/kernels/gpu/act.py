"""act(x), element by element."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.element import activate
from quire.kernels.gpu.start import kernel

BLOCK = 1024  # one 16-byte load for each of 128 threads


@kernel("n")
def _act(x_ptr, y_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, 0.0).to(tl.float32)
    tl.store(y_ptr + i, activate(x, KIND).to(x_ptr.dtype.element_ty), i < n)


def outputs(x: Tensor, kind: str) -> Any:
    if not x.is_contiguous():
        return NotImplemented
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def launch(out: Tensor, x: Tensor, kind: str) -> None:
    n = x.numel()
    _act((triton.cdiv(n, BLOCK), 1, 1), (x, out), (n,), (kind, BLOCK))

"""Columns of several tensors side by side: the products of a weight whose parts have other formats.

A native op, so that a tape can hold a layer with such a weight. Axes: T tokens, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.kernels.framework.op import op
from quire.kernels.native.library import COPY, DTYPES, NativeOp, empty


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for rows, sizes, dtype in [
        (1, (64, 32), torch.bfloat16),
        (7, (5, 130, 1), torch.float32),
        (33, (96, 96), torch.bfloat16),
    ]:
        wide = torch.randn(rows, max(sizes) + 3, device=device).to(dtype)
        yield {"parts": [wide[:, i : i + size] for i, size in enumerate(sizes)]}


_run = NativeOp(COPY, "qqqqqq")


def _native(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    size = first.element_size()
    if first.dtype not in DTYPES or any(
        one.dtype != first.dtype or one.dim() != 2 or one.stride(1) != 1 for one in parts
    ):
        return NotImplemented
    y = empty((len(first), sum(one.shape[1] for one in parts)), first.dtype)
    row, at = y.stride(0) * size, y.data_ptr()
    for one in parts:
        width = one.shape[1] * size
        _run(one.data_ptr(), one.stride(0) * size, at, row, len(one), width)
        at += width
    return y


@op(cases=_cases, native=_native)
def concat_columns(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts [T, O_i], of one dtype, as a new [T, sum of O_i]."""
    return torch.cat(list(parts), 1)

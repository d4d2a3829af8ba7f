"""Segment pooling: reduces the hidden states of each sequence's tokens to one vector.

    sum        sum of x[t]
    weighted   sum of (offset + t - begin + 1) * x[t]
    max        maximum of x[t]

Sums are float64: they are the same to float32, however a prompt is divided over steps.

Axes: T tokens of the step, N segments, E hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from quire.kernels.framework.op import op

PoolMode = Literal["sum", "weighted", "max"]


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for lengths, size, dtype in [
        ([1, 7, 40], 48, torch.float32),
        ([0, 300, 2, 0], 33, torch.bfloat16),
        ([65, 64], 1024, torch.float16),
    ]:
        x = torch.randn(sum(lengths) + 3, size, device=device).to(dtype)
        ends = torch.tensor(lengths, device=device).cumsum(0).int() + 2
        begins = ends - torch.tensor(lengths, device=device, dtype=torch.int32)
        offsets = torch.arange(len(lengths), device=device, dtype=torch.int32) * 5
        for mode in ("sum", "weighted", "max"):
            yield {"x": x, "begins": begins, "ends": ends, "offsets": offsets, "mode": mode}


@op(cases=_cases, gpu="rowwise.segment_pool")
def segment_pool(
    x: Tensor, begins: Tensor, ends: Tensor, offsets: Tensor, mode: PoolMode
) -> Tensor:
    """Reduce x[begins[n] : ends[n]] for each n; an empty segment is 0, or -inf as a maximum.

    x: [T, E]. begins, ends, offsets: [N] int32. Returns a new [N, E]: float64, or float32 of a
    maximum.
    """
    dtype = torch.float32 if mode == "max" else torch.float64
    blank = -torch.inf if mode == "max" else 0.0
    out = torch.full((len(begins), x.shape[1]), blank, dtype=dtype, device=x.device)
    for n, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist())):
        if begin == end:
            continue
        rows = x[begin:end].to(dtype)
        if mode == "max":
            out[n] = rows.amax(0)
        elif mode == "sum":
            out[n] = rows.sum(0)
        else:
            first = int(offsets[n]) + 1
            weights = torch.arange(first, first + end - begin, dtype=dtype, device=x.device)
            out[n] = weights @ rows
    return out

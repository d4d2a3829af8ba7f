"""Local experts: where on this rank the chosen experts are.

    y[t, j] = place[i, t mod copies[i]]        of the expert i = ids[t, j]; -1: on another rank

Axes: T rows, k experts of a row, X experts of the layer, C the most copies of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.framework.op import op
from quire.kernels.native.library import LOCAL_EXPERTS, NativeOp, address_of, empty


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, k, x, most in ((1, 2, 4, 1), (7, 8, 16, 3), (300, 1, 5, 2)):
        ids = torch.rand(t, x, device=device).argsort(-1)[:, :k].int().contiguous()
        if t > 1:
            ids[t // 2] = -1
        yield {
            "ids": ids,
            "place": torch.randint(-1, x, (x, most), dtype=torch.int32, device=device),
            "copies": torch.randint(1, most + 1, (x,), dtype=torch.int32, device=device),
            "load": torch.arange(x, device=device) if t > 1 else None,
        }


_run = NativeOp(LOCAL_EXPERTS, "qqqqqqqq")


def _native(ids: Tensor, place: Tensor, copies: Tensor, load: Tensor | None = None) -> Tensor:
    if not ids.is_contiguous():
        return NotImplemented
    y = empty(ids.shape, torch.int32)
    _run(
        ids.data_ptr(), place.data_ptr(), copies.data_ptr(), address_of(load), y.data_ptr(),
        *ids.shape, place.shape[1],
    )  # fmt: skip
    return y


@op(cases=_cases, native=_native, gpu="moe.local_experts")
def local_experts(ids: Tensor, place: Tensor, copies: Tensor, load: Tensor | None = None) -> Tensor:
    """Return the place in this rank's bank of each chosen expert: a new [T, k] int32.

    ids: [T, k] int32, numbers of experts of the layer, or -1 in rows of padding.
    place: [X, C] int32, of each copy, or -1. copies: [X] int32, from 1 to C, of each expert.
    load: [X] int64, to which the tokens that chose each expert are added; None: not counted.
    """
    chosen = ids.clamp(min=0).long()
    row = torch.arange(len(ids), device=ids.device)[:, None]
    found = torch.where(ids < 0, -1, place[chosen, row % copies[chosen]])
    if load is not None:
        load.index_add_(0, chosen.flatten(), (ids >= 0).flatten().long())
    return found

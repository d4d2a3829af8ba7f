"""Token ids and embeddings of one rank's strip of the vocabulary.

Axes: T tokens in the step, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.kernels.framework.op import op
from quire.kernels.native.op_tape import on_replay


def _ids_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, first, count in [(7, 30, 40), (50, 50, 50), (1500, 30, 1)]:
        ids = torch.arange(t, device=device, dtype=torch.int32) * 37 % 100  # on all sides
        yield {"ids": ids, "first": first, "count": count}


def _rows_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for (t, e, dtype), given in zip(
        [(7, 64, torch.float32), (50, 129, torch.bfloat16), (1500, 16, torch.bfloat16)],
        _ids_cases(device),
        strict=True,
    ):
        yield {"rows": torch.randn(t, e, device=device).to(dtype), **given}


def _local(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    local = ids - first
    return local, (local >= 0) & (local < count)


def _ids_of(ids: Tensor, first: int, count: int) -> Tensor:
    local, here = _local(ids, first, count)
    return torch.where(here, local, 0)


def _rows_of(rows: Tensor, ids: Tensor, first: int, count: int) -> Tensor:
    _, here = _local(ids, first, count)
    return torch.where(here[:, None], rows, 0)


def _ids_native(ids: Tensor, first: int, count: int) -> Tensor:
    return on_replay(partial(_ids_of, first=first, count=count), ids)


def _rows_native(rows: Tensor, ids: Tensor, first: int, count: int) -> Tensor:
    return on_replay(partial(_rows_of, first=first, count=count), rows, ids)


@op(cases=_ids_cases, native=_ids_native, gpu="rowwise.strip_ids")
def strip_ids(ids: Tensor, first: int, count: int) -> Tensor:
    """Return ids - first, new, and 0 for those that are not of the `count` ids from `first` on.

    ids: [T] int32.
    """
    return _ids_of(ids, first, count)


@op(cases=_rows_cases, native=_rows_native, gpu="rowwise.strip_rows")
def strip_rows(rows: Tensor, ids: Tensor, first: int, count: int) -> Tensor:
    """Return rows, new, with zeros where the id is not of the `count` from `first` on.

    rows: [T, E]. ids: [T] int32.
    """
    return _rows_of(rows, ids, first, count)

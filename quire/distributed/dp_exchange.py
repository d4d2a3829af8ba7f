"""Data-parallel exchange: rows of data-parallel ranks go to the experts of all ranks, and back.

Each rank gathers the rows of all, computes what its own experts add, and gets the sum for its own
rows. How many tokens each rank has is part of the step's plan, so nothing is agreed on here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.kernels.collectives import Group, all_to_all
from quire.kernels.framework import lazy_fusion
from quire.kernels.row_exchange import gather_rows, sum_rows


class DataParallelExchange:
    """An ExpertExchange. `done` layers of the step are over; is_open: between the calls of one."""

    def __init__(self, replicas: Group, ranks: Group, count: Callable[[str], None]) -> None:
        """replicas: the ranks of this tp rank in each data-parallel rank. ranks: all that share the
        experts, in rank order. count: of collectives, by name."""
        self._replicas, self._ranks, self._count = replicas, ranks, count
        self.groups = [replicas, ranks]
        self.counts: Sequence[int] = ()
        self.done = 0
        self.is_open = False

    def begin_step(self, counts: Sequence[int]) -> None:
        """counts: tokens of each data-parallel rank, some at least."""
        self.counts, self.done, self.is_open = counts, 0, False

    @property
    def tokens(self) -> int:
        """Tokens of this rank in the step."""
        return self.counts[self._replicas.rank()]

    def gather(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One collective: the three are sent as bytes."""
        self._count("gather_rows")
        self.is_open = True
        lazy_fusion.flush()  # no op reads the three
        sent = [_as_bytes(one) for one in (x, ids, weights)]
        rows = gather_rows(torch.cat(sent, 1), self.counts, self._replicas)
        found = rows.split([one.shape[1] for one in sent], 1)
        x, ids, weights = (
            part.contiguous().view(one.dtype)
            for part, one in zip(found, (x, ids, weights), strict=True)
        )
        return x, ids, weights

    def combine(self, partial: Tensor) -> Tensor:
        self._count("sum_rows")
        total = sum_rows(partial, self.counts, self._ranks)
        self.done, self.is_open = self.done + 1, False
        return total

    def send_all(self, pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        self._count("all_to_all")
        return all_to_all(pieces, sizes, self._ranks)


def _as_bytes(x: Tensor) -> Tensor:
    """x [T, n] as bytes [T, m]."""
    return x.contiguous().view(torch.uint8)

"""Data-parallel exchange: rows of data-parallel ranks go to the experts of all ranks, and back.

Each rank gathers the rows of all, computes what its own experts add, and gets the sum for its own
rows. How many each rank has is part of the step's plan, so nothing is agreed on here. In a step
whose rows all decode, GPUs exchange as many of each rank; padding chooses no expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor

from quire.kernels.collectives import Group, all_to_all
from quire.kernels.framework import lazy_fusion
from quire.kernels.row_exchange import gather_parts, sum_rows


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
        self._slots: Tensor | None = None
        self._own = 0  # rows of this rank, between the calls of a layer

    def begin_step(self, counts: Sequence[int]) -> None:
        """counts: rows that each data-parallel rank exchanges, some at least; one that has fewer
        pads them. (): outside of steps, where only this rank has any."""
        self.counts, self.done, self.is_open = counts, 0, False

    @contextmanager
    def equal_rows(self, slots: Tensor) -> Iterator[None]:
        """Within, every rank exchanges as many rows as there are slots: int32 [T]. A negative one
        is of a row of padding, for which no expert computes anything."""
        before = self.counts
        self.counts, self._slots = (len(slots),) * self._replicas.size(), slots
        try:
            yield
        finally:
            self.counts, self._slots = before, None

    @property
    def tokens(self) -> int:
        """Rows of this rank in the step."""
        return self.counts[self._replicas.rank()]

    def gather(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One collective."""
        self._count("gather_rows")
        self.is_open, self._own = True, len(x)
        lazy_fusion.flush()  # no op reads the three
        if self._slots is not None:
            ids = ids.masked_fill((self._slots < 0)[:, None], -1)
        short = self.tokens - len(x) if self.counts else 0
        if short:
            x, weights = (F.pad(one, (0, 0, 0, short)) for one in (x, weights))
            ids = F.pad(ids, (0, 0, 0, short), value=-1)
        x, ids, weights = gather_parts((x, ids, weights), self._counts_of(len(x)), self._replicas)
        return x, ids, weights

    def combine(self, partial: Tensor) -> Tensor:
        self._count("sum_rows")
        total = sum_rows(partial, self._counts_of(self._own), self._ranks)
        self.done, self.is_open = self.done + 1, False
        return total if len(total) == self._own else total[: self._own]

    def send_all(self, pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        self._count("all_to_all")
        return all_to_all(pieces, sizes, self._ranks)

    def _counts_of(self, own: int) -> Sequence[int]:
        if self.counts:
            return self.counts
        return [own * (rank == self._replicas.rank()) for rank in range(self._replicas.size())]

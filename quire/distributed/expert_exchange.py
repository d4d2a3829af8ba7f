"""Expert exchange: how rows get to the ranks that have their experts, and results back.

    rows = exchange.gather(x, ids, weights)      of all ranks that share experts
    y = exchange.combine(partial)                this rank's rows, summed over those ranks

The layer computes, between the two, what its own experts or its slices of all experts add.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from quire.distributed.collectives import Collectives


class ExpertExchange(Protocol):
    """Exchange of rows among the ranks that share the experts of a layer."""

    def gather(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows of all ranks: x [T, E], ids and weights [T, k] -> the same of T' rows.

        ids are numbers among all experts of the layer. Rows that are padding have ids of -1,
        for which no rank computes anything. Every rank calls it for every layer.
        """
        ...

    def combine(self, partial: Tensor) -> Tensor:
        """Return the sum of all ranks' partial [T', n], of this rank's rows only: [T, n].

        n may be any width. partial may be overwritten. It follows the gather of the same rows.
        """
        ...

    def send_all(self, pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send one of the pieces, of bytes, to each rank; return the pieces sent to this rank.

        sizes: of the latter, in bytes. Between steps.
        """
        ...


class TensorParallelExchange:
    """Exchange among tensor-parallel ranks, which all have the same rows."""

    def __init__(self, comm: Collectives) -> None:
        self._comm = comm

    def gather(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, ids, weights

    def combine(self, partial: Tensor) -> Tensor:
        return self._comm.all_reduce(partial)

    def send_all(self, pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        return self._comm.all_to_all(pieces, sizes)

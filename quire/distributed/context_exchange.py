"""Context exchange: among the ranks that hold a part of the tokens of every sequence each.

Token i of a sequence is on rank i % R of the R ranks, which have the same KV heads: neighbours in a
tensor-parallel group (decode context parallelism). All have the same steps, so nothing is agreed on
here.

Axes: R ranks, T queries, n numbers of a query on one rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels.collectives import Group, all_gather_stacked, all_to_all_equal


class ContextExchange:
    """The collectives of one such group of ranks."""

    def __init__(self, group: Group, rank: int, ranks: int, count: Callable[[str], None]) -> None:
        """rank: this one's place among the ranks. count: of collectives, by name."""
        self.group, self.rank, self.ranks, self._count = group, rank, ranks, count

    def gather_queries(self, x: Tensor) -> Tensor:
        """Every rank's x [T, n], side by side: [T, R * n]."""
        self._count("all_gather")
        return all_gather_stacked(x, self.group).transpose(0, 1).reshape(len(x), -1)

    def scatter_parts(self, parts: Tensor) -> Tensor:
        """Send parts[i * n : (i + 1) * n] of [R * n, ...] to rank i; return what each rank sent
        here: [R, n, ...]."""
        self._count("all_to_all")
        return all_to_all_equal(parts.view(self.ranks, -1, *parts.shape[1:]), self.group)

    def gather_blocks(self, blocks: Tensor) -> Tensor:
        """Whole blocks of the ranks' shares, [N, 2, K, B, ...]: [N, 2, K, B * R, ...].

        Copied as bytes: they may be of any dtype.
        """
        self._count("all_gather")
        raw = blocks.contiguous().view(torch.uint8)
        shares = all_gather_stacked(raw, self.group).view(blocks.dtype)
        planes, rest = blocks.shape[:4], blocks.shape[4:]
        order = (1, 2, 3, 4, 0, *range(5, shares.dim()))
        return shares.permute(order).reshape(*planes[:3], planes[3] * self.ranks, *rest)

"""Tier: stores the KV of blocks outside of the device pool, found by block keys.

A device pool offers what it evicts to each of its tiers. A tier that takes a block must have its
content copied before the step that was being planned overwrites the block: `StepPlan.swap_out`
runs before everything else of a step. Host swap of preempted sequences is not a tier: it moves
partly filled blocks, which have no key.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from typing import Protocol


class Tier(Protocol):
    """Host memory, a disk, another node."""

    def lookup(self, keys: Seq[bytes]) -> int:
        """Return how many of the chained keys, from the first on, the tier can load."""
        ...

    def load(self, keys: Seq[bytes], blocks: Seq[int]) -> Hashable:
        """Start to load contents into device blocks; the caller holds them until it has ended.

        Returns the name of a resource that requests can wait for (quire.core.scheduling.waiting).
        """
        ...

    def offer(self, blocks: Seq[int], keys: Seq[bytes]) -> None:
        """Offer blocks that the device pool evicted, in order. The tier may store any of them."""
        ...

"""Tier: stores the KV of full blocks outside of the device pool, found by block keys.

The device pool offers what it evicts to each of its tiers, and what it forgets they forget too. A
load is part of the step being planned, or takes longer: then it is a named resource that requests
wait for (quire.core.scheduling.kv_load_wait), and its device blocks are held until then.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Seq
from typing import Protocol


class Tier(Protocol):
    """Host memory, a disk, another node."""

    def __contains__(self, key: bytes) -> bool:
        """Whether the tier can load this content."""
        ...

    def offer(self, blocks: Seq[int], keys: Seq[bytes]) -> None:
        """Offer contents that the device pool evicts, in order. The tier may store any of them.

        It must copy them before the step that is being planned overwrites the blocks.
        """
        ...

    def load(self, keys: Seq[bytes], blocks: Seq[int]) -> Hashable | None:
        """Load contents into device blocks; the caller holds them until the load has ended.

        Returns None if the step being planned can read them, else the name of the load.
        """
        ...

    def forget(self, keys: Iterable[bytes] | None = None) -> None:
        """Forget these contents, or all of them."""
        ...


class SlowTier(Tier, Protocol):
    """A tier whose loads take longer than planning a step: load() returns a name."""

    def ended(self) -> Iterable[tuple[Hashable, bool]]:
        """Return the names of loads that have ended since, each with whether it succeeded."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether ended() would return something."""
        ...

    def set_ended_callback(self, callback: Callable[[], None]) -> None:
        """Set callback(), which any thread calls when has_ended may have become true."""
        ...

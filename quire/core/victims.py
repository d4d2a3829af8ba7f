"""Cached blocks that nobody holds, in the order in which they are evicted.

One tenant's: the least recently dropped goes first. Of several tenants, the one gives who has most
blocks, held ones included; of equals, who has had some for longest. So nobody loses to another what
is no more than an equal share.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace


class Victims:
    """A block is in it once at most. Calls cost O(1), or O(log tenants) where there are several."""

    def __init__(self) -> None:
        self._has: Counter[bytes] = Counter()  # tenant -> blocks, held ones included
        self._of: dict[bytes, OrderedDict[int, None]] = {}  # tenant -> cached ones, oldest first
        self._tenant: dict[int, bytes] = {}  # of a cached block
        self._since: dict[bytes, int] = {}  # tenant -> its place among those who came to have some
        self._came = 0
        self._most: list[tuple[int, int, bytes]] = []
        """A heap of (-blocks, since, tenant), where there are several: each with cached blocks is
        in it with at least as many as it has."""

    def __len__(self) -> int:
        return len(self._tenant)

    def __contains__(self, block: int) -> bool:
        return block in self._tenant

    def __iter__(self) -> Iterator[int]:
        return iter(self._tenant)

    @property
    def accounts(self) -> Counter[bytes]:
        """Blocks of each tenant, held or cached. Not to be changed."""
        return self._has

    def charge(self, tenant: bytes, blocks: int) -> None:
        """It takes so many more."""
        if tenant not in self._has:
            self._came += 1
            self._since[tenant] = self._came
        self._has[tenant] += blocks
        self._raise(tenant)

    def credit(self, tenant: bytes, blocks: int = 1) -> None:
        """It has so many fewer."""
        self._has[tenant] -= blocks
        if not self._has[tenant]:
            del self._has[tenant], self._since[tenant]

    def add(self, block: int, tenant: bytes) -> None:
        """It was dropped: behind the tenant's others."""
        assert block not in self._tenant, f"block {block} is cached already"
        self._tenant[block] = tenant
        blocks = self._of.get(tenant)
        if blocks is not None:
            blocks[block] = None
            return
        self._of[tenant] = OrderedDict({block: None})
        if len(self._of) == 2:  # nobody kept the heap for one
            self._rebuild()
        else:
            self._raise(tenant)

    def discard(self, block: int) -> None:
        """It is used again, or nobody finds it any more; one that is not here is ignored."""
        tenant = self._tenant.pop(block, None)
        if tenant is not None:
            blocks = self._of[tenant]
            del blocks[block]
            if not blocks:
                del self._of[tenant]

    def pop(self) -> int:
        """Take out the next victim; there must be one. Its tenant is not credited."""
        tenant = next(iter(self._of)) if len(self._of) == 1 else self._richest()
        block = next(iter(self._of[tenant]))
        self.discard(block)
        return block

    def clear(self) -> None:
        """All are forgotten, and nobody holds any."""
        for everything in (self._has, self._since, self._of, self._tenant, self._most):
            everything.clear()

    def _richest(self) -> bytes:
        while True:
            tenant = self._most[0][-1]
            if tenant not in self._of:
                heappop(self._most)
            elif self._most[0] == (now := self._entry(tenant)):
                return tenant
            else:
                heapreplace(self._most, now)

    def _raise(self, tenant: bytes) -> None:
        if len(self._of) > 1 and tenant in self._of:
            heappush(self._most, self._entry(tenant))
            if len(self._most) > 4 * len(self._of) + 64:
                self._rebuild()

    def _rebuild(self) -> None:
        self._most = [self._entry(tenant) for tenant in self._of]
        heapify(self._most)

    def _entry(self, tenant: bytes) -> tuple[int, int, bytes]:
        return -self._has[tenant], self._since[tenant], tenant

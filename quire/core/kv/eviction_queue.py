"""Eviction queue: orders cached blocks that no sequence holds.

Within a tenant the least recently freed block is evicted first. Among several tenants the one with
the most blocks loses one, held ones included; of equals, the one that has had blocks for longest.
So no tenant loses blocks to another while it has at most an equal share.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace


class EvictionQueue:
    """Each block is in it at most once. Calls cost O(1), or O(log tenants) with several tenants."""

    def __init__(self) -> None:
        self._num_blocks: Counter[bytes] = Counter()  # tenant -> blocks, held ones included
        self._cached_blocks: dict[
            bytes, OrderedDict[int, None]
        ] = {}  # tenant -> cached blocks, oldest first
        self._tenant: dict[int, bytes] = {}  # of a cached block
        self._since: dict[bytes, int] = {}  # tenant -> order in which tenants got their first block
        self._tenants_seen = 0
        self._heap: list[tuple[int, int, bytes]] = []
        """A heap of (-blocks, since, tenant) for several tenants: each with cached blocks has
        an entry with at least its number of blocks."""

    def __len__(self) -> int:
        return len(self._tenant)

    def __contains__(self, block: int) -> bool:
        return block in self._tenant

    def __iter__(self) -> Iterator[int]:
        return iter(self._tenant)

    @property
    def blocks_per_tenant(self) -> Counter[bytes]:
        """Return the held and cached blocks of each tenant. Read-only."""
        return self._num_blocks

    def charge(self, tenant: bytes, blocks: int) -> None:
        """Add blocks to the count of a tenant."""
        if tenant not in self._num_blocks:
            self._tenants_seen += 1
            self._since[tenant] = self._tenants_seen
        self._num_blocks[tenant] += blocks
        self._push_to_heap(tenant)

    def credit(self, tenant: bytes, blocks: int = 1) -> None:
        """Subtract blocks from the count of a tenant."""
        self._num_blocks[tenant] -= blocks
        if not self._num_blocks[tenant]:
            del self._num_blocks[tenant], self._since[tenant]

    def add(self, block: int, tenant: bytes) -> None:
        """Append a block that was freed, behind the tenant's others."""
        assert block not in self._tenant, f"block {block} is cached already"
        self._tenant[block] = tenant
        blocks = self._cached_blocks.get(tenant)
        if blocks is not None:
            blocks[block] = None
            return
        self._cached_blocks[tenant] = OrderedDict({block: None})
        if len(self._cached_blocks) == 2:  # with a single tenant the heap was not maintained
            self._rebuild_heap()
        else:
            self._push_to_heap(tenant)

    def discard(self, block: int) -> None:
        """Remove a block that is held again or lost its key; other blocks are ignored."""
        tenant = self._tenant.pop(block, None)
        if tenant is not None:
            blocks = self._cached_blocks[tenant]
            del blocks[block]
            if not blocks:
                del self._cached_blocks[tenant]

    def pop(self) -> int:
        """Remove and return the next block to evict; there must be one. Changes no count."""
        tenant = (
            next(iter(self._cached_blocks))
            if len(self._cached_blocks) == 1
            else self._largest_tenant()
        )
        block = next(iter(self._cached_blocks[tenant]))
        self.discard(block)
        return block

    def clear(self) -> None:
        """Remove all blocks and all counts."""
        for everything in (
            self._num_blocks,
            self._since,
            self._cached_blocks,
            self._tenant,
            self._heap,
        ):
            everything.clear()

    def _largest_tenant(self) -> bytes:
        while True:
            tenant = self._heap[0][-1]
            if tenant not in self._cached_blocks:
                heappop(self._heap)
            elif self._heap[0] == (now := self._heap_entry(tenant)):
                return tenant
            else:
                heapreplace(self._heap, now)

    def _push_to_heap(self, tenant: bytes) -> None:
        if len(self._cached_blocks) > 1 and tenant in self._cached_blocks:
            heappush(self._heap, self._heap_entry(tenant))
            if len(self._heap) > 4 * len(self._cached_blocks) + 64:
                self._rebuild_heap()

    def _rebuild_heap(self) -> None:
        self._heap = [self._heap_entry(tenant) for tenant in self._cached_blocks]
        heapify(self._heap)

    def _heap_entry(self, tenant: bytes) -> tuple[int, int, bytes]:
        return -self._num_blocks[tenant], self._since[tenant], tenant

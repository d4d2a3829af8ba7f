"""KV block pool: allocates blocks, and finds full ones by their content.

A block is in exactly one place:

    held     refs > 0            a sequence reads or writes it
    cached   refs = 0, has key   its content is valid until it is evicted
    free     refs = 0, no key    it has no content

held + cached + free == size after every call; check() verifies it. Blocks freed while a step is in
flight return here later: see quire.core.kv.deferred_free.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from enum import IntEnum

from quire.core.kv.eviction_queue import EvictionQueue
from quire.core.kv.tiers.base import Tier

BlockKey = bytes


class BlockState(IntEnum):
    """Values of the bytes of BlockPool.usage_map()."""

    FREE = 0
    CACHED = 1
    HELD = 2
    SHARED = 3  # held more than once


_STATE_OF_REFS = bytes([BlockState.FREE, BlockState.HELD, *[BlockState.SHARED] * 254])
"""Number of holds of a block -> its state; cached blocks are marked separately."""


class BlockPool:
    """Owns the block ids [0, size). A model without KV has a pool of size 0."""

    def __init__(self, num_blocks: int, tiers: Seq[Tier] = ()) -> None:
        assert num_blocks >= 0, num_blocks
        self.size = num_blocks
        self._tiers = list(tiers)
        self._evicted: dict[int, BlockKey] = {}  # evicted by the allocation in progress
        self._refs = [0] * num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._eviction_queue = EvictionQueue()
        self._key_of: dict[int, BlockKey] = {}
        self._block_of: dict[BlockKey, int] = {}
        self._tenant_of: dict[int, bytes] = {}  # of blocks that are not free and have a tenant

    @property
    def available(self) -> int:
        """Number of blocks that allocate() could return now."""
        return len(self._free) + len(self._eviction_queue)

    @property
    def cached(self) -> int:
        """Number of blocks that no sequence holds and whose content can be found."""
        return len(self._eviction_queue)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._block_of

    def add_tier(self, tier: Tier) -> None:
        """Offer what is evicted from now on to this tier too."""
        self._tiers.append(tier)

    def allocate(
        self,
        n: int,
        tenant: bytes = b"",
        *,
        offer: bool = True,
        load: Callable[[list[int]], object] | None = None,
    ) -> list[int] | None:
        """Hold n blocks with no content. All or nothing: None if n are not available.

        tenant: charged for the blocks until they are free again. offer: tiers may store what is
        evicted; not if the blocks may be written before the step being planned runs. load: called
        with the blocks before that, since storing may replace what tiers have.
        """
        if n > self.available:
            return None
        self._eviction_queue.charge(tenant, n)
        taken = [self._allocate_one() for _ in range(n)]
        if tenant:
            self._tenant_of.update(dict.fromkeys(taken, tenant))
        if load is not None:
            load(taken)
        if self._evicted:
            for tier in self._tiers if offer else ():
                tier.offer([*self._evicted], [*self._evicted.values()])
            self._evicted.clear()
        return taken

    def acquire_cached(self, key: BlockKey) -> int | None:
        """Hold the block with this content and return it; None if the pool does not have it."""
        block = self._block_of.get(key)
        if block is not None:
            if not self._refs[block]:
                self._eviction_queue.discard(block)
            self._refs[block] += 1
        return block

    def share(self, blocks: Seq[int]) -> None:
        """Add a hold to blocks that are held already."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is not held, so cannot be shared"
            self._refs[block] += 1

    def cache_block(self, block: int, key: BlockKey) -> None:
        """Add a full, held block to the cache. A second block of this content stays private."""
        if key not in self._block_of:
            assert block not in self._key_of, f"block {block} already holds other content"
            self._block_of[key] = block
            self._key_of[block] = key

    def key_of(self, block: int) -> BlockKey | None:
        """Return the key of the block's content, if it has one."""
        return self._key_of.get(block)

    def uncache(self, blocks: Seq[int]) -> None:
        """Remove the keys of these blocks; they stay held."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
                if block in self._eviction_queue:
                    self._eviction_queue.discard(block)
                    self._set_free(block)

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Remove these contents from the cache and its tiers; held blocks stay held."""
        keys = list(keys)
        self.uncache([block for key in keys if (block := self._block_of.get(key)) is not None])
        for tier in self._tiers:
            tier.forget(keys)

    def evict(self, key: BlockKey) -> None:
        """Remove this content from the cache and its tiers, unless a sequence holds it."""
        block = self._block_of.get(key)
        if block is None or not self._refs[block]:
            self.forget([key])

    def free(self, blocks: Seq[int]) -> None:
        """Release one hold on each block of a sequence, in order; its tail is evicted first."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} freed once too often"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._key_of:
                    self._eviction_queue.add(block, self._tenant_of.get(block, b""))
                else:
                    self._set_free(block)

    def reset(self) -> bool:
        """Empty the cache and its tiers. Returns False, unchanged, while any block is held."""
        if self.available < self.size:
            return False
        self._free.extend(self._eviction_queue)
        self._eviction_queue.clear()
        self._key_of.clear()
        self._block_of.clear()
        self._tenant_of.clear()
        for tier in self._tiers:
            tier.forget()
        return True

    def usage_map(self) -> bytes:
        """Return one BlockState per block, for display."""
        try:
            states = bytearray(bytes(self._refs).translate(_STATE_OF_REFS))
        except ValueError:  # a block has more holds than a byte can count
            few = bytes(min(refs, 2) for refs in self._refs)
            states = bytearray(few.translate(_STATE_OF_REFS))
        for block in self._eviction_queue:
            states[block] = BlockState.CACHED
        return bytes(states)

    def check(self, holds: dict[int, int] | None = None) -> None:
        """Raise AssertionError if a block is lost, duplicated, or in two places.

        holds: block -> expected number of holds; compared if given.
        """
        held = [b for b, refs in enumerate(self._refs) if refs > 0]
        places = [*held, *self._eviction_queue, *self._free]
        if len(places) != self.size or len(set(places)) != self.size:
            raise AssertionError(f"blocks leaked or duplicated: {sorted(places)}")
        if {b: k for k, b in self._block_of.items()} != self._key_of:
            raise AssertionError("the two content maps disagree")
        if any(b in self._key_of for b in self._free) or any(
            b not in self._key_of for b in self._eviction_queue
        ):
            raise AssertionError("a free block has content, or a cached one has none")
        accounts = Counter(self._tenant_of.get(b, b"") for b in (*held, *self._eviction_queue))
        if (
            accounts != self._eviction_queue.blocks_per_tenant
            or self._tenant_of.keys() & self._free
        ):
            raise AssertionError(
                f"blocks are {accounts}'s, on account {self._eviction_queue.blocks_per_tenant}"
            )
        if holds is not None and holds != {b: self._refs[b] for b in held}:
            raise AssertionError(f"blocks are held {holds} times, the pool counts {self._refs}")

    def _allocate_one(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block = self._eviction_queue.pop()
            key = self._key_of.pop(block)
            del self._block_of[key]
            if self._tiers:
                self._evicted[block] = key
            self._eviction_queue.credit(self._tenant_of.pop(block, b""))
        self._refs[block] = 1
        return block

    def _set_free(self, block: int) -> None:
        self._free.append(block)
        self._eviction_queue.credit(self._tenant_of.pop(block, b""))

"""Host tier: keeps evicted KV in host memory, least recently used contents are replaced first.

It manages numbers of host blocks; the runner owns the memory and copies as plans say, stores before
loads. A host block that a plan reads or writes is held until that plan is over: the copies of one
list run at the same time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.core.kv.block_pool import BlockPool
from quire.core.kv.deferred_free import DeferredFree
from quire.core.types import BlockCopy


class TierCopies(NamedTuple):
    """Copies of one step. stores: device block -> host block. loads: host block -> device block."""

    stores: tuple[BlockCopy, ...] = ()
    loads: tuple[BlockCopy, ...] = ()


NO_COPIES = TierCopies()


class HostTier:
    """Each host block is held by a plan, ready with content, or free."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.deferred_free = DeferredFree(self.pool.free)
        self.stored_blocks = self.loaded_blocks = 0  # since the start
        self._stores: list[BlockCopy] = []  # of the plan being made
        self._loads: dict[int, int] = {}  # device block -> host block
        self._held: list[int] = []  # for these loads
        self._in_flight: deque[tuple[int, TierCopies]] = deque()

    def __contains__(self, key: bytes) -> bool:
        return key in self.pool

    def offer(self, blocks: Seq[int], keys: Seq[bytes]) -> None:
        """Store contents that the tier lacks, as far as host blocks are not held."""
        pool, new = self.pool, []
        for block, key in zip(blocks, keys, strict=True):
            held_block = pool.acquire_cached(key)
            if held_block is None:
                new.append((block, key))
            else:
                pool.free([held_block])  # it is the most recently used now
        del new[: max(len(new) - pool.available, 0)]  # the first offered are ends of sequences
        for (block, key), host in zip(new, pool.allocate(len(new)) or (), strict=True):
            pool.cache_block(host, key)
            self._stores.append(BlockCopy(block, host))

    def load(self, keys: Seq[bytes], blocks: Seq[int]) -> None:
        """Add loads of contents, all in the tier, to the plan being made."""
        for key, block in zip(keys, blocks, strict=True):
            host = self.pool.acquire_cached(key)
            assert host is not None, "the tier lost a content between lookup and load"
            self._loads[block] = host  # the last one of this block
            self._held.append(host)

    def forget(self, keys: Iterable[bytes] | None = None) -> None:
        if keys is None:
            self.pool.uncache(range(self.pool.size))
        else:
            self.pool.forget(keys)

    def take_copies(self, step: int) -> TierCopies:
        """Return the copies for the plan of this step. Stores run before loads."""
        if not self._stores and not self._held:
            return NO_COPIES
        loads = tuple([BlockCopy(host, block) for block, host in self._loads.items()])
        copies = TierCopies(tuple(self._stores), loads)
        # freed in reverse: what was offered first is replaced first, then ends of prefixes
        held = [*self._held, *(copy.dst for copy in reversed(self._stores))]
        self.deferred_free.free_after(held, step)
        self._in_flight.append((step, copies))
        self.stored_blocks += len(copies.stores)
        self.loaded_blocks += len(copies.loads)
        self._stores, self._loads, self._held = [], {}, []
        return copies

    def step_finished(self, step: int) -> None:
        """Free what plans up to this one have held."""
        self.deferred_free.step_finished(step)
        while self._in_flight and self._in_flight[0][0] <= step:
            self._in_flight.popleft()

    def forget_copies_in_flight(self) -> list[int]:
        """Forget what plans in flight store. Returns the device blocks that they load."""
        loaded: list[int] = []
        for _, copies in self._in_flight:
            self.pool.uncache([copy.dst for copy in copies.stores])
            loaded += [copy.dst for copy in copies.loads]
        return loaded

    def check(self) -> None:
        """Raise AssertionError unless held + ready + free = size, and plans hold what they copy."""
        stored = [copy.dst for copy in self._stores]
        self.pool.check(Counter([*self.deferred_free.pending_blocks(), *self._held, *stored]))

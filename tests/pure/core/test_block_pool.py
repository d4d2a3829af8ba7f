"""The block pool behaves as a simple model for any order of calls."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.core.kv.block_pool import BlockPool, BlockState

SIZE = 6


class PoolMachine(RuleBasedStateMachine):
    """holds: blocks of each user, in order; a user frees all of its blocks at once."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(SIZE)
        self.holds = []
        self.content = {}  # block -> key, while its content is valid
        self.dropped = []  # blocks without users but with content, next victim first

    def refs(self):
        return Counter(b for blocks in self.holds for b in blocks)

    @rule(n=st.integers(0, SIZE + 1))
    def take(self, n):
        available = SIZE - len(self.refs())
        free = available - len(self.dropped)
        blocks = self.pool.allocate(n)
        if n > available:
            assert blocks is None
            return
        assert len(set(blocks)) == n
        assert not set(blocks) & set(self.refs())
        gone = self.dropped[: max(n - free, 0)]
        assert set(gone) <= set(blocks), "evicted a block other than the least recently freed"
        assert not set(blocks) & set(self.dropped[len(gone) :])
        del self.dropped[: len(gone)]
        for block in gone:
            del self.content[block]
        self.holds.append(blocks)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), key=st.binary(min_size=1, max_size=1))
    def cache_block(self, data, key):
        block = data.draw(st.sampled_from(sorted(self.refs()) or [None]))
        if block is None or block in self.content:
            return
        self.pool.cache_block(block, key)
        if key not in self.content.values():
            self.content[block] = key

    @rule(key=st.binary(min_size=1, max_size=1))
    def find_anything(self, key):
        self._find(key)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def find_known(self, data):
        self._find(data.draw(st.sampled_from(sorted(self.content.values()))))

    def _find(self, key):
        known = {k: b for b, k in self.content.items()}
        assert (key in self.pool) == (key in known)
        block = self.pool.acquire_cached(key)
        assert block == known.get(key)
        if block is not None:
            self.holds.append([block])
            if block in self.dropped:
                self.dropped.remove(block)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def share(self, data):
        blocks = data.draw(st.sampled_from(self.holds))
        self.pool.share(blocks)
        self.holds.append(list(blocks))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def free(self, data):
        blocks = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.pool.free(blocks)
        left = self.refs()
        self.dropped += [b for b in reversed(blocks) if b in self.content and not left[b]]

    @rule()
    def forget(self):
        done = self.pool.reset()
        assert done == (not self.refs())
        if done:
            self.content, self.dropped = {}, []

    @invariant()
    def agrees(self):
        refs = self.refs()
        self.pool.check(dict(refs))
        assert self.pool.available == SIZE - len(refs)
        assert self.pool.cached == len(self.dropped)
        states = self.pool.usage_map()
        for block in range(SIZE):
            if refs[block]:
                want = BlockState.SHARED if refs[block] > 1 else BlockState.HELD
            else:
                want = BlockState.CACHED if block in self.dropped else BlockState.FREE
            assert states[block] == want


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_the_tail_of_a_sequence_is_evicted_first():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for i, block in enumerate(blocks):
        pool.cache_block(block, bytes([i]))
    pool.free(blocks)
    assert pool.allocate(1) == [blocks[2]]
    assert bytes([0]) in pool
    assert bytes([2]) not in pool


def test_freeing_an_unheld_block_raises():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="once too often"):
        pool.free(blocks)


def test_check_detects_a_lost_block():
    pool = BlockPool(2)
    pool._free.pop()
    with pytest.raises(AssertionError, match="leaked"):
        pool.check()


def test_check_detects_content_maps_that_differ():
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.cache_block(block, b"a")
    del pool._block_of[b"a"]
    with pytest.raises(AssertionError, match="disagree"):
        pool.check()


def test_check_detects_a_block_charged_to_the_wrong_tenant():
    pool = BlockPool(4)
    (block,) = pool.allocate(1, b"somebody")
    pool.check()
    del pool._tenant_of[block]
    with pytest.raises(AssertionError, match="account"):
        pool.check()


def test_check_detects_a_cached_block_without_content():
    pool = BlockPool(2)
    pool._eviction_queue.add(pool._free.pop(), b"")
    with pytest.raises(AssertionError, match="has none"):
        pool.check()


def test_check_detects_holds_that_differ():
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    with pytest.raises(AssertionError, match="held"):
        pool.check({block: 2})


class FakeTier:
    """Stores everything that is offered."""

    def __init__(self):
        self.offered = []

    def __contains__(self, key):
        return key in [known for _, known in self.offered]

    def load(self, keys, blocks):
        assert all(key in self for key in keys)

    def offer(self, blocks, keys):
        self.offered += zip(blocks, keys, strict=True)

    def forget(self, keys=None):
        self.offered = [] if keys is None else [o for o in self.offered if o[1] not in keys]


def test_evicted_blocks_are_offered_to_each_tier_once_and_in_order():
    tiers = FakeTier(), FakeTier()
    pool = BlockPool(4, tiers)
    blocks = pool.allocate(3)
    for block, key in zip(blocks, (b"a", b"b", b"c")):
        pool.cache_block(block, key)
    pool.free(blocks)
    assert pool.allocate(1) is not None  # a free block
    assert not tiers[0].offered
    taken = pool.allocate(2)
    assert tiers[0].offered == tiers[1].offered == list(zip(taken, (b"c", b"b")))
    pool.free(taken)
    assert pool.allocate(2) is not None
    assert len(tiers[0].offered) == 2, "they had no content"
    assert pool.allocate(1) is not None
    assert [key for _, key in tiers[0].offered] == [b"c", b"b", b"a"]


def test_forget_applies_to_tiers_too():
    tier = FakeTier()
    pool = BlockPool(1, [tier])
    for key in (b"a", b"b", b"c"):
        [block] = pool.allocate(1)
        pool.cache_block(block, key)
        pool.free([block])
    assert b"a" in tier
    assert b"b" in tier
    pool.forget([b"a", b"c"])
    assert b"a" not in tier
    assert b"c" not in pool
    pool.evict(b"b")
    assert b"b" not in tier
    tier.offer([0], [b"d"])
    assert pool.reset()
    assert not tier.offered


def test_load_runs_before_evicted_blocks_are_offered():
    events = []
    pool = BlockPool(1, [tier := FakeTier()])
    tier.offer = lambda blocks, keys: events.append(("offer", blocks, keys))
    [block] = pool.allocate(1)
    pool.cache_block(block, b"a")
    pool.free([block])
    assert pool.allocate(1, load=lambda blocks: events.append(("load", blocks))) == [block]
    assert events == [("load", [block]), ("offer", [block], [b"a"])]

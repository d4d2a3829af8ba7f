"""The eviction queue behaves as a simple model; tenants evict their own blocks."""

from collections import Counter, OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.kv.block_pool import BlockPool
from quire.core.kv.eviction_queue import EvictionQueue

TENANTS = [b"", b"a", b"b", b"c"]
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["take", "drop", "use", "free", "pop"]),
        st.integers(0, 40),
        st.sampled_from(TENANTS),
    ),
    max_size=300,
)


@given(MOVES)
def test_the_oldest_block_of_the_largest_tenant_is_evicted(moves):
    queue = EvictionQueue()
    held, cached = {}, OrderedDict()  # block -> tenant
    since = {}
    for at, (move, block, tenant) in enumerate(moves):
        if move == "take" and block not in held and block not in cached:
            if tenant not in (*held.values(), *cached.values()):
                since[tenant] = at
            queue.charge(tenant, 1)
            held[block] = tenant
        elif move == "drop" and block in held:
            cached[block] = held.pop(block)
            queue.add(block, cached[block])
        elif move == "use" and block in cached:
            held[block] = cached.pop(block)
            queue.discard(block)
        elif move == "free" and block in held:
            queue.credit(held.pop(block))
        elif move == "pop" and cached:
            counts = Counter([*held.values(), *cached.values()])
            largest = min(cached.values(), key=lambda one: (-counts[one], since[one]))
            oldest = next(b for b, t in cached.items() if t == largest)
            assert queue.pop() == oldest
            queue.credit(cached.pop(oldest))
        assert list(queue) == list(cached)
        assert queue.blocks_per_tenant == Counter([*held.values(), *cached.values()])


def test_a_block_is_cached_once():
    queue = EvictionQueue()
    queue.add(3, b"")
    with pytest.raises(AssertionError, match="block 3"):
        queue.add(3, b"a")


def test_the_heap_is_bounded():
    queue = EvictionQueue()
    queue.charge(b"other", 1)
    queue.add(0, b"other")
    for i in range(10_000):
        queue.charge(b"one", 1)
        queue.add(1 + i % 50, b"one")
        queue.discard(1 + i % 50)
    assert len(queue._heap) < 100


def lookup(pool, tenant, key, blocks):
    """Look up and cache a prompt of so many blocks. Returns the number of hits."""
    names = [key + bytes([i]) for i in range(blocks)]
    found = [pool.acquire_cached(name) for name in names]
    hits = [block for block in found if block is not None]
    fresh = pool.allocate(blocks - len(hits), tenant)
    for block, name in zip(fresh, [n for n, b in zip(names, found) if b is None]):
        pool.cache_block(block, name)
    pool.free(hits + fresh)
    return len(hits)


def test_a_tenant_that_thrashes_evicts_its_own_blocks():
    pool = BlockPool(64)
    for at in range(200):
        hits = lookup(pool, b"regular", b"system prompt", 20)
        assert hits == (20 if at else 0)
        for other in range(5):
            lookup(pool, b"thrasher", b"%d %d" % (at, other), 12)
    pool.check()


def test_within_a_tenant_the_least_recently_used_is_evicted_first():
    pool = BlockPool(40)
    lookup(pool, b"one", b"first", 20)
    for at in range(5):
        lookup(pool, b"one", b"%d" % at, 20)
    assert lookup(pool, b"one", b"first", 20) == 0

"""Who gives a block when one is needed: against a model in a few lines; and what it is for."""

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
def test_the_tenant_with_most_blocks_gives_its_oldest(moves):
    victims = EvictionQueue()
    held, cached = {}, OrderedDict()  # block -> tenant
    since = {}
    for at, (move, block, tenant) in enumerate(moves):
        if move == "take" and block not in held and block not in cached:
            if tenant not in (*held.values(), *cached.values()):
                since[tenant] = at
            victims.charge(tenant, 1)
            held[block] = tenant
        elif move == "drop" and block in held:
            cached[block] = held.pop(block)
            victims.add(block, cached[block])
        elif move == "use" and block in cached:
            held[block] = cached.pop(block)
            victims.discard(block)
        elif move == "free" and block in held:
            victims.credit(held.pop(block))
        elif move == "pop" and cached:
            has = Counter([*held.values(), *cached.values()])
            richest = min(cached.values(), key=lambda one: (-has[one], since[one]))
            oldest = next(b for b, t in cached.items() if t == richest)
            assert victims.pop() == oldest
            victims.credit(cached.pop(oldest))
        assert list(victims) == list(cached)
        assert victims.blocks_per_tenant == Counter([*held.values(), *cached.values()])


def test_a_block_is_cached_once():
    victims = EvictionQueue()
    victims.add(3, b"")
    with pytest.raises(AssertionError, match="block 3"):
        victims.add(3, b"a")


def test_what_is_remembered_of_the_past_is_bounded():
    victims = EvictionQueue()
    victims.charge(b"other", 1)
    victims.add(0, b"other")
    for i in range(10_000):
        victims.charge(b"one", 1)
        victims.add(1 + i % 50, b"one")
        victims.discard(1 + i % 50)
    assert len(victims._heap) < 100


def served(pool, tenant, key, blocks):
    """A prompt of so many blocks: how many were found."""
    names = [key + bytes([i]) for i in range(blocks)]
    found = [pool.acquire_cached(name) for name in names]
    hits = [block for block in found if block is not None]
    fresh = pool.allocate(blocks - len(hits), tenant)
    for block, name in zip(fresh, [n for n, b in zip(names, found) if b is None]):
        pool.cache_block(block, name)
    pool.free(hits + fresh)
    return len(hits)


def test_who_fills_the_cache_with_what_nobody_asks_again_loses_what_is_his():
    pool = BlockPool(64)
    for at in range(200):
        hits = served(pool, b"regular", b"system prompt", 20)
        assert hits == (20 if at else 0)
        for other in range(5):
            served(pool, b"thrasher", b"%d %d" % (at, other), 12)
    pool.check()


def test_of_one_tenant_the_least_recently_used_goes_first():
    pool = BlockPool(40)
    served(pool, b"one", b"first", 20)
    for at in range(5):
        served(pool, b"one", b"%d" % at, 20)
    assert served(pool, b"one", b"first", 20) == 0

"""The host tier: stored contents, host blocks that plans use, and failed steps."""

from __future__ import annotations

import random

import pytest

from quire.core.kv.block_pool import BlockPool
from quire.core.kv.tiers.host import HostTier
from quire.core.types import BlockCopy


def offered(tier, *keys, step, first=0):
    """Offer contents in one plan, and return its copies."""
    tier.offer([first + i for i in range(len(keys))], list(keys))
    return tier.take_copies(step)


def test_offered_contents_are_stored_once():
    tier = HostTier(4)
    copies = offered(tier, b"a", b"b", step=1)
    assert [copy.src for copy in copies.stores] == [0, 1]
    assert not copies.loads
    assert b"a" in tier
    assert b"b" in tier
    assert not offered(tier, b"b", step=2).stores, "it is stored already"
    tier.check()
    tier.step_finished(1)
    tier.step_finished(2)
    tier.check()
    assert (tier.pool.available, tier.pool.cached) == (4, 2)


def test_the_least_recently_used_content_is_replaced():
    tier = HostTier(2)
    offered(tier, b"a", step=1)
    offered(tier, b"b", step=2)
    tier.step_finished(2)
    offered(tier, b"a", step=3)  # evicted from the device again
    tier.step_finished(3)
    offered(tier, b"c", step=4)
    assert b"a" in tier
    assert b"b" not in tier
    assert b"c" in tier


def test_ends_of_sequences_are_replaced_before_their_beginnings():
    """The device evicts ends of sequences first, so it offers them first."""
    tier = HostTier(3)
    offered(tier, b"end", b"middle", b"head", step=1)
    tier.step_finished(1)
    offered(tier, b"x", step=2)
    assert b"end" not in tier
    tier.step_finished(2)
    tier.load([b"head", b"middle"], [5, 6])
    tier.take_copies(3)
    tier.step_finished(3)
    offered(tier, b"y", b"z", step=4)
    assert b"middle" not in tier
    assert b"head" in tier


def test_the_last_offered_contents_are_kept_when_the_host_is_full():
    tier = HostTier(2)
    copies = offered(tier, b"end", b"middle", b"head", step=1)
    assert [copy.src for copy in copies.stores] == [1, 2]
    assert b"end" not in tier


def test_a_host_block_used_by_a_plan_is_not_replaced_until_it_is_applied():
    tier = HostTier(2)
    offered(tier, b"a", b"b", step=1)
    assert not offered(tier, b"c", step=2).stores, "both are being written"
    tier.step_finished(2)
    tier.load([b"a", b"b"], [7, 8])
    tier.offer([3], [b"c"])
    copies = tier.take_copies(3)
    assert not copies.stores, "stores come before loads, so these would be overwritten"
    assert [copy.dst for copy in copies.loads] == [7, 8]
    assert not offered(tier, b"c", step=4).stores
    tier.step_finished(3)
    assert offered(tier, b"c", step=5).stores
    tier.check()


def test_a_block_evicted_before_its_load_is_not_stored():
    tier = HostTier(2)
    offered(tier, b"a", step=1)
    tier.step_finished(1)
    tier.load([b"a"], [7])
    tier.offer([7], [b"a"])
    assert not tier.take_copies(2).stores


def test_a_block_loaded_twice_in_a_plan_gets_the_last_content():
    tier = HostTier(2)
    (a, b), _ = offered(tier, b"a", b"b", step=1)
    tier.step_finished(1)
    tier.load([b"a"], [7])
    tier.load([b"b"], [7])
    assert tier.take_copies(2).loads == (BlockCopy(b.dst, 7),)
    tier.check()
    tier.step_finished(2)
    assert tier.pool.available == 2
    assert a.dst != b.dst


def test_stores_in_flight_are_forgotten_when_a_step_fails():
    tier = HostTier(4)
    offered(tier, b"a", step=1)
    tier.step_finished(1)
    offered(tier, b"b", step=2)
    tier.load([b"a"], [7])
    offered(tier, b"c", step=3)
    assert tier.forget_copies_in_flight() == [7]
    assert b"a" in tier
    assert b"b" not in tier
    assert b"c" not in tier
    tier.check()
    tier.step_finished(2)
    tier.step_finished(3)
    assert (tier.pool.available, tier.pool.cached) == (4, 1)


def test_a_forgotten_content_is_not_found_and_its_block_is_held_until_the_plan_is_applied():
    tier = HostTier(1)
    offered(tier, b"a", step=1)
    tier.forget([b"a"])
    assert b"a" not in tier
    assert not offered(tier, b"b", step=2).stores
    tier.step_finished(2)
    assert offered(tier, b"b", step=3).stores
    tier.forget()
    assert b"b" not in tier
    tier.check()


@pytest.mark.parametrize("seed", range(20))
def test_loaded_contents_equal_stored_contents(seed):
    """Compares pool and tier with simulated memory; steps are late, and some fail."""
    rng = random.Random(seed)
    size, depth = rng.randrange(4, 12), rng.choice([1, 2])
    tier = HostTier(rng.randrange(1, 16))
    pool = BlockPool(size, [tier])
    device, host = [None] * size, [None] * tier.pool.size
    flying, loads = [], 0
    for step in range(1, 400):
        key = lambda: b"%d" % rng.randrange(24)  # noqa: E731
        wanted = [one for one in {key() for _ in range(4)} if one in tier and one not in pool]
        wanted = wanted[: pool.available]
        loaded = pool.allocate(len(wanted), load=lambda blocks, w=wanted: tier.load(w, blocks))
        for block, one in zip(loaded, wanted):
            pool.cache_block(block, one)
        fresh = pool.allocate(rng.randrange(min(4, pool.available) + 1))
        if loaded and rng.random() < 0.3:  # free before the plan is over, and evicted perhaps
            pool.free([loaded.pop()])
            wanted.pop()
            fresh += pool.allocate(rng.randrange(min(3, pool.available) + 1))
        loads += len(wanted)
        flying.append((step, tier.take_copies(step), loaded, wanted, fresh))
        tier.check()
        pool.check()
        if rng.random() < 0.1:
            (tier if rng.random() < 0.5 else pool).forget([key()])
        if len(flying) < depth:
            continue
        step, copies, loaded, wanted, fresh = flying.pop(0)
        if rng.random() < 0.1:
            pool.uncache(tier.forget_copies_in_flight())
        else:
            for pairs, source, target in (
                (copies.stores, device, host),
                (copies.loads, host, device),
            ):
                read = [source[a] for a, _ in pairs]
                assert len({b for _, b in pairs}) == len(pairs), "two copies to one block"
                for (_, b), content in zip(pairs, read):
                    target[b] = content
            assert all(device[b] == pool.key_of(b) for b in loaded if pool.key_of(b)), (
                "loaded wrong"
            )
            for block in fresh:
                device[block] = key()
                pool.cache_block(block, device[block])
        tier.step_finished(step)
        pool.free([*loaded, *fresh])
    assert loads > 10

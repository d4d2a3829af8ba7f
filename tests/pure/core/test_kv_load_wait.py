"""KV loads of a slow tier: requests wait for them, others overtake, failures are recomputed."""

from __future__ import annotations

from quire.core.kv.block_pool import BlockPool
from quire.core.kv.cache_spec import FullAttentionSpec, SlidingWindowSpec
from quire.core.kv.kv_cache import KVCache
from quire.core.kv.tiers.host import HostTier
from quire.core.scheduling.kv_load_wait import KVLoadWait
from quire.core.scheduling.limits.base import by_contract
from quire.core.scheduling.limits.token_budget import TokenBudget
from quire.core.scheduling.order.fifo import Fifo
from quire.core.scheduling.scheduler import Scheduler
from tests.pure.core.builders import request, sequence
from tests.pure.core.test_scheduler import answer, rows, step

HEAD = tuple(range(12))


class SlowTier:
    """Has the contents that a test stores; end() ends a load."""

    def __init__(self):
        self.keys, self.loading, self._ended = set(), {}, []

    def __contains__(self, key):
        return key in self.keys

    def offer(self, blocks, keys):
        pass

    def load(self, keys, blocks):
        name = f"load {len(self.loading)}"
        self.loading[name] = list(zip(keys, blocks))
        return name

    def forget(self, keys=None):
        self.keys -= self.keys if keys is None else set(keys)

    def end(self, name="load 0", loaded=True):
        self._ended.append((name, loaded))

    def ended(self):
        ended, self._ended = self._ended, []
        return ended

    @property
    def has_ended(self):
        return bool(self._ended)

    def set_ended_callback(self, callback):
        self.callback = callback


FULL = (FullAttentionSpec(),)


def build_run(blocks=40, specs=FULL, host=None):
    tier = SlowTier()
    kv = KVCache(BlockPool(blocks, [tier]), 4, specs, host=host)
    scheduler = Scheduler(
        kv,
        Fifo(),
        **by_contract([TokenBudget(100), KVLoadWait(kv, tier)]),
        max_seqs=8,
        max_len=1000,
    )
    return scheduler, kv, tier


def stored(kv, tier, prompt=HEAD):
    """Store all blocks of a prompt in the tier."""
    for key in kv.keys.first(sequence(prompt), len(prompt) // 4):
        tier.keys |= {key + suffix for suffix in kv._group_suffixes}


def test_a_request_waits_for_its_load_and_others_pass():
    scheduler, kv, tier = build_run()
    stored(kv, tier)
    scheduler.add(request("a", (*HEAD, 99), 1))
    scheduler.add(request("b", (50, 51), 3))
    assert scheduler.is_waiting_for_resources("a")
    assert rows(step(scheduler)[0]) == [("b", 0, 0, 2)]
    assert kv.pool.size - kv.pool.available == 3 + 1, "held while they are loaded"
    scheduler.check()
    tier.end()
    assert scheduler.has_ready
    assert scheduler.enqueue_ready().queued == ["a"]
    scheduler.check()
    plan, updates = step(scheduler)
    assert ("a", 0, 12, 1) in rows(plan)
    assert {u.request_id: u.cached_tokens for u in updates}["a"] == 12


def test_a_failed_load_is_recomputed():
    scheduler, kv, tier = build_run()
    stored(kv, tier)
    scheduler.add(request("a", (*HEAD, 99), 1))
    tier.end(loaded=False)
    assert scheduler.enqueue_ready() == (["a"], [])
    plan, updates = step(scheduler)
    assert rows(plan) == [("a", 0, 0, 13)]
    assert updates[0].finish == "length"
    scheduler.check()
    assert kv.pool.available == kv.pool.size


def test_blocks_of_an_aborted_request_are_held_until_the_load_ends():
    scheduler, kv, tier = build_run()
    stored(kv, tier)
    scheduler.add(request("a", (*HEAD, 99), 1))
    assert [u.finish for u in scheduler.abort("a")] == ["abort"]
    scheduler.check()
    assert kv.pool.size - kv.pool.available == 3
    assert not scheduler.reset_prefix_cache()
    tier.end()
    assert scheduler._resources.results() == []
    assert kv.pool.available == kv.pool.size
    assert kv.pool.cached == 3, "it is cached for the next request"
    scheduler.check()


def test_two_requests_wait_for_one_load_and_each_loads_what_it_lacks():
    scheduler, kv, tier = build_run()
    stored(kv, tier, (*HEAD, *range(100, 108)))
    for name, prompt in (("a", (*HEAD, 99)), ("b", (*HEAD, 99)), ("c", (*HEAD, *range(100, 109)))):
        scheduler.add(request(name, prompt, 1))
    assert {name: len(load) for name, load in tier.loading.items()} == {"load 0": 3, "load 1": 2}
    tier.end("load 0")
    assert scheduler.enqueue_ready().queued == ["a", "b"]
    tier.end("load 1")
    assert scheduler.enqueue_ready().queued == ["c"]
    plan, _ = step(scheduler)
    assert [row[:3] for row in rows(plan)] == [("a", 0, 12), ("b", 0, 12), ("c", 0, 20)]


def test_loads_hold_a_bounded_share_of_the_device():
    scheduler, kv, tier = build_run(blocks=16)
    prompt = tuple(range(37))
    stored(kv, tier, prompt)
    scheduler.add(request("a", prompt, 1))
    assert len(tier.loading["load 0"]) == 4
    tier.end()
    scheduler.enqueue_ready()
    assert rows(step(scheduler)[0]) == [("a", 0, 16, 21)]
    assert not build_run(blocks=1)[2].loading


def test_contents_on_device_or_host_are_not_loaded():
    scheduler, kv, tier = build_run(host=HostTier(8))
    stored(kv, tier)
    scheduler.add(request("a", (*HEAD, 99), 1))
    tier.end()
    scheduler.enqueue_ready()
    step(scheduler)
    scheduler.add(request("b", (*HEAD, 98), 1))
    assert not scheduler.is_waiting_for_resources("b")
    assert len(tier.loading) == 1


def test_each_window_group_loads_its_blocks():
    scheduler, kv, tier = build_run(specs=(FullAttentionSpec(), SlidingWindowSpec(5)))
    stored(kv, tier)
    scheduler.add(request("a", (*HEAD, 99), 1))
    assert len(tier.loading["load 0"]) == 3 + 1
    tier.end()
    scheduler.enqueue_ready()
    assert rows(step(scheduler)[0]) == [("a", 0, 12, 1)]
    scheduler.check()


def test_contents_forgotten_during_a_load_are_not_cached():
    scheduler, kv, tier = build_run()
    stored(kv, tier)
    scheduler.add(request("a", (*HEAD, 99), 1))
    kv.pool.forget([key for key, _ in tier.loading["load 0"][1:]])
    tier.end()
    scheduler.enqueue_ready()
    assert rows(step(scheduler)[0]) == [("a", 0, 4, 9)]


def test_blocks_evicted_by_a_load_are_not_stored():
    """The load may write the block before the next plan would copy it."""
    host = HostTier(8)
    scheduler, kv, tier = build_run(blocks=8, host=host)
    scheduler.add(request("b", range(50, 80), 1))
    step(scheduler)
    stored(kv, tier)
    scheduler.add(request("a", (*HEAD, 99), 1))
    assert len(tier.loading["load 0"]) == 2
    scheduler.add(request("c", (1,), 1))
    plan = scheduler.plan()
    assert not {c.src for c in plan.swap_out} & {b for _, b in tier.loading["load 0"]}
    scheduler.apply(plan, answer(plan))
    scheduler.check()

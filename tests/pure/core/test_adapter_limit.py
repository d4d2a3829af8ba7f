"""Adapter limit: adapters of a step, their slots, the wait for their weights, and fair turns."""

import random

import pytest

from quire.core.kv.block_pool import BlockPool
from quire.core.kv.kv_cache import KVCache
from quire.core.scheduling.limits.adapters import PATIENT_STEPS, AdapterLimit, AdapterSlots
from quire.core.scheduling.limits.base import by_contract
from quire.core.scheduling.limits.max_seqs import MaxSeqsLimit
from quire.core.scheduling.limits.token_budget import TokenBudget
from quire.core.scheduling.order.fifo import Fifo
from quire.core.scheduling.scheduler import Scheduler
from quire.core.snapshot import AdapterStats
from quire.core.types import AdapterRef, Request, Sequence, StepResult, StopConditions, Wants
from quire.errors import RequestError, Unsupported
from tests import tiers


class Provider:
    """Weights are there at once, or when the test says so."""

    def __init__(self, at_once=True):
        self.at_once = at_once
        self.holds = {}
        self.there = set()
        self.found = []
        self.pinned = set()

    def acquire(self, adapter, tenant):
        self.holds[adapter.digest] = self.holds.get(adapter.digest, 0) + 1
        if self.at_once:
            self.there.add(adapter.digest)
        return adapter.digest in self.there

    def release(self, adapter):
        self.holds[adapter.digest] -= 1
        if not self.holds[adapter.digest]:
            del self.holds[adapter.digest]

    def pinned_digests(self):
        return self.pinned

    def stats(self):
        return AdapterStats()

    def weights(self, adapter):
        assert adapter.digest in self.holds
        assert adapter.digest in self.there
        return f"weights of {adapter.name}"

    def arrive(self, name, error=None):
        if error is None:
            self.there.add(name.encode())
        self.found.append((name.encode(), error))

    @property
    def has_outcomes(self):
        return bool(self.found)

    def outcomes(self):
        while self.found:
            yield self.found.pop(0)

    def set_outcome_callback(self, callback):
        pass


class Engine:
    """A scheduler over a device that has slots, and rows that name the adapter they were run with."""

    def __init__(self, slots=2, provider=None, max_seqs=8, blocks=200, depth=1):
        self.provider = provider or Provider()
        self.limit = AdapterLimit(slots, self.provider)
        self.scheduler = Scheduler(
            KVCache(BlockPool(blocks), 4),
            Fifo(),
            **by_contract([TokenBudget(64), MaxSeqsLimit(max_seqs), self.limit]),
            max_seqs=max_seqs,
            max_len=400,
            steps_in_flight=depth,
        )
        self.slots = {}  # what the device has
        self.loads = 0
        self.ended = {}

    def add(self, name, adapter=None, prompt=(1, 2, 3), tokens=3, **more):
        ref = None if adapter is None else AdapterRef(adapter, adapter.encode())
        stop = StopConditions(max_tokens=tokens)
        self.scheduler.add(Request(name, tuple(prompt), stop, adapter=ref, **more))

    def run(self, plan):
        """What a worker does: fill slots, then check the slot of every row."""
        found = [part for part in plan.parts if isinstance(part, AdapterSlots)]
        used = {row.seq.request.adapter for row in plan.rows} - {None}
        assert bool(found) == bool(used)
        for part in found:
            for slot, weights in part.loads:
                self.slots[slot] = weights
                self.loads += 1
            assert part.slots.keys() == {one.digest for one in used}
            for one in used:
                assert self.slots[part.slots[one.digest]] == f"weights of {one.name}"
        assert len(used) <= self.limit._max
        return StepResult([(7,) if row.wants is Wants.TOKEN else () for row in plan.rows])

    def step(self):
        if self.scheduler.has_ready:
            for update in self.scheduler.enqueue_ready().failed:
                self.ended[update.request_id] = update.error
        plan = self.scheduler.plan()
        for update in self.scheduler.apply(plan, self.run(plan)):
            if update.finish:
                self.ended[update.request_id] = update.error
        self.scheduler.check()
        return [row.seq.request.id for row in plan.rows]

    def finish(self, most=2000):
        while not self.scheduler.idle and most:
            self.step()
            most -= 1
        assert most, "it never ends"


def test_a_step_has_no_more_adapters_than_slots_and_others_overtake():
    engine = Engine(slots=2)
    for name, adapter in [("a", "x"), ("b", "y"), ("c", "z"), ("d", "x"), ("e", None)]:
        engine.add(name, adapter)
    assert engine.step() == ["a", "b", "d", "e"]
    engine.finish()
    assert list(engine.ended) == ["a", "b", "d", "e", "c"]
    assert engine.loads == 3
    assert not engine.provider.holds


def test_a_slot_that_was_used_last_is_kept():
    engine = Engine(slots=2)
    for adapter in ["x", "y", "x", "z", "x", "y"]:
        engine.add(f"{adapter}{engine.loads}{len(engine.ended)}", adapter)
        engine.finish()
    assert engine.loads == 4  # x, y, z in y's place, y in z's


def test_a_slot_is_taken_from_the_tenant_that_has_most():
    engine = Engine(slots=3)
    for adapter, tenant in [("b1", b"b"), ("a1", b"a"), ("a2", b"a"), ("a3", b"a"), ("a4", b"a")]:
        engine.add(adapter, adapter, tenant=tenant)
        engine.finish()
    assert engine.limit._slots.keys() == {b"b1", b"a3", b"a4"}
    engine.add("b2", "b2", tenant=b"b")
    engine.finish()
    assert engine.limit._slots.keys() == {b"b1", b"b2", b"a4"}
    engine.add("a4 of b", "a4", tenant=b"b")  # it counts for its last user
    engine.add("c", "c", tenant=b"c")
    engine.finish()
    assert engine.limit._slots.keys() == {b"b2", b"a4", b"c"}
    assert engine.limit._users.keys() == engine.limit._slots.keys()
    assert not engine.limit._tenants


def test_a_pinned_adapter_loses_its_slot_last():
    engine = Engine(slots=2)
    engine.provider.pinned = {b"x"}
    for i, adapter in enumerate("xyzyz"):
        engine.add(f"{i}", adapter)
        engine.finish()
    assert b"x" in engine.limit._slots
    for adapter in "yz":
        engine.add(f"both {adapter}", adapter)
    engine.finish()
    assert engine.limit._slots.keys() == {b"y", b"z"}, "a step needs both slots"


def test_a_starved_adapter_gets_its_turn():
    engine = Engine(slots=1, max_seqs=4)
    engine.add("x", "x", tokens=20)
    engine.step()
    engine.add("rare", "y")
    for i in range(3 * PATIENT_STEPS):
        if i % 5 == 0:
            engine.add(f"x{i}", "x", tokens=20)
        engine.step()
        if "rare" in engine.ended:
            break
    assert PATIENT_STEPS < i < PATIENT_STEPS + 60
    engine.finish()


def test_requests_wait_for_weights_and_let_others_run():
    provider = Provider(at_once=False)
    engine = Engine(provider=provider)
    engine.add("a", "x")
    engine.add("b", "x")
    engine.add("c", "y")
    engine.add("d")
    assert engine.step() == ["d"]
    provider.arrive("x")
    assert engine.step() == ["d", "a", "b"]
    provider.arrive("y", RequestError("broken files"))
    engine.step()
    assert engine.ended["c"] == "broken files"
    engine.finish()
    assert not provider.holds


def test_an_aborted_request_releases_its_weights_once():
    provider = Provider(at_once=False)
    engine = Engine(provider=provider)
    engine.add("a", "x", n=1)
    engine.scheduler.abort("a")
    assert not provider.holds
    provider.arrive("x")
    engine.finish()


def test_without_a_provider_adapters_are_refused():
    engine = Engine()
    engine.limit._provider = None
    with pytest.raises(Unsupported, match="enable_lora"):
        engine.add("a", "x")


def test_slots_are_filled_again_after_a_failed_step():
    engine = Engine(slots=2)
    engine.add("a", "x", tokens=5)
    engine.step()
    engine.scheduler.fail_step(engine.scheduler.plan())
    engine.slots.clear()
    engine.finish()
    assert engine.loads == 2


def test_adapters_share_no_cached_prefix_with_each_other_or_the_model():
    engine = Engine(slots=4)
    prompt = range(20)
    for name, adapter in [("a", None), ("b", "x"), ("c", "y"), ("d", "x"), ("e", None)]:
        engine.add(name, adapter, prompt)
        plan = engine.scheduler.plan()
        cached = plan.rows[0].start
        assert cached == (16 if name in "de" else 0), name
        engine.scheduler.apply(plan, engine.run(plan))
        engine.finish()


@pytest.mark.parametrize("seed", range(tiers.amount(4, 200)))
def test_random_traffic_keeps_every_row_with_its_adapter(seed):
    draw = random.Random(seed)
    engine = Engine(slots=draw.choice([1, 2, 3]), max_seqs=draw.choice([2, 6]), blocks=40)
    count = 60
    for i in range(count):
        adapter = draw.choice([None, *"vwxyz"])
        prompt = [draw.choice([1, 2])] * draw.randint(1, 30)
        engine.add(str(i), adapter, prompt, draw.randint(1, 20), n=draw.choice([1, 1, 3]))
        for _ in range(draw.randint(0, 4)):
            engine.step()
        if draw.random() < 0.1:
            engine.scheduler.abort(str(draw.randint(0, i)))
        if draw.random() < 0.05 and not engine.scheduler.idle:
            engine.scheduler.fail_step(engine.scheduler.plan())
            engine.slots.clear()
    engine.finish()
    assert not engine.provider.holds
    assert not engine.limit._live
    assert not engine.limit._refused
    assert not engine.limit._started


def test_decoding_takes_the_fast_path_while_all_running_adapters_have_slots(monkeypatch):
    calls, general = [], Scheduler._schedule_sequence
    monkeypatch.setattr(
        Scheduler, "_schedule_sequence", lambda *a: (calls.append(a[1].request.id), general(*a))[1]
    )
    engine = Engine(slots=2)
    for name, adapter in [("a", "x"), ("b", None), ("c", "y"), ("d", "x"), ("e", "waits")]:
        engine.add(name, adapter, prompt=(1, 2, 3, 4), tokens=4)
    engine.step()  # prompts
    calls.clear()
    assert engine.step() == ["a", "b", "c", "d"]
    assert calls == ["a", "b", "c", "d"]  # the token that opens a block
    calls.clear()
    assert engine.step() == ["a", "b", "c", "d"]
    assert calls == []
    engine.finish()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(tiers.amount(6, 200)))
def test_the_fast_path_plans_what_the_general_rule_would(seed):
    logs = []
    for fast in (True, False):
        draw = random.Random(seed)
        engine = Engine(slots=draw.choice([1, 2, 3]), blocks=draw.choice([16, 40]), depth=2)
        engine.limit.free_decode_rows = engine.limit.free_decode_rows if fast else int
        log = []
        for i in range(40):
            prompt = [draw.choice([1, 2])] * draw.randint(1, 30)
            adapter = draw.choice([None, *"wxyz"])
            engine.add(str(i), adapter, prompt, draw.randint(1, 20), n=draw.choice([1, 1, 3]))
            log += [engine.step() for _ in range(draw.randint(0, 4))]
            if draw.random() < 0.1:
                engine.scheduler.abort(str(draw.randint(0, i)))
        while not engine.scheduler.idle:
            log.append((engine.step(), dict(engine.slots)))
        logs.append(log)
    assert logs[0] == logs[1]


def test_no_row_is_free_while_running_adapters_outnumber_the_slots():
    """A sequence that another limit skips for a step still runs, and another adapter has started."""
    limit, rows = AdapterLimit(2, Provider()), {}
    for name in "xyz":
        ref = AdapterRef(name, name.encode())
        asked = Request(name, (1, 2), StopConditions(max_tokens=9), adapter=ref)
        rows[name] = Sequence(asked, 0, [1, 2], ())
        limit.request(rows[name].request)
    free = []
    for step in ("xy", "xz", "xy"):
        limit.begin_step(3)
        free.append(limit.free_decode_rows() > 0)
        for name in step:
            assert limit.allow(rows[name], 1) == 1
            limit.take(rows[name], 1)
        limit.plan_part()
    assert free == [True, True, False]
    limit.release(rows["z"].request)
    assert limit.free_decode_rows() > 0

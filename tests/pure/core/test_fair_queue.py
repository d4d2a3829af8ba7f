"""Fair queue: service by weight, no starvation, no credit for idleness, the order in a tenant."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.scheduling.limits.base import by_contract
from quire.core.scheduling.limits.max_seqs import MaxSeqsLimit
from quire.core.scheduling.limits.tenant_kv_quota import TenantKVQuota
from quire.core.scheduling.limits.token_budget import TokenBudget
from quire.core.scheduling.order.fair import OUTPUT_COST, FairQueue
from quire.core.scheduling.order.fifo import Fifo
from quire.core.scheduling.order.priority import Priority
from quire.core.scheduling.scheduler import Scheduler
from quire.core.tenant_limits import TenantLimits
from quire.core.types import Request, SequenceState, StepResult, StopConditions, Wants
from tests.pure.core.builders import sequence
from tests.pure.core.workload import BlockPool, KVCache

BUDGET, MAX_PROMPT, MAX_OUTPUT, MAX_SEQS = 32, 24, 8, 6
BOUND = 2 * (MAX_SEQS * (MAX_PROMPT + OUTPUT_COST * MAX_OUTPUT))
"""Backlogged tenants differ by at most twice the service of all running sequences."""


class TenantSimulation:
    """A scheduler with a fair queue whose model samples one token a row. service: by tenant."""

    def __init__(self, *, max_seqs=MAX_SEQS, blocks=400, inner=Fifo, caching=False):
        self.order = FairQueue(inner)
        kv = KVCache(BlockPool(blocks), 4, prefix_caching=caching)
        limits = [
            TenantKVQuota(self.order, blocks, kv.max_blocks),
            *(TokenBudget(BUDGET), MaxSeqsLimit(max_seqs)),
        ]
        self.scheduler = Scheduler(
            kv, self.order, **by_contract(limits), max_seqs=max_seqs, max_len=400
        )
        self.service, self.first, self.steps, self.num_requests = {}, [], 0, 0

    def add(self, tenant, prompt=8, output=4, weight=1.0, tokens=None, **fields):
        name = f"{tenant.decode()}{self.num_requests}"
        self.num_requests += 1
        ids = tuple(tokens or (self.num_requests * 100 + i for i in range(prompt)))
        tenant_limits = TenantLimits(weight=weight)
        req = Request(
            name, ids, StopConditions(output), tenant=tenant, tenant_limits=tenant_limits, **fields
        )
        self.scheduler.add(req)
        return name

    def step(self):
        plan = self.scheduler.plan()
        for row in plan.rows:
            tenant = row.seq.request.tenant
            prompt = max(min(row.start + row.count, row.seq.prompt_len) - row.start, 0)
            cost = prompt + OUTPUT_COST * (row.wants is Wants.TOKEN)
            self.service[tenant] = self.service.get(tenant, 0.0) + cost
        result = StepResult([(7,) if row.wants is Wants.TOKEN else () for row in plan.rows])
        for update in self.scheduler.apply(plan, result):
            if update.request_id not in self.first:
                self.first.append(update.request_id)
        self.steps += 1

    def waiting(self, tenant):
        return sum(seq.request.tenant == tenant for seq in self.order)


def run_backlogged(sim, rng, tenants, steps):
    """Run steps while each tenant always has waiting requests."""
    for _ in range(steps):
        for tenant, weight in tenants.items():
            while sim.waiting(tenant) < 3:
                prompt, output = rng.randint(1, MAX_PROMPT), rng.randint(1, MAX_OUTPUT)
                sim.add(tenant, prompt, output, weight)
        sim.step()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), num_tenants=st.integers(2, 4))
def test_backlogged_tenants_get_equal_service_within_a_bound(seed, num_tenants):
    sim, rng = TenantSimulation(), random.Random(seed)
    tenants = dict.fromkeys([b"a", b"b", b"c", b"d"][:num_tenants], 1.0)
    for _ in range(6):
        run_backlogged(sim, rng, tenants, 40)
        service = [sim.service[one] for one in tenants]
        assert max(service) - min(service) <= BOUND


@pytest.mark.parametrize("weight", [2.0, 5.0])
def test_service_is_proportional_to_weight(weight):
    sim, rng = TenantSimulation(), random.Random(3)
    run_backlogged(sim, rng, {b"a": weight, b"b": 1.0}, 800)
    assert sim.service[b"a"] / sim.service[b"b"] == pytest.approx(weight, rel=0.15)


def test_the_first_request_of_another_tenant_overtakes_a_long_queue():
    sim = TenantSimulation(max_seqs=2)
    for _ in range(500):
        sim.add(b"a", 20, 8)
    for _ in range(30):
        sim.step()
    name, before = sim.add(b"b"), len(sim.first)
    while name not in sim.first:
        sim.step()
    assert sim.first.index(name) - before <= 2


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_waiting_request_is_served_within_a_bound(seed):
    """A waiting request runs after a bounded amount of service of others."""
    sim, rng = TenantSimulation(max_seqs=3), random.Random(seed)
    tenants = [b"a", b"b", b"c"]
    name, served = sim.add(b"z", 10, 2), 0.0
    while name not in sim.first:
        for tenant in tenants:
            while sim.waiting(tenant) < 2:
                sim.add(tenant, rng.randint(1, MAX_PROMPT), rng.randint(1, MAX_OUTPUT))
        sim.step()
        served = sum(sim.service.values())
        assert served < 4 * BOUND, "the request starves"


def test_an_idle_tenant_gets_no_credit():
    sim, rng = TenantSimulation(), random.Random(1)
    run_backlogged(sim, rng, {b"a": 1.0}, 5)
    sim.add(b"b")
    run_backlogged(sim, rng, {b"a": 1.0}, 400)
    before = dict(sim.service)
    run_backlogged(sim, rng, {b"a": 1.0, b"b": 1.0}, 200)
    gained = {one: sim.service[one] - before[one] for one in before}
    assert abs(gained[b"a"] - gained[b"b"]) <= BOUND


def test_excess_service_remains_after_idleness():
    order = FairQueue(Fifo)
    a, b, c = (tenant_seq(name) for name in (b"a", b"b", b"c"))
    order.push(a)
    order.push(b)
    assert order.pop() is a
    a.planned, a.state = 3, SequenceState.RUNNING
    order.charge_service()
    before_idle = order.virtual_counter(b"a")
    a.state = SequenceState.FINISHED
    order.charge_service()
    order.push(tenant_seq(b"a"))
    assert order.virtual_counter(b"a") == before_idle > order.virtual_counter(b"b")
    order.push(c)
    assert order.virtual_counter(b"c") == order.virtual_counter(b"b")


def tenant_seq(tenant, tokens=3, **fields):
    req = sequence(prompt=range(tokens), **fields)
    req.request = Request(
        f"{tenant}{id(req)}", tuple(range(tokens)), StopConditions(4), tenant=tenant
    )
    return req


def test_prefix_cache_hits_are_not_charged():
    sim = TenantSimulation(caching=True)
    shared = tuple(range(1, 25))
    sim.add(b"b", tokens=(9, 9))
    for _ in range(4):
        sim.add(b"a", tokens=shared, output=1)
        for _ in range(3):
            sim.step()
    sim.order.charge_service()
    assert sim.order.virtual_counter(b"a") < 24 + 4 * (4 + OUTPUT_COST) + 10


def test_requests_of_one_step_are_charged():
    sim = TenantSimulation()
    sim.add(b"b")
    sim.step()
    for _ in range(5):
        sim.add(b"a", 20, 1)
        sim.step()
    sim.order.charge_service()
    assert sim.order.virtual_counter(b"a") >= 5 * (20 + OUTPUT_COST)


def test_a_requeued_sequence_that_never_ran_is_not_charged():
    order = FairQueue(Fifo)
    a, b = tenant_seq(b"a", 50), tenant_seq(b"b", 50)
    order.push(a)
    order.push(b)
    seq = order.pop()
    assert order.virtual_counter(b"a") == 50
    order.requeue(seq)
    assert order.virtual_counter(b"a") == 0


def test_recomputation_after_preemption_is_not_charged():
    order = FairQueue(Fifo)
    a, b = tenant_seq(b"a", 50), tenant_seq(b"b", 50)
    order.push(a)
    order.push(b)
    assert order.pop() is a
    a.planned, a.state = 50, SequenceState.RUNNING
    order.charge_service()
    a.planned, a.state = 0, SequenceState.WAITING
    order.requeue(a)
    assert order.virtual_counter(b"a") == 50
    assert order.pop() is b
    assert order.pop() is a
    a.planned, a.state = 50, SequenceState.RUNNING
    order.charge_service()
    assert order.virtual_counter(b"a") == 50


@pytest.mark.parametrize("inner", [Fifo, Priority])
@given(
    entries=st.lists(
        st.tuples(st.integers(-2, 2), st.integers(0, 3), st.integers(0, 2)),
        unique=True,
        max_size=12,
    ),
    data=st.data(),
)
def test_the_order_within_one_tenant_is_the_inner_order(inner, entries, data):
    fair, plain = FairQueue(inner), inner()
    for i, (priority, at, index) in enumerate(entries):
        seq = sequence(id=f"r{i}", priority=priority, arrived_at=float(at), index=index)
        back = data.draw(st.booleans())
        for queue in (fair, plain):
            (queue.requeue if back else queue.push)(seq)
        if data.draw(st.booleans()):
            assert fair.pop() is plain.pop()
        assert list(fair) == list(plain)
    running = dict.fromkeys(plain)
    if running:
        assert fair.choose_victim(running) is plain.choose_victim(running)
    assert [fair.pop() for _ in range(len(fair))] == [plain.pop() for _ in range(len(plain))]


tenants = st.sampled_from([b"a", b"b", b"c"])


@given(names=st.lists(tenants, max_size=14), data=st.data())
def test_each_sequence_is_popped_once_in_iteration_order(names, data):
    order, queued = FairQueue(Fifo), []
    for name in names:
        seq = tenant_seq(name, data.draw(st.integers(1, 9)))
        order.push(seq)
        queued.append(seq)
        action = data.draw(st.sampled_from(["push", "remove", "pop", "bar"]))
        if action == "remove":
            removed = data.draw(st.sampled_from(queued))
            order.remove(removed)
            queued.remove(removed)
        elif action == "pop":
            shown = list(order)
            assert order.pop() is shown[0]
            queued.remove(shown[0])
        elif action == "bar":
            order.deprioritize(data.draw(st.sets(tenants)))
        assert len(order) == len(queued)
        assert set(order) == set(queued)
    shown = list(order)
    assert [order.pop() for _ in shown] == shown


def test_the_victim_is_of_the_largest_tenant_but_not_the_oldest():
    order = FairQueue(Fifo)
    req = [tenant_seq(name, tables=1) for name in (b"a", b"b", b"b", b"a")]
    for seq, blocks in zip(req, (50, 4, 4, 1)):
        seq.tables = (list(range(blocks)),)
        order.push(seq)
    running = dict.fromkeys(req)
    assert order.choose_victim(running) is req[3]
    del running[req[3]]
    assert order.choose_victim(running) is req[2]


def test_priorities_apply_within_a_tenant():
    order = FairQueue(Priority)
    low, high = tenant_seq(b"a"), tenant_seq(b"a")
    other = tenant_seq(b"b")
    for seq, priority in ((low, 5), (high, -5), (other, 9)):
        fields = dict(priority=priority, tenant=seq.request.tenant)
        seq.request = Request(seq.request.id, (1, 2, 3), StopConditions(1), **fields)
        order.push(seq)
    assert [order.pop() for _ in range(3)] == [high, other, low]


def test_idle_tenants_above_max_tenants_are_dropped(monkeypatch):
    monkeypatch.setattr("quire.core.scheduling.order.fair.MAX_TENANTS", 10)
    order = FairQueue(Fifo)
    for i in range(50):
        seq = tenant_seq(b"%d" % i)
        order.push(seq)
        order.pop()
        seq.state = SequenceState.FINISHED
        order.charge_service()
    assert len(order._tenants) <= 12

"""Turns between tenants: equal service, nobody starves, no credit for the past, one tenant is fifo."""

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
from tests.pure.core.made import sequence
from tests.pure.core.workload import BlockPool, KVCache

BUDGET, MOST_PROMPT, MOST_OUTPUT, SEATS = 32, 24, 8, 6
BOUND = 2 * (SEATS * (MOST_PROMPT + OUTPUT_COST * MOST_OUTPUT))
"""Two that always wait differ by what may be aboard, twice over."""


class Loop:
    """A scheduler under Fair whose model says one token a row; who was given what."""

    def __init__(self, *, seats=SEATS, blocks=400, inner=Fifo, caching=False):
        self.order = FairQueue(inner)
        kv = KVCache(BlockPool(blocks), 4, prefix_caching=caching)
        limits = [
            TenantKVQuota(self.order, blocks, kv.max_blocks),
            *(TokenBudget(BUDGET), MaxSeqsLimit(seats)),
        ]
        self.scheduler = Scheduler(
            kv, self.order, **by_contract(limits), max_seqs=seats, max_len=400
        )
        self.given, self.first, self.steps, self.made = {}, [], 0, 0

    def add(self, tenant, prompt=8, output=4, weight=1.0, tokens=None, **fields):
        name = f"{tenant.decode()}{self.made}"
        self.made += 1
        ids = tuple(tokens or (self.made * 100 + i for i in range(prompt)))
        terms = TenantLimits(weight=weight)
        made = Request(
            name, ids, StopConditions(output), tenant=tenant, tenant_limits=terms, **fields
        )
        self.scheduler.add(made)
        return name

    def step(self):
        plan = self.scheduler.plan()
        for row in plan.rows:
            tenant = row.seq.request.tenant
            prompt = max(min(row.start + row.count, row.seq.prompt_len) - row.start, 0)
            cost = prompt + OUTPUT_COST * (row.wants is Wants.TOKEN)
            self.given[tenant] = self.given.get(tenant, 0.0) + cost
        result = StepResult([(7,) if row.wants is Wants.TOKEN else () for row in plan.rows])
        for update in self.scheduler.apply(plan, result):
            if update.request_id not in self.first:
                self.first.append(update.request_id)
        self.steps += 1

    def waiting(self, tenant):
        return sum(seq.request.tenant == tenant for seq in self.order)


def keep_waiting(loop, rng, tenants, steps):
    """Steps while each of the tenants always has somebody waiting."""
    for _ in range(steps):
        for tenant, weight in tenants.items():
            while loop.waiting(tenant) < 3:
                prompt, output = rng.randint(1, MOST_PROMPT), rng.randint(1, MOST_OUTPUT)
                loop.add(tenant, prompt, output, weight)
        loop.step()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), many=st.integers(2, 4))
def test_tenants_that_always_wait_are_served_alike_within_a_bound(seed, many):
    loop, rng = Loop(), random.Random(seed)
    tenants = dict.fromkeys([b"a", b"b", b"c", b"d"][:many], 1.0)
    for _ in range(6):
        keep_waiting(loop, rng, tenants, 40)
        given = [loop.given[one] for one in tenants]
        assert max(given) - min(given) <= BOUND


@pytest.mark.parametrize("weight", [2.0, 5.0])
def test_service_goes_by_weight(weight):
    loop, rng = Loop(), random.Random(3)
    keep_waiting(loop, rng, {b"a": weight, b"b": 1.0}, 800)
    assert loop.given[b"a"] / loop.given[b"b"] == pytest.approx(weight, rel=0.15)


def test_however_much_one_sends_the_first_of_another_goes_next():
    loop = Loop(seats=2)
    for _ in range(500):
        loop.add(b"a", 20, 8)
    for _ in range(30):
        loop.step()
    name, before = loop.add(b"b"), len(loop.first)
    while name not in loop.first:
        loop.step()
    assert loop.first.index(name) - before <= 2


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_nobody_starves(seed):
    """Whatever comes, who waits is aboard after as much service as there is before its turn."""
    loop, rng = Loop(seats=3), random.Random(seed)
    tenants = [b"a", b"b", b"c"]
    name, served = loop.add(b"z", 10, 2), 0.0
    while name not in loop.first:
        for tenant in tenants:
            while loop.waiting(tenant) < 2:
                loop.add(tenant, rng.randint(1, MOST_PROMPT), rng.randint(1, MOST_OUTPUT))
        loop.step()
        served = sum(loop.given.values())
        assert served < 4 * BOUND, "it waits and waits"


def test_who_was_idle_gets_no_credit_for_the_past():
    loop, rng = Loop(), random.Random(1)
    keep_waiting(loop, rng, {b"a": 1.0}, 5)
    loop.add(b"b")
    keep_waiting(loop, rng, {b"a": 1.0}, 400)
    before = dict(loop.given)
    keep_waiting(loop, rng, {b"a": 1.0, b"b": 1.0}, 200)
    gained = {one: loop.given[one] - before[one] for one in before}
    assert abs(gained[b"a"] - gained[b"b"]) <= BOUND


def test_who_had_too_much_is_not_forgiven_for_a_moment_of_idleness():
    order = FairQueue(Fifo)
    a, b, c = (tenant_seq(name) for name in (b"a", b"b", b"c"))
    order.push(a)
    order.push(b)
    assert order.pop() is a
    a.planned, a.state = 3, SequenceState.RUNNING
    order.charge_service()
    spent = order.virtual_counter(b"a")
    a.state = SequenceState.FINISHED
    order.charge_service()
    order.push(tenant_seq(b"a"))
    assert order.virtual_counter(b"a") == spent > order.virtual_counter(b"b")
    order.push(c)
    assert order.virtual_counter(b"c") == order.virtual_counter(b"b")


def tenant_seq(tenant, tokens=3, **fields):
    made = sequence(prompt=range(tokens), **fields)
    made.request = Request(
        f"{tenant}{id(made)}", tuple(range(tokens)), StopConditions(4), tenant=tenant
    )
    return made


def test_what_the_cache_had_is_free():
    loop = Loop(caching=True)
    shared = tuple(range(1, 25))
    loop.add(b"b", tokens=(9, 9))
    for _ in range(4):
        loop.add(b"a", tokens=shared, output=1)
        for _ in range(3):
            loop.step()
    loop.order.charge_service()
    assert loop.order.virtual_counter(b"a") < 24 + 4 * (4 + OUTPUT_COST) + 10


def test_what_is_over_within_a_step_is_paid_for_too():
    loop = Loop()
    loop.add(b"b")
    loop.step()
    for _ in range(5):
        loop.add(b"a", 20, 1)
        loop.step()
    loop.order.charge_service()
    assert loop.order.virtual_counter(b"a") >= 5 * (20 + OUTPUT_COST)


def test_who_was_let_in_for_nothing_pays_nothing():
    order = FairQueue(Fifo)
    a, b = tenant_seq(b"a", 50), tenant_seq(b"b", 50)
    order.push(a)
    order.push(b)
    seq = order.pop()
    assert order.virtual_counter(b"a") == 50
    order.requeue(seq)
    assert order.virtual_counter(b"a") == 0


def test_computing_again_after_a_preemption_costs_the_tenant_nothing():
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
def test_of_one_tenant_the_order_is_the_inner_one(inner, entries, data):
    fair, plain = FairQueue(inner), inner()
    for i, (priority, at, index) in enumerate(entries):
        seq = sequence(id=f"r{i}", priority=priority, arrived_at=float(at), index=index)
        back = data.draw(st.booleans())
        for queue in (fair, plain):
            (queue.requeue if back else queue.push)(seq)
        if data.draw(st.booleans()):
            assert fair.pop() is plain.pop()
        assert list(fair) == list(plain)
    everybody = dict.fromkeys(plain)
    if everybody:
        assert fair.choose_victim(everybody) is plain.choose_victim(everybody)
    assert [fair.pop() for _ in range(len(fair))] == [plain.pop() for _ in range(len(plain))]


tenants = st.sampled_from([b"a", b"b", b"c"])


@given(names=st.lists(tenants, max_size=14), data=st.data())
def test_everybody_who_goes_in_comes_out_once_and_in_the_order_that_was_shown(names, data):
    order, inside = FairQueue(Fifo), []
    for name in names:
        seq = tenant_seq(name, data.draw(st.integers(1, 9)))
        order.push(seq)
        inside.append(seq)
        what = data.draw(st.sampled_from(["push", "remove", "pop", "bar"]))
        if what == "remove":
            gone = data.draw(st.sampled_from(inside))
            order.remove(gone)
            inside.remove(gone)
        elif what == "pop":
            shown = list(order)
            assert order.pop() is shown[0]
            inside.remove(shown[0])
        elif what == "bar":
            order.deprioritize(data.draw(st.sets(tenants)))
        assert len(order) == len(inside)
        assert set(order) == set(inside)
    shown = list(order)
    assert [order.pop() for _ in shown] == shown


def test_memory_is_taken_from_who_holds_most_but_not_from_the_eldest():
    order = FairQueue(Fifo)
    made = [tenant_seq(name, tables=1) for name in (b"a", b"b", b"b", b"a")]
    for seq, blocks in zip(made, (50, 4, 4, 1)):
        seq.tables = (list(range(blocks)),)
        order.push(seq)
    running = dict.fromkeys(made)
    assert order.choose_victim(running) is made[3]
    del running[made[3]]
    assert order.choose_victim(running) is made[2]


def test_with_priorities_they_count_within_a_tenant():
    order = FairQueue(Priority)
    low, high = tenant_seq(b"a"), tenant_seq(b"a")
    other = tenant_seq(b"b")
    for seq, priority in ((low, 5), (high, -5), (other, 9)):
        fields = dict(priority=priority, tenant=seq.request.tenant)
        seq.request = Request(seq.request.id, (1, 2, 3), StopConditions(1), **fields)
        order.push(seq)
    assert [order.pop() for _ in range(3)] == [high, other, low]


def test_tenants_without_anybody_here_are_forgotten_when_there_are_many(monkeypatch):
    monkeypatch.setattr("quire.core.scheduling.order.fair.MAX_TENANTS", 10)
    order = FairQueue(Fifo)
    for i in range(50):
        seq = tenant_seq(b"%d" % i)
        order.push(seq)
        order.pop()
        seq.state = SequenceState.FINISHED
        order.charge_service()
    assert len(order._tenants) <= 12

"""Rows with drafts yield any number of tokens, and the output does not change."""

from __future__ import annotations

import random
from itertools import chain

import pytest

from quire.core.accounting.time_accounting import TimeAccounting
from quire.core.types import Pooling, Request, SequenceState, StepResult, StopConditions, Wants
from quire.engine.core.engine_core import EngineCore
from quire.errors import TooLong
from quire.executors.fake import Executor
from tests import tiers
from tests.pure.core.builders import request
from tests.pure.core.workload import (
    Run,
    Setup,
    check_outcome,
    ngram,
    oracle,
    random_aborts,
    random_requests,
    random_setup,
    with_drafts,
)

pytestmark = pytest.mark.sampled(3)


@pytest.mark.parametrize("seed", range(tiers.amount(30, 400)))
def test_drafts_do_not_change_the_output(seed):
    rng = random.Random(f"with drafts {seed}")
    requests = random_requests(rng)
    setup = with_drafts(rng, random_setup(rng, requests))
    if rng.random() < 0.3:
        setup.aborts = random_aborts(rng, requests)
    run = Run(setup, requests)
    check_outcome(run, run.run())


def test_stops_within_accepted_drafts_end_the_sequence():
    accepted, stopped = set(), 0
    for seed in range(40):
        rng = random.Random(f"accepted {seed}")
        requests = random_requests(rng)
        setup = Setup(drafts=4, proposer=oracle((None,), 0.2), depth=rng.choice([1, 2]))
        run = Run(setup, requests)
        out = run.run()
        check_outcome(run, out)
        accepted |= set(run.model.accepted)
        stopped += list(out.finish.values()).count("stop")
    assert accepted == {0, 1, 2, 3, 4}
    assert stopped > 40


@pytest.mark.parametrize("model_proposes", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_accepted_drafts_save_steps(depth, model_proposes):
    def steps(drafts):
        setup = Setup(
            drafts=drafts, proposer=oracle((None,), 0), model_proposes=model_proposes, depth=depth
        )
        run = Run(setup, [request("r", range(9), 61)])
        out = run.run()
        check_outcome(run, out)
        return out.steps

    assert steps(0) > 60
    assert steps(4) < 45


@pytest.mark.parametrize("host", [0, 80])
@pytest.mark.parametrize("windows", [(None,), (6, None)])
def test_drafts_survive_preemption_prefix_hits_and_chunks(windows, host):
    requests = [Request(f"r{i}", (*range(6), i % 2), StopConditions(60)) for i in range(6)]
    setup = Setup(blocks=30 * len(windows), windows=windows, host=host, budget=12)
    setup.drafts, setup.proposer = 3, oracle(windows, 0.2)
    run = Run(setup, requests)
    out = run.run(add_per_step=1)
    check_outcome(run, out)
    assert out.preemptions > 0
    assert run.scheduler.stats().prefix_hit_tokens > 0
    assert {0, 1, 2, 3} == set(run.model.accepted)


def started(setup, *requests):
    """Return a run whose requests have their first token."""
    run = Run(setup, requests)
    for one in requests:
        run.add(one)
    while not all(chain(run.out.tokens.values())):
        run.step()
    return run


def test_drafts_do_not_preempt_and_do_not_exceed_the_budget():
    """Two sequences need a block for their drafts each, and none is free."""
    setup = Setup(blocks=2, drafts=3, proposer=lambda seq, tokens: (0, 0, 0), prefix_caching=False)
    run = started(setup, request("a", (1, 2), 6), request("b", (1, 2), 6))
    plan = run.scheduler.plan()
    assert [(row.count, row.drafts) for row in plan.rows] == [(1, 0), (1, 0)]
    assert not plan.preempted
    setup = Setup(budget=5, drafts=3, proposer=lambda seq, tokens: (0, 0, 0))
    run = started(setup, request("a", (1, 2), 9), request("b", (1, 2), 9))
    plan = run.scheduler.plan()
    assert [(row.count, row.drafts) for row in plan.rows] == [(4, 3), (1, 0)]
    assert plan.num_drafts == 3


def test_drafts_of_a_row_do_not_exceed_its_remaining_tokens():
    run = started(Setup(drafts=8, proposer=oracle((None,), 0)), request("a", (1, 2), 4))
    (row,) = run.scheduler.plan().rows
    assert row.drafts == 2


def test_a_row_with_drafts_is_applied_before_the_next_is_planned():
    run = started(
        Setup(depth=2, drafts=2, proposer=lambda seq, tokens: (0,)), request("a", (1,), 9)
    )
    while run.in_flight:
        run._record(run._result(run.in_flight.pop(0)))
    first = run.scheduler.plan()
    assert first.rows[0].drafts == 1
    assert not run.scheduler.plan().rows


def test_blocks_of_rejected_drafts_are_not_cached():
    """The second of two full blocks has drafts that are wrong from its second token on."""
    setup = Setup(block_size=4, drafts=8, proposer=oracle((None,), 0), budget=100)
    run = started(setup, request("a", (1, 2, 3), 20))
    while run.scheduler._running and len(next(iter(run.scheduler._running)).tokens) < 5:
        run.step()
    (seq,) = run.scheduler._running
    plan = run.scheduler.plan()
    (row,) = plan.rows
    good, at = seq.drafts, row.start + 1
    assert row.drafts > 3
    run.scheduler.apply(plan, StepResult([(*good[:2], (good[2] + 1) % 6)]))
    assert (seq.computed, seq.planned, len(seq.tokens)) == (at + 2, at + 2, at + 3)
    full = seq.computed // 4
    assert len(seq.keys) == full < len(seq.tables[0])
    assert [run.kv.pool.key_of(b) is not None for b in seq.tables[0]].count(True) == full


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_row_without_a_token_is_computed_again(depth, drafts):
    for seed in range(tiers.amount(8, 40)):
        rng = random.Random(f"none {seed}")
        requests = random_requests(rng)
        setup = random_setup(rng, requests)
        setup.depth, setup.skips = depth, rng
        if drafts:
            setup.drafts, setup.proposer = drafts, oracle(setup.windows, 0.3)
        run = Run(setup, requests)
        check_outcome(run, run.run())


def test_the_fake_executor_accepts_drafts_too():
    """Uses the engine's step with a counting model: every third token is 0."""

    def next_token(tokens):
        return len(tokens) % 3

    def outputs(**more):
        scheduler, _, _ = Setup(**more).build()
        engine = EngineCore(scheduler, Executor(next_token), check=True)
        engine.add(request("a", (1, 2, 0, 1), 20))
        engine.add(request("b", (1, 2), 9))
        found = {}
        while not engine.idle:
            for update in engine.step():
                found.setdefault(update.request_id, []).extend(update.token_ids)
        return found, engine.snapshot().counters

    plain, before = outputs()
    drafted, after = outputs(drafts=3, proposer=ngram)
    assert plain == drafted
    assert after.steps < before.steps
    assert after.generated_tokens == before.generated_tokens == 29
    assert sum(after.inter_token_times) == sum(before.inter_token_times) == 27


def test_time_is_accounted_for_rows_that_yield_no_token():
    now = [0.0]
    accounting = TimeAccounting(lambda: now[0])
    run = Run(Setup(), [])
    one = request("a", (1, 2, 3), 2)
    run.scheduler.add(one)
    accounting.add_request(one)
    ends = []
    for tokens in ((), (5,), (), (6,)):
        accounting.enter_step()
        plan = run.scheduler.plan()
        accounting.record_plan(plan)
        now[0] += 1.0
        updates = run.scheduler.apply(plan, StepResult([tokens]))
        ends += accounting.record_result(updates, 1.0)
        accounting.leave_step()
        accounting.check(sum(1 for _ in run.scheduler.sequences()))
    timing = ends[-1].timing
    assert (timing.first_token_at, timing.prefill, timing.decode) == (2.0, 2.0, 2.0)
    assert (accounting.counters().steps, accounting.counters().generated_tokens) == (4, 2)


def test_a_pooling_request_yields_one_result_and_no_token():
    run = Run(Setup(budget=4, depth=2), [])
    run.scheduler.add(request("a", range(10), 1, pooling=Pooling("embed")))
    run.scheduler.add(request("b", range(3), 2))
    updates, wants = [], []
    while run.in_flight or not run.scheduler.idle:
        plan = run.scheduler.plan()
        run.model.submit(plan)
        wants += [row.wants for row in plan.rows if row.seq.request.id == "a"]
        updates += run.scheduler.apply(plan, run.model.wait())
        run.scheduler.check()
    assert wants == [Wants.NOTHING, Wants.NOTHING, Wants.POOLED]
    (mine,) = [update for update in updates if update.request_id == "a"]
    assert (mine.pooled.data, mine.finish, mine.token_ids) == (bytes(range(10)), "stop", ())
    assert [u.finish for u in updates if u.request_id == "b"] == [None, "length"]
    assert run.kv.pool.available == run.kv.pool.size


def test_a_pooling_request_may_be_as_long_as_a_sequence():
    run = Run(Setup(), [], max_len=8)
    run.scheduler.add(request("a", range(8), 1, pooling=Pooling("embed")))
    with pytest.raises(TooLong):
        run.scheduler.add(request("b", range(9), 1, pooling=Pooling("embed")))
    with pytest.raises(TooLong):
        run.scheduler.add(request("c", range(8), 1))
    (row,) = run.scheduler.plan().rows
    assert (row.wants, row.seq.state) == (Wants.POOLED, SequenceState.RUNNING)

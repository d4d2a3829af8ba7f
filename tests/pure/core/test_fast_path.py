"""The fast paths of plan() and apply() give the results of the general rule."""

from __future__ import annotations

import random

import pytest

from quire.core.scheduling.limits.token_budget import TokenBudget
from quire.core.scheduling.plan_builder import StepBudgets
from quire.core.scheduling.scheduler import Scheduler
from tests import tiers
from tests.pure.core.builders import request
from tests.pure.core.workload import (
    Run,
    Setup,
    VaryingMaxSeqsLimit,
    random_aborts,
    random_requests,
    random_setup,
)


class NoFreeRows(TokenBudget):
    """Has no free decode rows, so every row is planned with allow()."""

    def free_decode_rows(self):
        return 0


def without_fast_paths(run):
    """Disable the fast paths of a run."""
    scheduler = run.scheduler
    scheduler._budgets = StepBudgets([*scheduler._budgets.all, NoFreeRows(10**9)])
    scheduler._slow_rows = lambda flight, result: set(range(len(flight.plan.rows)))
    return run


def recorded(run):
    """Record all plans and updates of a run as plain values."""
    log, scheduler = [], run.scheduler
    plan, apply = scheduler.plan, scheduler.apply

    def planned():
        made = plan()
        rows = [
            (r.seq.request.id, r.seq.index, r.seq.slot, r.start, r.count, r.wants)
            for r in made.rows
        ]
        tables = [[list(t) for t in r.seq.tables] for r in made.rows]
        log.append((made.step, rows, tables, made.leaves, made.swap_out, made.swap_in, made.copies))
        log.append([(s.request.id, s.index) for s in (*made.joins, *made.changed_tables)])
        return made

    def applied(made, result):
        updates = apply(made, result)
        log.append([(u[:2], tuple(u.token_ids), *u[3:]) for u in updates])
        log.append([(s.computed, s.planned, tuple(s.tokens)) for s in scheduler._running])
        return updates

    scheduler.plan, scheduler.apply = planned, applied
    run.run()
    return log


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(tiers.amount(20, 400)))
def test_the_fast_paths_agree_with_the_general_rule(seed):
    rng = random.Random(f"fast {seed}")
    requests = random_requests(rng)
    setup = random_setup(rng, requests)
    setup.aborts = random_aborts(rng, requests)
    assert recorded(Run(setup, requests)) == recorded(without_fast_paths(Run(setup, requests)))


def test_a_last_token_of_a_prompt_leaves_none_for_it_on_the_fast_path():
    test_the_fast_paths_agree_with_the_general_rule(216)  # shortest prompts first


def test_decoding_takes_the_fast_paths(monkeypatch):
    from tests.pure.core.builders import request

    calls = []
    for name in ("_schedule_sequence", "_apply_row"):
        general = getattr(Scheduler, name)
        monkeypatch.setattr(
            Scheduler, name, lambda *a, _n=name, _g=general: (calls.append(_n), _g(*a))[1]
        )
    requests = [request(f"r{i}", (i, 1, 2), 29) for i in range(4)]
    from tests.pure.core.workload import Setup

    Run(Setup(block_size=16), requests).run(add_per_step=9)
    # each: a prompt, the token that opens the second block, the last one
    assert calls.count("_schedule_sequence") == 4
    assert calls.count("_apply_row") == 4 * 3


@pytest.mark.parametrize("drafting", [0, 2])
def test_rows_of_one_token_stay_within_the_budgets_also_behind_rows_with_drafts(drafting):
    """What is free is asked for again behind each row with drafts, and is taken only later."""
    propose = lambda seq, tokens: (1, 1) if int(seq.request.id) < drafting else ()  # noqa: E731
    setup = Setup(slots=12, drafts=2, proposer=propose, varying_max_seqs=True)
    scheduler, _, model = setup.build()
    (limit,) = [one for one in scheduler._budgets.all if isinstance(one, VaryingMaxSeqsLimit)]
    for i in range(12):
        scheduler.add(request(str(i), (5,), 30))
    full = drafts = 0
    while not scheduler.idle:
        plan = scheduler.plan()
        assert len(plan.rows) <= limit.max_seqs
        full += len(plan.rows) == limit.max_seqs
        drafts += plan.num_drafts
        model.submit(plan)
        scheduler.apply(plan, model.wait())
    assert full > 20
    assert bool(drafts) == bool(drafting)

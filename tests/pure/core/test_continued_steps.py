"""Steps that are planned behind drafts which are not verified yet: the output does not change."""

from __future__ import annotations

import random

import pytest

from quire.core.types import StopConditions, Wants
from tests import tiers
from tests.pure.core.builders import request
from tests.pure.core.workload import (
    Run,
    Setup,
    check_outcome,
    oracle,
    random_aborts,
    random_requests,
    random_setup,
    with_grammars,
)

BLOCKS = 400


def watched(setup, requests):
    """Return a run, and the list of its plans that continue another."""
    run, found = Run(setup, requests), []
    plan = run.scheduler.plan

    def note():
        planned = plan()
        if planned.continues:
            found.append(planned)
        return planned

    run.scheduler.plan = note
    return run, found


def continuing(rng, requests):
    """Return a random setup in which steps may continue others."""
    setup = random_setup(rng, requests)
    setup.depth, setup.model_proposes = 2, True
    setup.budget, setup.chunked, setup.max_rows = rng.choice([30, 1000]), True, 64
    setup.chunk_cap = setup.partial = 0
    setup.blocks += rng.choice([0, BLOCKS, BLOCKS])
    setup.slots = rng.choice([3, 64])
    setup.drafts, setup.adaptive = rng.choice([1, 3, 7]), rng.random() < 0.3
    setup.proposer = oracle(setup.windows, rng.choice([0.05, 0.3, 0.6]))
    return setup


@pytest.mark.parametrize("seed", [*range(tiers.amount(40, 600)), 680, 718])
def test_the_output_does_not_change(seed):
    rng = random.Random(f"continued {seed}")
    requests = random_requests(rng, most=6)
    setup = continuing(rng, requests)
    if rng.random() < 0.3:
        setup.aborts = random_aborts(rng, requests)
    if rng.random() < 0.3:
        requests = with_grammars(rng, requests, setup)
    if rng.random() < 0.3:
        setup.skips = rng
    if rng.random() < 0.3:
        setup.errors = frozenset(rng.sample(range(2, 30), 3))
        setup.fails = frozenset(rng.sample(range(2, 30), 2))
    run, _ = watched(setup, requests)
    check_outcome(run, run.run())


@pytest.mark.parametrize("windows", [(None,), (6, None)])
def test_most_steps_continue_and_sequences_end_at_different_times(windows):
    setup = Setup(
        depth=2, drafts=3, proposer=oracle(windows, 0.2), model_proposes=True, windows=windows
    )
    ends = [30, 47, 61, 90]
    run, found = watched(setup, [request(f"r{i}", range(5 + i), n) for i, n in enumerate(ends)])
    out = run.run()
    check_outcome(run, out)
    assert len(found) > 0.6 * out.steps
    assert {len(plan.rows) for plan in found} == {1, 2, 3, 4}
    assert any(plan.continues != tuple(range(len(plan.rows))) for plan in found)
    assert {0, 1, 2, 3} == set(run.model.accepted)
    ends = [(row.start, row.seq.max_len) for plan in found for row in plan.rows]
    assert all(start + 1 < end for start, end in ends), "its last token was in flight"
    freed = any(plan.changed_tables for plan in found)
    assert freed == (6 in windows), "blocks outside of the window"


def test_prompts_have_their_rows_behind_those_that_continue():
    setup = Setup(
        depth=2, drafts=3, proposer=oracle((None,), 0.2), model_proposes=True, budget=24,
        chunked=True, blocks=BLOCKS, slots=2,
    )  # fmt: skip
    work = [request("a", range(5), 80), request("long", range(90), 30), request("b", range(40), 9)]
    run, found = watched(setup, work)
    plans, plan = {}, run.scheduler.plan

    def note():
        planned = plan()
        plans[planned.step] = planned
        return planned

    run.scheduler.plan = note
    check_outcome(run, run.run())
    beside = [row for one in found for row in one.rows[len(one.continues) :]]
    assert sum(row.wants is Wants.NOTHING for row in beside) > 2
    assert any(one.joins for one in found), "a prompt begins beside"
    before = [plans[one.step - 1].rows[place] for one in found for place in one.continues]
    assert any(row.count > 1 + row.drafts for row in before), "a first token is continued"


def test_parts_of_a_prompt_alone_are_drafted_behind_by_none_and_awaited_by_none():
    setup = Setup(
        depth=2, drafts=3, proposer=oracle((None,), 0.2), model_proposes=True, budget=24,
        chunked=True,
    )  # fmt: skip
    run, _ = watched(setup, [request("a", range(90), 5)])
    run.add(run.requests[0])
    for _ in range(2):
        plan = run.scheduler.plan()
        assert [row.wants for row in plan.rows] == [Wants.NOTHING]
        assert plan.proposals == 0
        assert not run.scheduler.awaits_result


def test_rows_have_blocks_for_the_furthest_place_where_they_may_begin():
    """Blocks of one token; all drafts are right, so each row begins as far as it can."""
    setup = Setup(
        depth=2, drafts=3, proposer=oracle((None,), 0.0), model_proposes=True, block_size=1
    )
    one = request("a", range(5), stop=StopConditions(60))
    run, found = watched(setup, [one])
    check_outcome(run, run.run())
    assert len(found) > 5


def test_a_step_waits_where_blocks_are_short():
    setup = Setup(
        depth=2, drafts=3, proposer=oracle((None,), 0.1), model_proposes=True, block_size=1,
        blocks=70, prefix_caching=False,
    )  # fmt: skip
    run, found = watched(setup, [request(f"r{i}", range(5), 60) for i in range(2)])
    out = run.run()
    check_outcome(run, out)
    assert found
    assert out.preemptions

"""The output does not depend on the engine's configuration. workload.py has what varies."""

from __future__ import annotations

import random

import pytest

from quire.core.types import Request, StopConditions
from tests import tiers
from tests.pure.core.workload import (
    Run,
    Setup,
    check_outcome,
    random_beams,
    random_recurrent_run,
    random_requests,
    random_run,
    random_run_without_kv,
    random_squeeze,
)

pytestmark = pytest.mark.sampled(3)


@pytest.mark.parametrize("seed", range(tiers.amount(40, 400)))
def test_output_does_not_depend_on_the_engine_configuration(seed):
    random_run(seed)


@pytest.mark.parametrize("seed", range(tiers.amount(30, 400)))
def test_pooled_results_beside_tokens_are_of_the_whole_prompt(seed):
    random_run(seed, pooled=0.5)


def staged_run(seed):
    more = {"drafts": 0, "proposer": None} if seed % 2 else {}
    random_run(seed, stages=2 + seed % 3, depth=1 + seed % 5, model_proposes=False, **more)


@pytest.mark.parametrize("seed", range(tiers.amount(20, 400)))
def test_output_does_not_depend_on_the_number_of_pipeline_stages(seed):
    staged_run(seed)


@pytest.mark.parametrize("seed", [83, 162, 172])
def test_none_starts_while_a_running_sequence_waits_for_blocks(seed):
    """In these runs it would take them, be preempted for them, and start again, for ever."""
    staged_run(seed)


@pytest.mark.parametrize("seed", range(tiers.amount(30, 400)))
def test_without_kv_each_prompt_is_one_row(seed):
    random_run_without_kv(seed)


@pytest.mark.parametrize("seed", range(tiers.amount(40, 400)))
def test_beams_generate_the_tokens_of_separate_requests(seed):
    random_beams(seed)


@pytest.mark.parametrize("seed", range(tiers.amount(30, 400)))
def test_repeated_preemption_does_not_change_the_output(seed):
    random_squeeze(seed)


@pytest.mark.parametrize("seed", range(tiers.amount(60, 600)))
def test_recurrent_states_follow_their_sequences(seed):
    random_recurrent_run(seed)


@pytest.mark.parametrize("seed", range(tiers.amount(20, 200)))
def test_recurrent_beams_and_preempted_sequences_start_from_checkpoints(seed):
    random_beams(seed, recurrent=True)
    random_squeeze(seed, recurrent=True)


@pytest.mark.parametrize("host", [0, 40])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (6, None)])
@pytest.mark.parametrize("priority", [False, True])
def test_no_kind_of_preemption_changes_the_output(host, depth, windows, priority):
    requests = [
        Request(f"r{i}", (*range(6), i), StopConditions(30), priority=-i if priority else 0)
        for i in range(6)
    ]
    setup = Setup(blocks=30, windows=windows, host=host, depth=depth, priority=priority, budget=40)
    run = Run(setup, requests)
    out = run.run()
    check_outcome(run, out)
    assert out.preemptions > 0
    assert (out.loads > 0) == (host > 0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (5,), (5, None)])
def test_siblings_share_the_prompt_and_copy_on_write(depth, windows):
    request = Request("r", tuple(i % 6 for i in range(22)), StopConditions(10), n=5, seed=3)
    run = Run(Setup(blocks=60, windows=windows, depth=depth), [request])
    out = run.run()
    check_outcome(run, out)
    assert out.copies == 4 * len(windows)


def test_a_repeated_prompt_hits_the_prefix_cache():
    requests = [
        Request(f"r{i}", tuple(i % 5 for i in range(21)), StopConditions(3)) for i in range(3)
    ]
    run = Run(Setup(max_rows=1, slots=1), requests)
    out = run.run(add_per_step=1)
    check_outcome(run, out)
    stats = run.scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (63, 40)


def test_without_prefix_caching_there_are_no_hits():
    requests = [Request(f"r{i}", (1, 2, 3, 4, 5, 0, 1), StopConditions(3)) for i in range(3)]
    run = Run(Setup(max_rows=1, prefix_caching=False), requests)
    check_outcome(run, run.run())
    assert run.scheduler.stats().prefix_hit_tokens == 0


def test_aborts_do_not_change_other_outputs():
    rng = random.Random(7)
    requests = random_requests(rng, most=14)
    aborts = {i + 2: [r.id] for i, r in enumerate(requests) if i % 2}
    run = Run(Setup(blocks=40, budget=20, aborts=aborts, depth=2), requests)
    check_outcome(run, run.run())


class FailingLoads(Run):
    """Makes the first steps with loads raise."""

    def __init__(self, setup, requests, fails=1):
        super().__init__(setup, requests)
        self.fails = fails

    def _check_plan(self, plan):
        super()._check_plan(plan)
        if plan.swap_in and self.fails:
            self.fails -= 1
            self.setup.fails |= {plan.step}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (6, None)])
def test_siblings_do_not_read_blocks_that_a_failed_step_did_not_load(depth, windows):
    head = tuple(i % 5 for i in range(16))
    others = [Request(f"o{i}", (5, i % 6, i // 6, *head), StopConditions(1)) for i in range(9)]
    requests = [
        Request("a", (*head, 1), StopConditions(2)),
        *others,
        Request("b", (*head, 1), StopConditions(6), n=3),
        Request("c", (*head, 2), StopConditions(6)),
    ]
    setup = Setup(blocks=24 * len(windows), windows=windows, host=80, depth=depth, slots=1)
    run = FailingLoads(setup, requests)
    for one in requests:
        run.add(one)
        if one.n == 1:
            while not run.scheduler.idle or run.in_flight:
                run.step()
    run.requests = []
    run.run()
    run.requests = requests
    check_outcome(run, run.out)
    assert run.out.loads
    assert not run.fails


def conversations(**setup):
    """Run conversations in turns, each turn longer than the one before. Returns the stats."""
    rng = random.Random(5)
    run = Run(Setup(slots=4, **setup), [])
    prompts = [tuple(rng.randrange(6) for _ in range(20)) for _ in range(12)]
    for turn in range(4):
        requests = [Request(f"{turn}-{i}", p, StopConditions(9)) for i, p in enumerate(prompts)]
        for one in requests:
            run.add(one)
        while not run.scheduler.idle or run.in_flight:
            run.step()
        run.requests += requests
        prompts = [p + tuple(run.out.tokens[f"{turn}-{i}", 0]) for i, p in enumerate(prompts)]
    stats = run.scheduler.stats()
    run.close()
    check_outcome(run, run.out)
    return stats


@pytest.mark.parametrize("windows", [(None,), (5, None), *tiers.long(((5,),), ((None, 7, 2),))])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_working_set_above_device_memory_hits_the_host_tier(depth, windows):
    kind = {"windows": windows, "depth": depth}
    small = 20 if windows == (5,) else 40 * len(windows)  # a window keeps few blocks of each
    alone = conversations(blocks=small, **kind)
    endless = conversations(blocks=2000, **kind)
    stats = conversations(blocks=small, host=1000, **kind)
    found = stats.prefix_hit_tokens + stats.tier_hit_tokens
    assert found >= 0.95 * endless.prefix_hit_tokens
    assert found > 1.2 * alone.prefix_hit_tokens
    assert stats.tier_hit_tokens > 100
    assert stats.tier_query_tokens == stats.prefix_query_tokens - stats.prefix_hit_tokens

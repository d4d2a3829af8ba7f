"""One scheduler for several data-parallel ranks, each with its own slots and blocks."""

from array import array

import pytest

from quire.core.accounting.snapshot_builder import _block_owners
from quire.core.kv.block_pool import BlockState
from quire.core.step_results import combine_results
from quire.core.types import Request, StepResult, StopConditions, TokenLogprobs
from tests import tiers
from tests.pure.core.builders import request
from tests.pure.core.workload import (
    Run,
    Setup,
    random_beams,
    random_run,
    random_squeeze_of_ranks,
)

pytestmark = pytest.mark.sampled(4)

SEEDS = range(tiers.amount(25, 400))


@pytest.mark.parametrize("seed", SEEDS)
def test_output_does_not_depend_on_the_number_of_ranks(seed):
    random_run(seed, ranks=2 + seed % 3)


@pytest.mark.parametrize("seed", SEEDS)
def test_repeated_preemption_on_ranks_does_not_change_the_output(seed):
    random_squeeze_of_ranks(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_beams_stay_where_their_blocks_are(seed):
    random_beams(seed, ranks=2)


def requests(number, length=8, max_tokens=6):
    return [
        Request(f"r{i}", tuple((i + j) % 6 for j in range(length)), StopConditions(max_tokens))
        for i in range(number)
    ]


def test_equal_requests_are_spread_evenly():
    run = Run(Setup(ranks=4, prefix_caching=False), requests(512, max_tokens=2))
    run.setup.slots = run.setup.max_rows = 200
    run.scheduler, run.kv, run.model = run.setup.build()
    for one in run.requests:
        run.add(one)
    plan = run.scheduler.plan()
    per_rank = [len(own.rows) for own in plan.dp_plans]
    assert sum(per_rank) == 4 * 125, "budgets of 1000 tokens each"
    assert max(per_rank) - min(per_rank) <= 2


def ranks_of(run, *ids):
    groups = run.scheduler._registry.groups
    return [[seq.dp_rank for seq in groups[id].sequences] for id in ids]


def test_a_prompt_starts_where_its_prefix_is_cached():
    run = Run(Setup(ranks=2, block_size=4), [])
    long = tuple(i % 5 for i in range(200))
    for name, prompt in (("a", long), ("b", (5, 5, 5)), ("c", (*long, 1))):
        run.add(request(name, prompt=prompt, max_tokens=40))
        run.step()
    assert ranks_of(run, "a", "b", "c") == [[0], [1], [0]]
    assert run.scheduler.stats().prefix_hit_tokens == 200


def test_siblings_and_children_run_on_the_rank_of_their_parent():
    run = Run(Setup(ranks=2, block_size=4), [])
    run.add(request("other", prompt=(5,) * 9, max_tokens=40))
    run.step()
    run.add(request("n", prompt=(1, 2, 3, 4, 5, 1), max_tokens=40, n=5, hold=True))
    for _ in range(4):
        run.step()
    run.add(request("child", prompt=(1, 2, 3, 4, 5, 1, 2), max_tokens=4, parent="n"))
    run.step()
    assert ranks_of(run, "other", "n", "child") == [[0], [1] * 5, [1]]


def test_a_sequence_that_waits_for_its_rank_keeps_it_from_others_and_leaves_them_the_rest():
    """A fork cannot start: its rank has no slot. Those behind it start on the other rank."""
    run = Run(Setup(ranks=2, slots=2), [])
    run.add(request("a", prompt=(1, 2, 3, 4), max_tokens=9, n=3))
    for _ in range(3):
        run.step()
    assert [seq.slot >= 0 for seq in run.scheduler._registry.groups["a"].sequences].count(False)
    run.add(request("b", prompt=(5,), max_tokens=9))
    run.step()
    ((on,),) = ranks_of(run, "b")
    assert on != ranks_of(run, "a")[0][0]
    while not run.scheduler.idle:
        run.step()


def test_a_rank_preempts_its_own_sequences_only():
    run = Run(Setup(ranks=2, blocks=6, block_size=4, prefix_caching=False), [])
    for name, length, most in (("a", 9, 8), ("b", 12, 4), ("c", 9, 8), ("d", 4, 4)):
        run.add(request(name, prompt=(1,) * length, max_tokens=most))
        run.step()
    assert ranks_of(run, "a", "b", "c", "d") == [[0], [1], [0], [1]]
    preempted = set()
    while not run.scheduler.idle:
        run.step()
        preempted |= {seq.request.id for seq in run.scheduler.sequences() if seq.preemptions}
    assert preempted == {"c"}


def test_a_preempted_sequence_continues_at_once_where_there_is_space():
    run = Run(Setup(ranks=2, blocks=8, block_size=4, prefix_caching=False), [])
    for name, length, most in (("a", 9, 20), ("b", 12, 4), ("c", 9, 20)):
        run.add(request(name, prompt=(1,) * length, max_tokens=most))
        run.step()
    assert ranks_of(run, "a", "b", "c") == [[0], [1], [0]]
    while not (plan := run.scheduler.plan()).preempted:
        run.model.submit(plan)
        run._record(run.scheduler.apply(plan, run.model.wait()))
    assert plan.preempted == ("c",)
    assert run.scheduler._registry.groups["c"].leader.preemptions == 1
    assert [[seq.request.id for seq in own.joins] for own in plan.dp_plans] == [[], ["c"]]


def test_blocks_are_shown_rank_by_rank():
    run = Run(Setup(ranks=2, blocks=10, block_size=4), [])
    for name in ("a", "b"):
        run.add(request(name, prompt=(1,) * 9, max_tokens=9))
        run.step()
    assert ranks_of(run, "a", "b") == [[0], [1]]
    states = run.scheduler.block_map()
    owners = array("H", _block_owners(run.scheduler.sequences(), len(states), 2))
    assert [owners[:10].count(1), owners[10:].count(2)] == [3, 3]
    assert [one > 0 for one in owners] == [one >= BlockState.HELD for one in states]


def test_a_reset_is_of_all_ranks_or_none():
    run = Run(Setup(ranks=2), [])
    for name, max_tokens in (("ends", 1), ("runs", 9)):
        run.add(request(name, prompt=(4,) * 8, max_tokens=max_tokens, read_prefix_cache=False))
        run.step()
    cached = run.scheduler.stats().cached_blocks
    assert cached
    assert not run.scheduler.reset_prefix_cache()
    assert run.scheduler.stats().cached_blocks == cached


def test_a_dummy_step_computes_a_token_on_each_rank():
    scheduler, _, model = Setup(ranks=3).build()
    plan = scheduler.plan_dummy_step()
    assert [len(own.rows) for own in plan.dp_plans] == [1, 1, 1]
    model.submit(plan)
    assert len(model.wait().token_ids) == 3
    scheduler.finish_dummy_step(plan)
    scheduler.check()
    assert scheduler.stats().held_blocks == 0
    scheduler.add(request())
    assert sorted(map(len, (own.leaves for own in scheduler.plan().dp_plans))) == [1, 1, 1]


def test_results_of_ranks_are_one_result_in_rank_order():
    scored = [TokenLogprobs([7], [0.0], [1])]
    whole = combine_results(
        [
            StepResult([(1,), ()], errors={1: "a"}),
            StepResult([]),
            StepResult([(7,), (8,)], logprobs={0: scored}, errors={1: "b"}),
        ]
    )
    assert whole.token_ids == [(1,), (), (7,), (8,)]
    assert whole.errors == {1: "a", 3: "b"}
    assert whole.logprobs == {2: scored}

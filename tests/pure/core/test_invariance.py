"""The same tokens come out whatever the engine does inside. See workload.py for what varies."""

from __future__ import annotations

import random

import pytest

from quire.core.types import Request, StopConditions
from tests.pure.core.workload import (
    Run,
    Setup,
    check_outcome,
    random_beams,
    random_requests,
    random_run,
    random_squeeze,
)


@pytest.mark.parametrize("seed", range(120))
def test_output_does_not_depend_on_anything_inside_the_engine(seed):
    random_run(seed)


@pytest.mark.parametrize("seed", range(60))
def test_beams_say_what_they_would_say_alone(seed):
    random_beams(seed)


@pytest.mark.parametrize("seed", range(60))
def test_output_survives_being_preempted_over_and_over(seed):
    random_squeeze(seed)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (6, None)])
@pytest.mark.parametrize("priority", [False, True])
def test_output_survives_preemption_of_every_kind(swap, depth, windows, priority):
    requests = [
        Request(f"r{i}", (*range(6), i), StopConditions(30), priority=-i if priority else 0)
        for i in range(6)
    ]
    setup = Setup(
        blocks=30, windows=windows, swap=swap, host=40, depth=depth, priority=priority, budget=40
    )
    run = Run(setup, requests)
    out = run.go()
    check_outcome(run, out)
    assert out.preemptions > 0
    assert (out.swaps > 0) == swap


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (5,), (5, None)])
def test_siblings_share_the_prompt_and_copy_what_they_write(depth, windows):
    request = Request("r", tuple(i % 6 for i in range(22)), StopConditions(10), n=5, seed=3)
    run = Run(Setup(blocks=60, windows=windows, depth=depth), [request])
    out = run.go()
    check_outcome(run, out)
    assert out.copies == 4 * len(windows)


def test_a_repeated_prompt_is_found_in_the_prefix_cache():
    requests = [
        Request(f"r{i}", tuple(i % 5 for i in range(21)), StopConditions(3)) for i in range(3)
    ]
    run = Run(Setup(seats=1, slots=1), requests)
    out = run.go(add_per_step=1)
    check_outcome(run, out)
    stats = run.scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (63, 40)


def test_without_prefix_caching_nothing_is_found():
    requests = [Request(f"r{i}", (1, 2, 3, 4, 5, 0, 1), StopConditions(3)) for i in range(3)]
    run = Run(Setup(seats=1, prefix_caching=False), requests)
    check_outcome(run, run.go())
    assert run.scheduler.stats().prefix_hit_tokens == 0


def test_aborts_of_others_do_not_show():
    rng = random.Random(7)
    requests = random_requests(rng, most=14)
    aborts = {i + 2: [r.id] for i, r in enumerate(requests) if i % 2}
    run = Run(Setup(blocks=40, budget=20, aborts=aborts, depth=2), requests)
    check_outcome(run, run.go())

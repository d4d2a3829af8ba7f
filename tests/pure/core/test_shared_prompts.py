"""Prompts that begin alike and arrive together: the common blocks are computed once."""

import pytest

from quire.core.types import StepResult, Wants
from tests.pure.core.builders import request
from tests.pure.core.workload import Setup

COMMON = range(40)


def planned(requests, steps, *, before=lambda scheduler, step: None, **setup):
    """Rows (request, start, count) of each plan, two of which are in flight."""
    scheduler, _, _ = Setup(depth=2, least_shared=16, **setup).build()
    for one in requests:
        scheduler.add(one)
    plans, found = [], []
    for step in range(steps):
        before(scheduler, step)
        plan = scheduler.plan()
        if plan is not None:
            plans.append(plan)
            found.append([(row.seq.request.id, row.start, row.count) for row in plan.rows])
        if len(plans) == 2 or (plan is None and plans):
            oldest = plans.pop(0)
            ids = [(1,) if row.wants is Wants.TOKEN else () for row in oldest.rows]
            scheduler.apply(oldest, StepResult(ids))
        scheduler.check()
    return found


def prompts(count, **fields):
    return [request(name, [*COMMON, 50 + i], **fields) for i, name in enumerate("abcd"[:count])]


def test_the_first_computes_and_the_others_start_behind_it():
    first, *later = planned(prompts(3), 3)
    assert first == [("a", 0, 41)]
    starts = {row[0]: row[1:] for rows in later for row in rows if row[0] != "a"}
    assert starts == {"b": (40, 1), "c": (40, 1)}


def test_a_prompt_in_chunks_is_waited_for_to_its_end():
    found = planned(prompts(2), 8, budget=16)
    rows = [row for step in found for row in step]
    assert rows[:3] == [("a", 0, 16), ("a", 16, 16), ("a", 32, 9)]
    # it does not wait for the last 8 common tokens
    assert next(row for row in rows if row[0] == "b") == ("b", 32, 9)


def test_others_overtake_those_that_wait():
    (first, *_) = planned([*prompts(2), request("x", range(80, 90))], 1)
    assert first == [("a", 0, 41), ("x", 0, 10)]


@pytest.mark.parametrize(
    "fields",
    [{"salt": b"other"}, {"read_prefix_cache": False}, {"priority": -1}, {"prompt": range(15)}],
)
def test_what_has_no_use_of_it_does_not_wait(fields):
    prompt = fields.pop("prompt", [*COMMON, 60])
    late = fields.get("priority", 0) < 0
    found = planned([*prompts(1), request("other", prompt, **fields)], 1, priority=late)
    assert {row[0] for row in found[0]} == {"a", "other"} if not late else {"other"}


def test_if_the_first_ends_another_one_computes():
    def abort(scheduler, step):
        if step == 1:
            scheduler.abort("a")

    found = planned(prompts(3), 6, before=abort, budget=16)
    rows = [row for step in found for row in step if row[0] != "a"]
    assert rows[0] in {("b", 16, 16), ("b", 0, 16)}
    assert next(row for row in rows if row[0] == "c") == ("c", 32, 9)


@pytest.mark.parametrize(("count", "wait"), [(3, False), (4, False), (5, True)])
def test_many_wait_for_a_short_beginning_and_few_do_not(count, wait):
    """One block in common is half of what a sequence alone waits for: four must save it."""
    found = planned([request(f"{i}", [*range(8), 50 + i]) for i in range(count)], 4)
    started = [(f"{i}", 0, 9) for i in range(count)]
    if not wait:
        assert found[0] == started
        return
    assert found[0] == started[:1]
    rows = [row for step in found[1:] for row in step if row[0] != "0"]
    assert rows[: count - 1] == [(f"{i}", 8, 1) for i in range(1, count)]


@pytest.mark.parametrize("fields", [{"salt": b"other"}, {"read_prefix_cache": False}])
def test_those_that_could_not_use_a_short_beginning_do_not_count(fields):
    more = [fields if i > 2 else {} for i in range(5)]
    found = planned([request(f"{i}", [*range(8), 50 + i], **more[i]) for i in range(5)], 1)
    assert found == [[(f"{i}", 0, 9) for i in range(5)]]


def test_a_prompt_that_begins_otherwise_does_not_wait_with_them():
    odd = request("x", [7, *range(1, 8), 60])
    found = planned([*(request(f"{i}", [*range(8), 50 + i]) for i in range(5)), odd], 1)
    assert found == [[("0", 0, 9), ("x", 0, 9)]]


def test_prompts_are_hashed_when_a_plan_looks_at_them():
    scheduler, _, _ = Setup(least_shared=16, budget=16).build()
    seqs = [
        scheduler.add(request(name, range(20 * i, 20 * i + 16))) for i, name in enumerate("abc")
    ]
    assert not any(seq.keys for seq in seqs)
    scheduler.plan()
    assert [bool(seq.keys) for seq in seqs] == [True, False, False]

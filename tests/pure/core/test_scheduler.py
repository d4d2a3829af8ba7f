"""The scheduler: refusals, finish reasons, order, failures, counters."""

from __future__ import annotations

import logging

import pytest

from quire.core.kv.block_pool import BlockState
from quire.core.kv.kv_cache import KVCache
from quire.core.scheduling.limits.base import Admission, StepListener
from quire.core.scheduling.limits.max_seqs import MaxSeqsLimit
from quire.core.types import (
    UNKNOWN,
    SequenceState,
    StepResult,
    StopConditions,
    TokenLogprobs,
    Wants,
)
from quire.errors import NotFinite, RequestError, StepFailed, TooLong
from tests.pure.core.builders import FakeGrammars, fake_constraint, request
from tests.pure.core.workload import Run, Setup, check_outcome


def engine(requests=(), **setup):
    """Return a scheduler with queued requests."""
    more = setup.pop("limits", [])
    scheduler, _, _ = Setup(**setup, more=more).build()
    for one in requests:
        scheduler.add(one)
    return scheduler


def answer(plan, token=1, **extra):
    return StepResult([(token,) if row.wants is Wants.TOKEN else () for row in plan.rows], **extra)


def rows(plan):
    return [(row.seq.request.id, row.seq.index, row.start, row.count) for row in plan.rows]


def step(scheduler, token=1):
    plan = scheduler.plan()
    updates = scheduler.apply(plan, answer(plan, token))
    scheduler.check()
    return plan, updates


# -- refusals ---------------------------------------------------------------------------------


def test_a_request_that_never_fits_is_refused_with_numbers_and_options():
    scheduler = engine(blocks=3, block_size=4)
    scheduler.add(request("fits", prompt=range(8), max_tokens=5))
    with pytest.raises(TooLong, match=r"4 KV cache blocks of 4 tokens, and there are 3") as caught:
        scheduler.add(request("big", prompt=range(8), max_tokens=6))
    assert "num_gpu_blocks_override" in str(caught.value)
    assert "kv_cache_memory_bytes" in str(caught.value)
    assert caught.value.param == "max_tokens"


def test_a_window_makes_long_sequences_fit():
    scheduler = engine(blocks=3, block_size=4, windows=(5,))
    scheduler.add(request(prompt=range(100), max_tokens=100))


def test_a_prompt_as_long_as_the_model_is_refused():
    scheduler, _, _ = Setup().build(max_len=8)
    scheduler.add(request("fits", prompt=range(7), max_tokens=100))
    with pytest.raises(TooLong, match=r"context length is 8 tokens.*the prompt has 8 tokens"):
        scheduler.add(request("long", prompt=range(8)))


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"id": "old"}, "in use"),
        ({"prompt": ()}, "at least 1"),
        ({"n": 0}, "at least 1"),
        ({"max_tokens": 0}, "at least 1"),
        ({"parent": "nobody"}, "hold=True"),
        ({"parent": "old"}, "hold=True"),
    ],
)
def test_a_malformed_request_is_refused(fields, what):
    scheduler = engine([request("old")])
    with pytest.raises(RequestError, match=what):
        scheduler.add(request(**{"id": "new", **fields}))
    assert scheduler.stats().waiting == 1


def test_a_prompt_beyond_the_budget_is_refused_without_chunked_prefill():
    scheduler = engine(chunked=False, budget=10)
    with pytest.raises(TooLong, match="max_num_batched_tokens"):
        scheduler.add(request(prompt=range(11)))


# -- prompts and order ------------------------------------------------------------------------


def test_a_prompt_is_chunked_by_the_remaining_budget():
    scheduler = engine([request("a", range(9)), request("b", range(20, 29))], budget=6)
    assert rows(step(scheduler)[0]) == [("a", 0, 0, 6)]
    assert rows(step(scheduler)[0]) == [("a", 0, 6, 3), ("b", 0, 0, 3)]
    assert rows(step(scheduler)[0]) == [("a", 0, 9, 1), ("b", 0, 3, 5)]


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_whole():
    requests = [request("a", range(4)), request("b", range(20, 29)), request("c", range(1))]
    scheduler = engine(requests, budget=10, chunked=False)
    assert rows(step(scheduler)[0]) == [("a", 0, 0, 4)]
    assert rows(step(scheduler)[0]) == [("a", 0, 4, 1), ("b", 0, 0, 9)]


def test_short_prompts_overtake_waiting_long_ones():
    requests = [request("a", range(30)), request("b", range(30)), request("c", range(3))]
    scheduler = engine(requests, budget=12, chunk_cap=5, long=(1, 10))
    assert rows(step(scheduler)[0]) == [("a", 0, 0, 5), ("c", 0, 0, 3)]


def test_several_prompts_may_be_partial_at_once():
    requests = [request(c, range(30)) for c in "abc"]
    scheduler = engine(requests, budget=12, chunk_cap=5)
    assert rows(step(scheduler)[0]) == [("a", 0, 0, 5), ("b", 0, 0, 5), ("c", 0, 0, 2)]


def test_the_priority_queue_orders_by_priority_and_fifo_ignores_it():
    requests = [request("a", priority=1), request("b", priority=0)]
    assert rows(step(engine(requests, slots=1, priority=True))[0])[0][0] == "b"
    assert rows(step(engine(requests, slots=1))[0])[0][0] == "a"


def test_slots_are_assigned_and_returned():
    scheduler = engine([request(c, max_tokens=1) for c in "abc"], slots=2)
    plan, _ = step(scheduler)
    assert sorted(seq.slot for seq in plan.joins) == [-1, -1]  # both have ended
    assert len(plan.rows) == 2
    plan = scheduler.plan()
    assert sorted(plan.leaves) == [0, 1]
    assert [seq.slot in (0, 1) for seq in plan.joins] == [True]


# -- preemption -------------------------------------------------------------------------------


def preempting_scheduler(**setup):
    """Return a scheduler with two sequences that fit until they grow."""
    scheduler = engine(
        [request("a", range(4), 8), request("b", range(10, 14), 8)], blocks=4, block_size=4, **setup
    )
    plans = []
    while not scheduler.idle:
        plans.append(step(scheduler)[0])
    return scheduler, plans


def test_the_youngest_is_preempted_and_none_is_admitted_meanwhile():
    _, plans = preempting_scheduler()
    [plan] = [plan for plan in plans if plan.preempted]
    assert plan.preempted == ("b",)
    assert not plan.joins
    assert len(plan.leaves) == 1


def test_a_preempted_sequence_loads_what_the_device_evicted():
    scheduler, plans = preempting_scheduler(host=4)
    stored = {c.dst for plan in plans for c in plan.swap_out}
    [back] = [plan for plan in plans if plan.swap_in]
    assert {c.src for c in back.swap_in} <= stored
    assert max(row.count for plan in plans[1:] for row in plan.rows) <= 4  # the last block
    assert scheduler.stats().preemptions == 1
    assert scheduler.stats().host_loaded_blocks == len(back.swap_in)


def test_preemption_is_logged_first_and_then_every_fiftieth_time(caplog):
    scheduler = engine(blocks=11, block_size=2)
    round_ = 0
    with caplog.at_level(logging.WARNING, logger="quire.core.scheduling.scheduler"):
        while scheduler.stats().preemptions < 101:
            round_ += 1
            for i in range(12):
                scheduler.add(request(f"r{round_}-{i}", (round_, i), 20))
            while not scheduler.idle:
                step(scheduler)
    assert len(caplog.records) == 1 + (scheduler.stats().preemptions - 1) // 50
    for text in ("num_gpu_blocks_override", "max_num_seqs", "so far: 51"):
        assert text in caplog.text


# -- ends -------------------------------------------------------------------------------------


def test_stop_tokens_and_length_end_a_sequence():
    stop = StopConditions(3, eos_ids=frozenset({7}), token_ids=frozenset({8}))
    scheduler = engine([request(c, stop=stop) for c in "abc"])
    plan = scheduler.plan()
    updates = scheduler.apply(plan, StepResult([(7,), (8,), (1,)]))
    assert [(u.token_ids, u.finish, u.stop_reason) for u in updates] == [
        ((7,), "stop", None),
        ((8,), "stop", 8),
        ((1,), None, None),
    ]
    step(scheduler)
    _, [last] = step(scheduler)
    assert last.finish == "length"
    assert scheduler.idle


def test_the_length_of_the_model_ends_a_sequence_too():
    scheduler, _, _ = Setup().build(max_len=5)
    scheduler.add(request(prompt=range(3), max_tokens=10))
    assert [u.finish for _ in range(2) for u in step(scheduler)[1]] == [None, "length"]


def test_tokens_after_the_last_one_are_dropped():
    scheduler = engine([request(stop=StopConditions(9, eos_ids=frozenset({7})))])
    scheduler.apply(scheduler.plan(), StepResult([(1, 2)]))
    plan = scheduler.plan()
    assert rows(plan) == [("r", 0, 3, 2)]
    logprobs = {0: [TokenLogprobs([t], [0.0], [1]) for t in (3, 7, 4)]}
    [update] = scheduler.apply(plan, StepResult([(3, 7, 4)], logprobs))
    assert (list(update.token_ids), update.finish) == ([3, 7], "stop")
    assert [p.ids for p in update.logprobs] == [[3], [7]]
    scheduler.check()


def test_abort_ends_all_sequences_of_a_request_in_any_state():
    scheduler = engine([request("a", range(20), n=3), request("b")], budget=5)
    step(scheduler)
    updates = scheduler.abort("a")
    assert [(u.index, u.finish) for u in updates] == [(0, "abort"), (1, "abort"), (2, "abort")]
    assert scheduler.abort("a") == []
    assert scheduler.abort("never was") == []
    scheduler.check()
    assert rows(step(scheduler)[0]) == [("b", 0, 0, 3)]


def test_a_sequence_aborted_with_a_step_in_flight_leaves_a_stale_row():
    scheduler = engine([request("a"), request("b")], depth=2)
    first = scheduler.plan()
    second = scheduler.plan()
    assert second.rows[0].seq.tokens[-2:] == [UNKNOWN, UNKNOWN]
    scheduler.abort("a")
    held = scheduler.stats().held_blocks
    assert held == 2, "its block may still be written"
    assert [u.request_id for u in scheduler.apply(first, answer(first))] == ["b"]
    assert [u.request_id for u in scheduler.apply(second, answer(second))] == ["b"]
    assert scheduler.stats().held_blocks == 1, "only b's is left"
    scheduler.check()


def test_silently_aborted_sequences_have_no_update():
    scheduler = engine([request(n=2, max_tokens=2)])
    step(scheduler)
    scheduler.abort_sequence("r", 0)
    scheduler.abort_sequence("r", 0)
    seen = [(u.index, u.finish) for _ in range(2) for u in step(scheduler)[1]]
    assert seen == [(1, None), (1, "length")]
    scheduler.abort_sequence("r", 1)
    assert scheduler.idle


def test_a_follower_becomes_leader_when_the_leader_ends():
    scheduler = engine([request(prompt=range(20), n=3)], budget=8)
    step(scheduler)
    scheduler.abort_sequence("r", 0)
    scheduler.check()
    assert rows(step(scheduler)[0]) == [("r", 1, 8, 8)]


def test_an_error_ends_its_row_only():
    scheduler = engine([request("a"), request("b")])
    plan = scheduler.plan()
    updates = scheduler.apply(plan, answer(plan, errors={0: "the mask allows no token"}))
    assert [(u.request_id, u.finish, u.error) for u in updates] == [
        ("a", "error", "the mask allows no token"),
        ("b", None, None),
    ]
    scheduler.check()
    assert scheduler.stats().cached_blocks == 0


def test_a_request_error_ends_its_row_as_the_requests_fault():
    scheduler = engine([request("a", max_tokens=9), request("b", max_tokens=9)])
    step(scheduler)
    plan = scheduler.plan()
    updates = scheduler.apply(plan, answer(plan, request_errors={1: "nothing is allowed"}))
    assert [(u.request_id, u.finish, u.fault) for u in updates] == [
        ("a", None, "engine"),
        ("b", "error", "request"),
    ]
    assert (updates[1].error, updates[1].token_ids) == ("nothing is allowed", ())
    scheduler.check()


def test_a_failed_step_requeues_all_in_order_and_keeps_their_output():
    scheduler = engine([request("a"), request("b", range(30))], budget=7, depth=2)
    first, second = scheduler.plan(), scheduler.plan()
    scheduler.add(request("c"))
    assert scheduler.fail_step(first) == (["a", "b"], None)
    assert scheduler.fail_step(second) == ([], None)
    scheduler.check()
    assert scheduler.stats().running == 0
    assert scheduler.stats().failed_steps == 1
    plan = scheduler.plan()
    assert [row[:3] for row in rows(plan)] == [row[:3] for row in rows(first)]
    assert len(plan.leaves) == 2


def test_only_the_culprit_of_a_limit_ends():
    class BlamingLimit(MaxSeqsLimit, StepListener):
        def observe_step_failure(self, rows):
            return rows[-1].request.id

    scheduler = engine([request("a"), request("b", n=3)], limits=[BlamingLimit(9)])
    step(scheduler)
    failed = scheduler.fail_step(scheduler.plan())
    assert failed.culprit == "b"
    updates = scheduler.fail_request("b", "device lost")
    assert [(u[:2], u.finish, u.fault) for u in updates] == [
        (("b", i), "error", "step") for i in range(3)
    ]
    assert isinstance(updates[0].to_exception(), StepFailed)
    scheduler.check()
    assert {row[0] for row in rows(step(scheduler)[0])} == {"a"}
    assert scheduler.stats().failed_requests == 1


def test_a_row_with_non_finite_logits_ends_and_its_blocks_are_not_hit():
    head = tuple(range(8))
    scheduler = engine([request("a", (*head, 9, 9, 9, 9, 9), 9)], block_size=4)
    step(scheduler)
    scheduler.add(request("b", (*head, 7, 7, 7, 7, 7), 9))
    step(scheduler)  # hits the two blocks of the head, and fills a third
    assert scheduler.stats().prefix_hit_tokens == 8
    plan = scheduler.plan()
    (update,) = [u for u in scheduler.apply(plan, answer(plan, non_finite={1: "nan"})) if u.finish]
    assert (update.request_id, update.fault) == ("b", "numbers")
    assert isinstance(update.to_exception(), NotFinite)
    scheduler.check()
    hits = scheduler.stats().prefix_hit_tokens
    scheduler.add(request("c", (*head, 7, 7, 7, 7, 7), 9))
    step(scheduler)
    assert scheduler.stats().prefix_hit_tokens == hits + 8  # blocks of a, but not of b
    assert scheduler.stats().corrupt_rows == 1


def test_blocks_read_by_two_non_finite_rows_are_not_hit():
    head = tuple(range(8))
    scheduler = engine([request("a", (*head, 9), 9)], block_size=4)
    step(scheduler)
    for name, hit in (("b", 8), ("c", 8), ("d", 0)):
        before = scheduler.stats().prefix_hit_tokens
        scheduler.add(request(name, (*head, 7), 9))
        plan = scheduler.plan()
        scheduler.apply(plan, answer(plan, non_finite={1: "nan"}))
        scheduler.check()
        assert scheduler.stats().prefix_hit_tokens - before == hit


def test_an_exception_in_one_result_ends_that_request(caplog, monkeypatch):
    scheduler = engine([request("a", max_tokens=9), request("b", max_tokens=9)])
    step(scheduler)
    publish = KVCache.cache_full_blocks

    def breaks(self, seq, since):
        if seq.request.id == "b":
            raise OverflowError("no number")
        publish(self, seq, since)

    monkeypatch.setattr(KVCache, "cache_full_blocks", breaks)
    plan = scheduler.plan()
    updates = scheduler.apply(plan, answer(plan, logprobs={0: [], 1: []}))
    assert [(u.request_id, u.finish) for u in updates] == [("a", None), ("b", "error")]
    assert "no number" in updates[1].error
    assert {row[0] for row in rows(step(scheduler)[0])} == {"a"}


def test_an_exception_at_admission_ends_that_request(caplog, monkeypatch):
    match = KVCache.match_prefix

    def breaks(self, seq, **how):
        if seq.request.id == "b":
            raise OverflowError("no number")
        match(self, seq, **how)

    monkeypatch.setattr(KVCache, "match_prefix", breaks)
    scheduler = engine([request("a", max_tokens=9), request("b"), request("c", max_tokens=9)])
    plan, updates = step(scheduler)
    assert {row[0] for row in rows(plan)} == {"a", "c"}
    assert [(u.request_id, u.finish) for u in updates if u.finish] == [("b", "error")]
    scheduler.check()


def test_an_exception_in_a_limit_refuses_the_request_and_leaves_no_state():
    removed = []

    class FirstAdmission(Admission):
        def remove_request(self, request):
            removed.append(request.id)

    class RaisingAdmission(Admission):
        def add_request(self, request):
            raise OSError("no room")

    scheduler = engine([], limits=[FirstAdmission(), RaisingAdmission()])
    with pytest.raises(OSError, match="no room"):
        scheduler.add(request("a"))
    assert removed == ["a"]
    assert scheduler.idle
    scheduler.check()


def test_a_dummy_step_leaves_no_state():
    scheduler = engine([request("a"), request("b")], depth=2)
    step(scheduler)
    scheduler.fail_step(scheduler.plan())
    plan = scheduler.plan_dummy_step()
    assert [(row.seq.request.id, row.count, row.wants) for row in plan.rows] == [
        ("", 1, Wants.TOKEN)
    ]
    assert plan.leaves
    scheduler.finish_dummy_step(plan)
    scheduler.check()
    after = scheduler.plan()
    assert after.step == plan.step + 1
    assert after.leaves == (plan.rows[0].seq.slot,)


def run_until(scheduler, found):
    """Return the first plan that the predicate accepts; apply those before it."""
    plan = scheduler.plan()
    while not found(plan):
        scheduler.apply(plan, answer(plan))
        plan = scheduler.plan()
    return plan


def test_stores_of_a_failed_step_are_recomputed():
    requests = [request("a", range(4), 8), request("b", range(10, 14), 8)]
    scheduler = engine(requests, blocks=4, block_size=4, host=4)
    scheduler.fail_step(run_until(scheduler, lambda plan: plan.swap_out))
    stats = scheduler.stats()
    assert (stats.held_host_blocks, stats.cached_host_blocks) == (0, 0)
    while not scheduler.idle:
        assert not step(scheduler)[0].swap_in


def test_loads_of_a_failed_step_are_not_cached():
    scheduler = engine([request("a", range(17), 1)], blocks=5, block_size=4, host=8)
    step(scheduler)
    scheduler.add(request("b", range(50, 67), 1))
    step(scheduler)
    scheduler.add(request("c", range(17), 1, n=2))
    plan = run_until(scheduler, lambda plan: plan.swap_in)
    loaded = len(plan.swap_in)
    assert loaded
    assert scheduler.stats().following == 0, "the siblings share what is loaded"
    scheduler.fail_step(plan)
    scheduler.check()
    plan, _ = step(scheduler)
    assert len(plan.swap_in) == loaded, "it is loaded again"
    while not scheduler.idle:
        step(scheduler)


def test_a_dummy_step_stores_nothing():
    """Its evicted block is overwritten before the next plan, which would copy it."""
    scheduler = engine([request("a", range(17), 1)], blocks=5, block_size=4, host=8)
    step(scheduler)
    scheduler.add(request("b", range(50, 66), 1))
    scheduler.apply(plan := scheduler.plan(), answer(plan))
    stored = scheduler.stats().host_stored_blocks
    scheduler.finish_dummy_step(scheduler.plan_dummy_step())
    scheduler.add(request("c", range(1), 1))
    assert not step(scheduler)[0].swap_out
    assert scheduler.stats().host_stored_blocks == stored


def test_contents_of_a_non_finite_row_are_not_on_the_host():
    scheduler = engine([request("a", range(17), 3)], blocks=6, block_size=4, host=8)
    step(scheduler)
    while not scheduler.idle:
        step(scheduler)
    scheduler.add(request("b", range(50, 70), 1))  # evicts a's
    step(scheduler)
    head = scheduler.stats().cached_host_blocks
    assert head
    for name, finds in (("c", True), ("d", True), ("e", False)):
        before = scheduler.stats().tier_hit_tokens + scheduler.stats().prefix_hit_tokens
        scheduler.add(request(name, range(17), 3))
        plan = scheduler.plan()
        scheduler.apply(plan, answer(plan, non_finite={0: "nan"}))
        scheduler.check()
        found = scheduler.stats().tier_hit_tokens + scheduler.stats().prefix_hit_tokens - before
        assert (found > 0) == finds, name


def test_a_reset_empties_the_host_too():
    scheduler = engine([request("a", range(17), 1)], blocks=5, block_size=4, host=8)
    step(scheduler)
    scheduler.add(request("b", range(50, 67), 1))
    step(scheduler)
    assert scheduler.stats().cached_host_blocks
    assert scheduler.reset_prefix_cache()
    assert scheduler.stats().cached_host_blocks == 0
    scheduler.add(request("a", range(17), 1))
    assert not step(scheduler)[0].swap_in


# -- steps in flight --------------------------------------------------------------------------


def test_no_row_is_planned_beyond_max_tokens():
    scheduler = engine([request(max_tokens=2)], depth=2)
    first, second = scheduler.plan(), scheduler.plan()
    assert rows(second) == [("r", 0, 3, 1)]
    scheduler.apply(first, answer(first))
    assert not scheduler.plan().rows
    assert scheduler.apply(second, answer(second))[0].finish == "length"


def test_steps_in_flight_are_bounded():
    scheduler = engine([request()])
    scheduler.plan()
    with pytest.raises(AssertionError, match="in flight already"):
        scheduler.plan()


def test_results_must_be_applied_in_plan_order():
    scheduler = engine([request()], depth=2)
    _, second = scheduler.plan(), scheduler.plan()
    with pytest.raises(AssertionError, match="step 2 before 1"):
        scheduler.apply(second, answer(second))


# -- forks and holds --------------------------------------------------------------------------


def test_siblings_share_the_prompt_except_its_last_token():
    scheduler = engine([request(prompt=range(10), n=3)])
    step(scheduler)
    plan = scheduler.plan()
    assert rows(plan) == [("r", 0, 10, 1), ("r", 1, 9, 1), ("r", 2, 9, 1)]
    tables = [seq.tables[0] for seq in (row.seq for row in plan.rows)]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert [c.src for c in plan.copies] == [tables[0][2]] * 2
    assert [c.dst for c in plan.copies] == [tables[1][2], tables[2][2]]


def test_a_child_shares_computed_tokens_of_its_held_parent():
    scheduler = engine([request("p", range(9), 1, hold=True)])
    step(scheduler, token=5)
    assert scheduler.idle
    held = scheduler.stats().held_blocks
    assert held == 3
    scheduler.add(request("c", (*range(9), 5), 1, parent="p"))
    scheduler.add(request("d", (*range(5), 7, 7, 7, 7), 1, parent="p"))
    plan, updates = step(scheduler)
    assert rows(plan) == [("c", 0, 9, 1), ("d", 0, 5, 4)]
    assert [u.cached_tokens for u in updates] == [9, 5]
    scheduler.release("p")
    scheduler.release("p")
    assert scheduler.stats().held_blocks == 0


def test_a_released_parent_is_refused():
    scheduler = engine([request("p", hold=True, max_tokens=1)])
    step(scheduler)
    scheduler.release("p")
    with pytest.raises(RequestError, match="released"):
        scheduler.add(request("c", parent="p"))


def test_a_request_released_before_its_end_is_removed_at_its_end():
    scheduler = engine([request("p", hold=True, max_tokens=2)])
    step(scheduler)
    scheduler.release("p")
    step(scheduler)
    assert scheduler.idle
    assert scheduler.stats().held_blocks == 0
    scheduler.add(request("p"))


def test_held_blocks_are_freed_for_running_sequences():
    scheduler = engine([request("p", range(7), 1, hold=True)], blocks=2, block_size=4)
    step(scheduler)
    scheduler.add(request("q", range(20, 26), 2))
    plan, _ = step(scheduler)
    assert rows(plan) == [("q", 0, 0, 6)]


# -- what it tells ----------------------------------------------------------------------------


def test_prompt_logprobs_come_once_with_the_first_token():
    def lp(row):
        return [
            TokenLogprobs([p], [0.0], [1])
            for p in range(row.start + 1, row.start + row.count + 1)
            if p < 9
        ]

    scheduler = engine([request(prompt=range(9), read_prefix_cache=False)], budget=4)
    given = []
    for _ in range(5):
        plan = scheduler.plan()
        [row] = plan.rows
        news = {0: lp(row)} if lp(row) else {}
        given += scheduler.apply(plan, answer(plan, prompt_logprobs=news))
    assert [p.ids[0] for p in given[0].prompt_logprobs] == list(range(1, 9))
    assert all(u.prompt_logprobs is None for u in given[1:])


def test_prompt_logprobs_of_a_recomputed_prompt_come_once():
    scheduler = engine(
        [request("a", range(4), 9), request("b", range(10, 19), 1)],
        blocks=4,
        block_size=4,
        budget=3,
    )
    generated = []
    while not scheduler.idle:
        plan = scheduler.plan()
        news = {
            i: [
                TokenLogprobs([p], [0.0], [1])
                for p in range(r.start + 1, min(r.start + r.count + 1, 9))
            ]
            for i, r in enumerate(plan.rows)
            if r.seq.request.id == "b" and r.start < 8
        }
        generated += [
            u
            for u in scheduler.apply(plan, answer(plan, prompt_logprobs=news))
            if u.request_id == "b"
        ]
    assert scheduler.stats().preemptions > 0
    [update] = generated
    assert [p.ids[0] for p in update.prompt_logprobs] == list(range(1, 9))


def test_stats_count_sequences_blocks_and_hits():
    scheduler = engine([request("a", range(9), n=2), request("b", range(9))], slots=1, blocks=20)
    step(scheduler)
    stats = scheduler.stats()
    assert (stats.running, stats.waiting) == (1, 2)
    assert (stats.held_blocks, stats.usage) == (3, 0.15)
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (9, 0)
    assert stats.held_blocks + stats.cached_blocks + stats.free_blocks == stats.blocks == 20


def test_the_block_map_has_the_state_of_each_block():
    scheduler = engine([request(prompt=range(9), n=2, max_tokens=3)], blocks=8)
    step(scheduler)
    step(scheduler)
    states = [BlockState(b).name for b in scheduler.block_map()]
    assert sorted(states) == ["FREE"] * 4 + ["HELD"] * 2 + ["SHARED"] * 2
    scheduler.abort("r")
    assert (
        sorted(BlockState(b).name for b in scheduler.block_map()) == ["CACHED"] * 2 + ["FREE"] * 6
    )


def test_the_prefix_cache_is_not_reset_while_blocks_are_in_use():
    scheduler = engine([request(prompt=range(9), max_tokens=2)])
    step(scheduler)
    assert not scheduler.reset_prefix_cache()
    step(scheduler)
    assert scheduler.stats().cached_blocks > 0
    assert scheduler.reset_prefix_cache()
    assert scheduler.stats().cached_blocks == 0
    scheduler.add(request("again", prompt=range(9), max_tokens=2))
    assert rows(step(scheduler)[0]) == [("again", 0, 0, 9)]


def test_changed_tables_has_running_sequences_whose_window_moved():
    run = Run(Setup(windows=(5,), block_size=2), [request(prompt=range(20), max_tokens=9)])
    run.add(run.requests[0])
    moved = []
    while not run.scheduler.idle:
        run.step()
        seq = next(iter(run.scheduler._running), None)
        moved.append(seq is not None and seq.tables[0].count(-1))
    assert max(moved) >= 10


def test_check_detects_a_sequence_in_the_wrong_state():
    scheduler = engine([request()])
    step(scheduler)
    next(iter(scheduler._running)).state = SequenceState.WAITING
    with pytest.raises(AssertionError):
        scheduler.check()


def test_a_watermark_keeps_blocks_free_for_running_sequences():
    requests = [request("a", range(4), 20), request("b", range(10, 14), 20)]
    assert len(step(engine(requests, blocks=10, watermark=0.0))[0].rows) == 2
    assert len(step(engine(requests, blocks=10, watermark=0.9))[0].rows) == 1
    run = Run(Setup(blocks=10, watermark=0.9), requests)
    check_outcome(run, run.run())


def ends(plan, reason, token=1):
    return answer(plan, token, finish_reasons=dict.fromkeys(range(len(plan.rows)), reason))


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_finish_reason_in_the_result_ends_the_row_with_its_token(reason):
    scheduler = engine([request("a", max_tokens=9)])
    step(scheduler)
    plan = scheduler.plan()
    [update] = scheduler.apply(plan, ends(plan, reason, 3))
    assert (update.token_ids, update.finish, update.stop_reason) == ((3,), reason, None)
    scheduler.check()
    assert scheduler.idle


def test_a_finish_reason_in_the_result_overrides_min_and_max_tokens():
    stop = StopConditions(1, min_tokens=9)
    scheduler = engine([request("a", stop=stop)])
    plan = scheduler.plan()
    [update] = scheduler.apply(plan, ends(plan, "stop"))
    assert update.finish == "stop"


def test_a_finish_reason_in_the_result_keeps_the_stop_token():
    scheduler = engine([request("a", stop=StopConditions(9, token_ids=frozenset({4})))])
    plan = scheduler.plan()
    [update] = scheduler.apply(plan, ends(plan, "length", 4))
    assert (update.finish, update.stop_reason, update.last_token_is_text) == ("stop", 4, False)


def test_a_finish_reason_in_the_result_sets_last_token_is_text():
    stop = StopConditions(9, min_tokens=5, eos_ids=frozenset({2}))
    scheduler = engine([request("a", stop=stop), request("b", stop=stop)])
    plan = scheduler.plan()
    updates = scheduler.apply(plan, StepResult([(2,), (3,)], finish_reasons={0: "stop", 1: "stop"}))
    assert [(u.finish, u.last_token_is_text) for u in updates] == [("stop", False), ("stop", True)]


def test_a_row_after_a_finish_reason_is_stale():
    scheduler = engine([request("a", range(5), 9)], depth=2)
    first = scheduler.plan()
    second = scheduler.plan()
    assert [u.finish for u in scheduler.apply(first, ends(first, "stop"))] == ["stop"]
    assert scheduler.apply(second, answer(second, 2)) == []
    scheduler.check()


def test_only_rows_with_a_finish_reason_leave_the_fast_path():
    scheduler = engine([request("a", max_tokens=9), request("b", max_tokens=9)])
    step(scheduler)
    plan = scheduler.plan()
    updates = scheduler.apply(plan, answer(plan, finish_reasons={1: "stop"}))
    assert [(u.request_id, u.finish) for u in updates] == [("a", None), ("b", "stop")]


# -- requests that are kept out of the queue ---------------------------------------------------


def test_requests_overtake_one_that_waits_for_resources():
    waiting = [request(f"w{i}", constraint=fake_constraint(9)) for i in range(200)]
    scheduler = engine([*waiting, request("plain")], grammars=FakeGrammars())
    assert rows(step(scheduler)[0]) == [("plain", 0, 0, 3)]
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.waiting_for_resources) == (1, 200, 200)


def test_a_scheduler_is_idle_while_all_wait_for_resources():
    grammars = FakeGrammars()
    scheduler = engine([request("a", constraint=fake_constraint(2), n=2)], grammars=grammars)
    assert (scheduler.idle, scheduler.any_waiting_for_resources, scheduler.has_ready) == (
        True,
        True,
        False,
    )
    grammars.tick(2)
    assert scheduler.has_ready
    assert scheduler.enqueue_ready() == (["a"], [])
    assert (scheduler.idle, scheduler.any_waiting_for_resources, scheduler.has_ready) == (
        False,
        False,
        False,
    )
    scheduler.check()


def test_a_failed_grammar_ends_all_sequences_of_that_request_only():
    grammars = FakeGrammars()
    bad = request("a", constraint=fake_constraint(1, fails=True), n=3)
    scheduler = engine([bad, request("b")], grammars=grammars)
    grammars.tick()
    queued, ended = scheduler.enqueue_ready()
    assert queued == []
    assert [(u.index, u.finish, u.error, u.fault) for u in ended] == [
        (i, "error", "no", "request") for i in range(3)
    ]
    assert rows(step(scheduler)[0]) == [("b", 0, 0, 3)]
    assert not +grammars.held


def test_a_request_in_resource_wait_can_be_aborted_whole_or_in_part():
    grammars = FakeGrammars()
    scheduler = engine(
        [
            request("a", constraint=fake_constraint(1), n=3),
            request("b", constraint=fake_constraint(1)),
        ],
        grammars=grammars,
    )
    scheduler.abort_sequence("a", 0)
    scheduler.check()
    assert [u.finish for u in scheduler.abort("b")] == ["abort"]
    scheduler.check()
    grammars.tick()
    assert scheduler.enqueue_ready().queued == ["a"]
    assert rows(step(scheduler)[0])[0] == ("a", 1, 0, 3)
    scheduler.abort("a")
    assert not +grammars.held


def test_a_grammar_is_held_until_the_last_sequence_has_ended():
    grammars = FakeGrammars()
    one = request("a", constraint=fake_constraint(0), n=2, max_tokens=3)
    scheduler = engine([one], grammars=grammars)
    scheduler.enqueue_ready()
    scheduler.abort_sequence("a", 0)
    while not scheduler.idle:
        assert grammars.held[one.constraint] == 1
        step(scheduler)
    assert not +grammars.held

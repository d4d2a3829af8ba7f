"""Replay state: brings a scheduler into the state in which a recording begins."""

from quire.core.scheduling.drafting import RecordedDrafts
from quire.core.types import StepResult, Wants
from tests.pure.core.builders import request
from tests.pure.core.test_scheduler import engine, rows, step


def test_a_started_sequence_continues_at_its_computed_length():
    scheduler = engine([request("a", range(9)), request("b", range(20, 29))], block_size=4)
    scheduler.replay_state().start_running("b", 0, 6)
    scheduler.check()
    assert rows(step(scheduler)[0]) == [("b", 0, 6, 3), ("a", 0, 0, 9)]


def test_a_follower_can_be_started_without_its_leader():
    scheduler = engine([request("a", range(9), n=3)], block_size=4)
    scheduler.replay_state().start_running("a", 1, 8)
    scheduler.check()
    assert scheduler.stats().following == 1
    assert ("a", 1, 8, 1) in rows(step(scheduler)[0])


def test_steps_in_flight_are_restored_and_applied():
    scheduler = engine([request("a", range(9), n=2), request("b", range(20, 29))], block_size=4)
    replay = scheduler.replay_state()
    replay.start_running("a", 0, 8)
    replay.start_running("b", 0, 2)
    replay.fork_followers()
    assert scheduler.stats().following == 0
    plan = replay.restore_step([("a", 0, 1, 0), ("b", 0, 3, 0)], 0, 0)
    scheduler.check()
    assert rows(plan) == [("a", 0, 8, 1), ("b", 0, 2, 3)]
    assert [row.wants for row in plan.rows] == [Wants.TOKEN, Wants.NOTHING]
    (update,) = scheduler.apply(plan, StepResult([[77], []]))
    assert (update.request_id, update.token_ids) == ("a", [77])
    assert rows(step(scheduler)[0]) == [("a", 0, 9, 1), ("b", 0, 5, 4), ("a", 1, 8, 1)]


def test_a_restored_row_with_drafts_is_awaited_by_its_sequence():
    scheduler = engine(block_size=4, depth=2, drafts=3)
    replay = scheduler.replay_state()
    replay.set_drafts(RecordedDrafts({}))
    for name, prompt in (("a", range(9)), ("b", range(20, 29))):
        scheduler.add(request(name, prompt))
    replay.start_running("a", 0, 8)
    plan = replay.restore_step([("a", 0, 4, 3)], 0, 0)
    assert (plan.num_drafts, plan.rows[0].count, plan.rows[0].drafts) == (3, 4, 3)
    assert rows(scheduler.plan()) == [("b", 0, 0, 9)]
    (update,) = scheduler.apply(plan, StepResult([[71, 72]]))
    assert update.token_ids == [71, 72]
    assert rows(scheduler.plan())[0] == ("a", 0, 10, 1)


def test_the_restored_prefix_is_hit_and_nothing_more():
    scheduler = engine([request("a", range(13))], block_size=4)
    replay = scheduler.replay_state()
    replay.restore_prefix("a", 0, 8)
    assert rows(step(scheduler)[0]) == [("a", 0, 8, 5)]
    scheduler.add(request("b", range(13)))
    replay.restore_prefix("b", 0, 4)
    assert rows(step(scheduler)[0]) == [("a", 0, 13, 1), ("b", 0, 12, 1)], "a holds the rest"
    scheduler.abort("a")
    scheduler.abort("b")
    scheduler.add(request("c", range(13)))
    replay.restore_prefix("c", 0, 4)
    scheduler.check()
    assert rows(step(scheduler)[0]) == [("c", 0, 4, 9)]


def test_a_prefix_that_is_there_keeps_its_place_in_the_order_of_use():
    scheduler = engine(blocks=10, block_size=4)
    for name, prompt in (("old", range(9)), ("new", range(20, 29))):
        scheduler.add(request(name, prompt, 1))
        step(scheduler)
    scheduler.add(request("c", range(9)))
    scheduler.replay_state().restore_prefix("c", 0, 8)
    scheduler.abort("c")
    scheduler.replay_state().fill_pool(3)  # evicts the block that was used least recently
    scheduler.add(request("d", range(20, 29)))
    assert rows(scheduler.plan()) == [("d", 0, 8, 1)]


def test_no_prefix_is_restored_without_cache_reads():
    scheduler = engine([request("a", range(13), read_prefix_cache=False)], block_size=4)
    scheduler.replay_state().restore_prefix("a", 0, 8)
    assert scheduler.stats().cached_blocks == 0


def test_waits_without_blocks_is_true_for_queued_sequences_only():
    scheduler = engine([request("a", range(13))], block_size=4)
    replay = scheduler.replay_state()
    assert replay.waits_without_blocks("a", 0)
    assert not replay.waits_without_blocks("b", 0)
    step(scheduler)
    assert not replay.waits_without_blocks("a", 0)


def test_fill_pool_leaves_the_given_number_of_blocks():
    scheduler = engine(blocks=10)
    assert scheduler.replay_state().fill_pool(4) == 6
    assert scheduler.available_blocks == 4
    assert scheduler.replay_state().fill_pool(7) == 0
    assert scheduler.available_blocks == 4

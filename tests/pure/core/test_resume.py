"""What puts a scheduler into the middle of things, so that a recording goes on from there."""

from tests.pure.core.made import request
from tests.pure.core.test_scheduler import engine, rows, step


def test_who_is_seated_goes_on_from_where_it_had_come():
    scheduler = engine([request("a", range(9)), request("b", range(20, 29))], block_size=4)
    scheduler.replay_state().start_running("b", 0, 6)
    scheduler.check()
    assert rows(step(scheduler)[0]) == [("b", 0, 6, 3), ("a", 0, 0, 9)]


def test_one_who_followed_its_sibling_can_be_seated_by_itself():
    scheduler = engine([request("a", range(9), n=3)], block_size=4)
    scheduler.replay_state().start_running("a", 1, 8)
    scheduler.check()
    assert scheduler.stats().following == 1
    assert ("a", 1, 8, 1) in rows(step(scheduler)[0])


def test_what_the_cache_is_to_know_of_a_prompt_is_found_and_no_more():
    scheduler = engine([request("a", range(13))], block_size=4)
    resume = scheduler.replay_state()
    resume.restore_prefix("a", 0, 8)
    assert rows(step(scheduler)[0]) == [("a", 0, 8, 5)]
    scheduler.add(request("b", range(13)))
    resume.restore_prefix("b", 0, 4)
    assert rows(step(scheduler)[0]) == [("a", 0, 13, 1), ("b", 0, 12, 1)], "a holds the rest"
    scheduler.abort("a")
    scheduler.abort("b")
    scheduler.add(request("c", range(13)))
    resume.restore_prefix("c", 0, 4)
    scheduler.check()
    assert rows(step(scheduler)[0]) == [("c", 0, 4, 9)]


def test_one_who_reads_no_cache_has_nothing_laid_back_for_it():
    scheduler = engine([request("a", range(13), read_prefix_cache=False)], block_size=4)
    scheduler.replay_state().restore_prefix("a", 0, 8)
    assert scheduler.stats().cached_blocks == 0


def test_only_who_is_here_and_holds_nothing_waits_anew():
    scheduler = engine([request("a", range(13))], block_size=4)
    resume = scheduler.replay_state()
    assert resume.waits_without_blocks("a", 0)
    assert not resume.waits_without_blocks("b", 0)
    step(scheduler)
    assert not resume.waits_without_blocks("a", 0)


def test_blocks_are_taken_until_only_so_many_can_be_had():
    scheduler = engine(blocks=10)
    assert scheduler.replay_state().fill_pool(4) == 6
    assert scheduler.available_blocks == 4
    assert scheduler.replay_state().fill_pool(7) == 0
    assert scheduler.available_blocks == 4

"""Placements: every expert somewhere, ranks of one size, and loads that are about even."""

from hypothesis import given
from hypothesis import strategies as st

from quire.distributed.expert_placement import (
    balance_experts,
    keep_slots,
    place_experts,
    rank_loads,
)


@st.composite
def sizes(draw):
    """(loads, ranks, slots of each)."""
    ranks = draw(st.integers(1, 6))
    loads = draw(st.lists(st.integers(0, 10_000), min_size=ranks, max_size=20))
    slots = draw(st.integers(-(-len(loads) // ranks), len(loads)))
    return loads, ranks, slots


def copies(placement):
    return {one: sum(one in own for own in placement) for own in placement for one in own}


@given(sizes())
def test_every_expert_has_a_place_and_no_rank_has_one_twice(given):
    loads, ranks, slots = given
    placement = balance_experts(loads, ranks, slots)
    assert len(placement) == ranks
    assert all(len(own) == slots == len(set(own)) for own in placement)
    assert copies(placement).keys() == set(range(len(loads)))


@given(sizes())
def test_more_load_does_not_mean_fewer_copies(given):
    loads, ranks, slots = given
    count = copies(balance_experts(loads, ranks, slots))
    for one, load in enumerate(loads):
        for other, least in enumerate(loads):
            assert count[one] >= count[other] or load <= least


@given(sizes(), st.randoms())
def test_few_experts_move_and_none_is_lost(given, random):
    loads, ranks, slots = given
    old = balance_experts(loads, ranks, slots)
    random.shuffle(loads)
    new = balance_experts(loads, ranks, slots)
    kept = keep_slots(old, new)
    assert sorted(map(sorted, kept)) == sorted(map(sorted, new))
    for was, now in zip(old, kept):
        for slot, expert in enumerate(was):
            assert now[slot] == expert or expert not in now
    assert keep_slots(old, old) == old
    assert keep_slots(old, old[::-1]) == old, "ranks are alike"


def test_loads_become_even():
    loads = [1000 // (one + 1) for one in range(64)]
    given = place_experts(64, 4, "linear")
    before, plain, copied = (
        rank_loads(loads, one)
        for one in (given, balance_experts(loads, 4, 16), balance_experts(loads, 4, 18))
    )
    assert max(before) > 2 * sum(loads) / 4
    assert max(plain) < 1.1 * sum(loads) / 4
    assert max(copied) < 1.01 * sum(loads) / 4
    assert max(rank_loads([8, 0, 0, 0], balance_experts([8, 0, 0, 0], 4, 2))) == 2


def test_experts_that_do_not_divide_are_one_more_on_the_first_ranks():
    assert place_experts(7, 3, "linear") == [(0, 1, 2), (3, 4), (5, 6)]
    assert place_experts(7, 3, "round_robin") == [(0, 3, 6), (1, 4), (2, 5)]

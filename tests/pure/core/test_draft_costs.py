"""The price of a draft follows the measured times of steps, whatever single ones were."""

from __future__ import annotations

import random

import pytest

from quire.core.scheduling.draft_costs import (
    FIRST_PRICE,
    HIGHEST_PRICE,
    STALE,
    DraftCosts,
)

ROWS = 8


def gpu(drafts):
    """Seconds of a step that reads its weights: each token adds little."""
    return 0.004 + 0.00001 * drafts + (0.0002 if drafts else 0)


def cpu(drafts):
    """Seconds of a step whose tokens cost the same each."""
    return 0.001 * (ROWS + drafts)


def measured(seconds, *, chances, noise=0.0, rounds=20, counts=(1, 2, 4, 8, 16, 32, 64)):
    rng, costs = random.Random(3), DraftCosts()
    costs.set_chances(ROWS, chances)
    for _ in range(rounds):
        costs.observe_plain(ROWS, seconds(0))
        for count in counts:
            slow = rng.random() < noise
            costs.observe_drafts(ROWS, count, seconds(count) * (20 if slow else 1))
    if noise:  # the last ones too
        costs.observe_plain(ROWS, 20 * seconds(0))
        costs.observe_drafts(ROWS, 8, 20 * seconds(8))
    return costs


def best_count(seconds, chances):
    rates = [(ROWS + sum(chances[:n])) / seconds(n) for n in range(len(chances) + 1)]
    return rates.index(max(rates))


CHANCES = [0.95**i for i in range(64)]


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("seconds", [gpu, cpu])
@pytest.mark.parametrize("scale", [0.05, 0.3, 1.0])
def test_the_price_admits_the_drafts_that_pay(seconds, scale, noise):
    chances = [scale * one for one in CHANCES]
    costs = measured(seconds, chances=chances, noise=noise)
    count = sum(one >= costs.price(ROWS) for one in chances)
    chosen, best = (
        (ROWS + sum(chances[:n])) / seconds(n) for n in (count, best_count(seconds, chances))
    )
    assert chosen > 0.97 * best


def test_nothing_is_known_at_first_and_few_drafts_are_made():
    costs = DraftCosts()
    assert costs.price(ROWS) == FIRST_PRICE
    assert not costs.is_known(ROWS)
    assert costs.max_drafts(ROWS) == 2
    costs.observe_plain(ROWS, 1.0)
    for seconds in (50.0, 1.0):  # the first step prepares its graph, one alone proves nothing
        costs.observe_drafts(ROWS, 2, seconds)
        assert not costs.is_known(ROWS)
    costs.observe_drafts(ROWS, 2, 1.0)
    assert costs.is_known(ROWS)
    assert costs.max_drafts(ROWS) == 4


def test_no_draft_pays_where_none_is_accepted_or_each_costs_a_step():
    assert measured(gpu, chances=[0.01] * 9).price(ROWS) > 0.01
    dear = measured(lambda drafts: 0.001 * (1 + 9 * drafts), chances=[1.0] * 9)
    assert 1.0 < dear.price(ROWS) <= HIGHEST_PRICE


def test_an_old_time_is_tried_again():
    """The machine was busy while drafts were measured; plain steps show that it is no longer."""
    costs = measured(lambda drafts: 0.004 if not drafts else 0.1, chances=[1.0] * 8)
    assert costs.price(ROWS) > 1.0
    for _ in range(STALE + 1):
        costs.observe_plain(ROWS, 0.004)
    for count in (2, 2, 4, 4, 8, 8):
        costs.observe_drafts(ROWS, count, 0.004)
    assert costs.price(ROWS) < 0.2


def test_a_change_of_times_is_followed_within_some_steps():
    costs = measured(gpu, chances=CHANCES)
    assert costs.price(ROWS) < 0.1
    for _ in range(6):
        costs.observe_plain(ROWS, cpu(0))
        for count in (16, 32, 64):
            costs.observe_drafts(ROWS, count, cpu(count))
    assert costs.price(ROWS) > 0.6


def test_a_step_with_any_drafts_may_cost_much():
    """Rows are padded, and the next step cannot be planned: few drafts do not pay, many do."""
    seconds = lambda drafts: 1.0 + 0.2 * (drafts > 0)  # noqa: E731
    few = measured(seconds, chances=[0.9] * 1)
    assert few.price(ROWS) > 0.9
    assert measured(seconds, chances=[0.9] * 8).price(ROWS) < 0.9


def test_numbers_of_drafts_that_are_close_do_not_show_the_price_of_one():
    """Steps of 14 and 16 drafts differ by noise, as much as forty drafts cost."""
    seconds = lambda drafts: gpu(drafts) + 0.0004 * (drafts == 16)  # noqa: E731
    costs = measured(seconds, chances=CHANCES, counts=(14, 16))
    assert costs.price(ROWS) < 0.2
    costs.observe_plain(2 * ROWS, gpu(0))
    assert costs.price(2 * ROWS) < 0.5, "of other rows, with which no drafts were measured"


@pytest.mark.parametrize("rows", [8, 11, 16, 32])
@pytest.mark.parametrize("any_drafts", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("a_row", [0.0005, 0.02, 1.0])
def test_rows_that_were_not_measured_have_times_like_those_of_the_nearest(a_row, any_drafts, rows):
    """Where weights are read and where tokens are computed, and whatever steps with drafts cost."""
    seconds = lambda rows, drafts: (  # noqa: E731
        1.0 + a_row * (rows + drafts) + any_drafts * (drafts > 0)
    )
    costs = DraftCosts()
    for _ in range(4):
        costs.observe_plain(16, seconds(16, 0))
        for count in (16, 48):
            costs.observe_drafts(16, count, seconds(16, count))
    chances = sorted([0.8, 0.64, 0.51] * rows, reverse=True)
    costs.set_chances(rows, chances)
    rates = [(rows + sum(chances[:n])) / seconds(rows, n) for n in range(len(chances) + 1)]
    price = costs.price(rows)
    assert rates[sum(one >= price for one in chances)] > 0.92 * max(rates)
    assert costs.is_known(rows)
    assert costs.plain(rows) == pytest.approx(seconds(rows, 0), rel=0.01)
    assert costs.plain(100) == 0.0, "too many to tell"
    assert rows == 16 or not costs.take_plain(rows), "a step without drafts is not due at once"


def test_steps_without_drafts_are_measured_often_only_where_drafts_hardly_pay():
    def due(any_drafts):
        seconds = lambda drafts: 1.0 + 0.01 * drafts + any_drafts * (drafts > 0)  # noqa: E731
        costs, found = measured(seconds, chances=[0.9] * ROWS, counts=(8,)), 0
        for _ in range(2000):
            costs.price(ROWS)
            found += costs.take_plain(ROWS)
            costs.observe_drafts(ROWS, 8, seconds(8))
        return found

    assert 3 * due(0.1) <= due(0.6) <= 16
    assert due(0.1) > 2


def test_an_old_time_of_many_drafts_does_not_hide_new_ones_of_fewer():
    """Each token costs a step's time from now on; no step has as many drafts as one before."""
    costs = measured(gpu, chances=[0.8] * 32)
    for _ in range(80):
        costs.observe_drafts(ROWS, 32, cpu(32))
    costs.observe_plain(ROWS, cpu(0))
    costs.observe_plain(ROWS, cpu(0))
    assert costs.price(ROWS) > 0.8

"""Fault bisection: finds exactly the requests that make steps raise."""

import random

from hypothesis import given
from hypothesis import strategies as st

from quire.core.scheduling.fault_isolation import FaultBisection


def bisect(bisection, ids, raises, most=10_000):
    """Run trials after a failed step. Returns the culprits and the number of trials."""
    culprits, trials = [], 0
    culprit = bisection.record_failure(ids)
    while bisection.current_group is not None:
        assert trials < most, "no end"
        group, trials = bisection.current_group, trials + 1
        if not raises(group):
            bisection.record_success()
            continue
        culprit = bisection.record_failure(group)
        if culprit is not None:
            culprits.append(culprit)
    return culprits, trials


names = st.integers(1, 60).map(lambda n: tuple(f"r{i}" for i in range(n)))


@given(names, st.data())
def test_exactly_the_culprits_are_found(ids, data):
    bad = data.draw(st.sets(st.sampled_from(ids), min_size=1, max_size=3))
    bisection = FaultBisection()
    culprits, trials = bisect(bisection, ids, lambda group: not bad.isdisjoint(group))
    assert sorted(culprits) == sorted(bad)
    assert trials <= 2 * len(bad) * max(1, len(ids).bit_length()) + 2
    assert bisection.unattributed_failures == 0


@given(names, st.data())
def test_requests_that_raise_only_together_are_cleared(ids, data):
    pair = data.draw(st.sets(st.sampled_from(ids), min_size=min(2, len(ids)), max_size=2))
    bisection = FaultBisection()
    culprits, _ = bisect(bisection, ids, lambda group: len(pair) > 1 and pair <= set(group))
    assert not culprits
    assert bisection.unattributed_failures == 1


@given(names, st.data())
def test_each_suspect_is_tried_alone_or_passes(ids, data):
    """Steps of a trial may have a part of the group only, and requests may end."""
    bad = data.draw(st.sets(st.sampled_from(ids), max_size=2))
    draw = random.Random(data.draw(st.integers(0, 10**6)))
    bisection, removed, passed, culprits = FaultBisection(), set(), set(), []
    assert bisection.record_failure(ids) is None
    for _ in range(10_000):
        group = bisection.current_group
        if group is None:
            break
        assert not set(group) & (removed | passed | {*culprits})
        assert all(request_id in bisection for request_id in group)
        step = [request_id for request_id in group if draw.random() < 0.7] or [group[0]]
        if draw.random() < 0.05:
            request_id = draw.choice(ids)
            bisection.remove(request_id)
            removed.add(request_id)
        elif not bad.isdisjoint(step):
            culprit = bisection.record_failure(step)
            culprits += [] if culprit is None else [culprit]
        elif set(step) == set(group):
            bisection.record_success()
            passed |= set(group)
    assert bisection.current_group is None
    assert set(culprits) <= bad
    assert passed | removed | {*culprits} == set(ids)


def test_a_request_that_fails_outside_of_a_trial_is_tried_too():
    bisection = FaultBisection()
    bisection.record_failure(["a", "b"])
    bisection.record_failure(["c"])  # between trials, when no request of the group could run
    assert [*bisection.trial_groups] == [("c",), ("a",), ("b",)]
    assert bisection.record_failure(["c"]) == "c"
    bisection.record_success()
    bisection.record_success()
    assert bisection.current_group is None

"""Who is to blame for steps that raise: found, whoever it is, and nobody else."""

import random

from hypothesis import given
from hypothesis import strategies as st

from quire.core.scheduling.fault_isolation import FaultBisection


def inquire(inquiry, ids, raises, most=10_000):
    """A step of these raised: try until it is over. Who was found, and the trials it took."""
    blamed, trials = [], 0
    culprit = inquiry.record_failure(ids)
    while inquiry.current_group is not None:
        assert trials < most, "no end"
        party, trials = inquiry.current_group, trials + 1
        if not raises(party):
            inquiry.record_success()
            continue
        culprit = inquiry.record_failure(party)
        if culprit is not None:
            blamed.append(culprit)
    return blamed, trials


names = st.integers(1, 60).map(lambda n: tuple(f"r{i}" for i in range(n)))


@given(names, st.data())
def test_any_culprits_are_found_and_nobody_else(ids, data):
    bad = data.draw(st.sets(st.sampled_from(ids), min_size=1, max_size=3))
    inquiry = FaultBisection()
    blamed, trials = inquire(inquiry, ids, lambda party: not bad.isdisjoint(party))
    assert sorted(blamed) == sorted(bad)
    assert trials <= 2 * len(bad) * max(1, len(ids).bit_length()) + 2
    assert inquiry.unattributed_failures == 0


@given(names, st.data())
def test_two_who_raise_together_only_are_acquitted(ids, data):
    pair = data.draw(st.sets(st.sampled_from(ids), min_size=min(2, len(ids)), max_size=2))
    inquiry = FaultBisection()
    blamed, _ = inquire(inquiry, ids, lambda party: len(pair) > 1 and pair <= set(party))
    assert not blamed
    assert inquiry.unattributed_failures == 1


@given(names, st.data())
def test_everyone_accused_is_tried_alone_or_passes(ids, data):
    """Steps of a trial may hold some of the party only; others come in between; some leave."""
    bad = data.draw(st.sets(st.sampled_from(ids), max_size=2))
    draw = random.Random(data.draw(st.integers(0, 10**6)))
    inquiry, gone, passed, blamed = FaultBisection(), set(), set(), []
    assert inquiry.record_failure(ids) is None
    for _ in range(10_000):
        party = inquiry.current_group
        if party is None:
            break
        assert not set(party) & (gone | passed | {*blamed})
        assert all(one in inquiry for one in party)
        step = [one for one in party if draw.random() < 0.7] or [party[0]]
        if draw.random() < 0.05:
            one = draw.choice(ids)
            inquiry.remove(one)
            gone.add(one)
        elif not bad.isdisjoint(step):
            culprit = inquiry.record_failure(step)
            blamed += [] if culprit is None else [culprit]
        elif set(step) == set(party):
            inquiry.record_success()
            passed |= set(party)
    assert inquiry.current_group is None
    assert set(blamed) <= bad
    assert passed | gone | {*blamed} == set(ids)


def test_one_that_fails_among_others_who_were_not_accused_is_tried_too():
    inquiry = FaultBisection()
    inquiry.record_failure(["a", "b"])
    inquiry.record_failure(["c"])  # between trials, when nobody of the party could run
    assert [*inquiry.trial_groups] == [("c",), ("a",), ("b",)]
    assert inquiry.record_failure(["c"]) == "c"
    inquiry.record_success()
    inquiry.record_success()
    assert inquiry.current_group is None

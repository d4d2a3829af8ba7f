"""The part of a test's cases that runs every day."""

import itertools

import pytest

from tests import tiers


@pytest.mark.parametrize("every", [2, 3, 4])
def test_tests_of_a_file_run_every_case_together(every):
    cases = [(i,) for i in range(10)]
    chosen = [tiers.sample(cases, every, first) for first in range(every)]
    assert [sum(runs) for runs in zip(*chosen)] == [1] * len(cases)


@pytest.mark.parametrize("every", [2, 3, 5])
@pytest.mark.parametrize("sizes", [(3, 17), (4, 42), (2, 2), (2, 3, 6), (1, 9)])
def test_each_value_of_each_axis_runs(every, sizes):
    cases = list(itertools.product(*map(range, sizes)))
    for first in range(every):
        runs = [case for case, runs in zip(cases, tiers.sample(cases, every, first)) if runs]
        for axis, size in zip(zip(*runs), sizes):
            assert {*axis} == {*range(size)}
        assert len(runs) <= len(cases) // every + sum(sizes)


def test_one_case_runs():
    assert tiers.sample([("one",)], 3, 2) == [True]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("one", "other"), [(i, i) for i in range(8)])
def test_arguments_of_one_parametrization_are_one_axis(one, other, request):
    name = request.node.originalname
    runs = [item for item in request.session.items if getattr(item, "originalname", "") == name]
    assert len(runs) <= (8 if tiers.LONG else 2)
    assert one == other

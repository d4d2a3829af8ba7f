"""How much the tests try: an everyday amount, and with `pytest --long` (`make test-long`) more.

    ROUNDS = tiers.amount(16, 2000)         everyday, long
    @pytest.mark.long("a night of faults")  runs with --long only
    @pytest.mark.parametrize("splits", [2, *tiers.long(7, 32)])
    pytestmark = pytest.mark.sampled(3)     of the cases of each test, one in three every day

tests/conftest.py sets `LONG` before it imports any test module.
"""

from __future__ import annotations

from typing import Any

import pytest

LONG = False


def sample(cases: list[tuple[Any, ...]], every: int, first: int) -> list[bool]:
    """Which cases of one test run every day: one in `every`; of several axes each value as well.

    cases: of each, its values on all axes. first: number of the test in its file. Tests of one file
    begin at different cases, so that together they run every one.
    """
    axes = [{value: i for i, value in enumerate(dict.fromkeys(axis))} for axis in zip(*cases)]
    turns = [sum(map(dict.__getitem__, axes, case)) for case in cases]
    chosen = [turn % every == first % min(every, len(cases)) for turn in turns]
    if len(axes) > 1:  # of a product, a diagonal of which is chosen
        seen = {value for case, runs in zip(cases, chosen) if runs for value in enumerate(case)}
        for i, case in enumerate(cases):
            chosen[i] |= not {*enumerate(case)} <= seen
            seen |= {*enumerate(case)}
    return chosen


def amount(everyday: Any, long: Any) -> Any:
    """One of the two."""
    return long if LONG else everyday


def long(*values: Any, reason: str = "more of the same") -> list[Any]:
    """Values of a parametrization that the everyday tier leaves out. A tuple is several."""
    mark = pytest.mark.long(reason)
    cases = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*case, marks=mark) for case in cases]

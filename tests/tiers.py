"""How much the tests try: an everyday amount, and with `pytest --long` (`make test-long`) more.

    ROUNDS = tiers.amount(16, 2000)         everyday, long
    @pytest.mark.long("a night of faults")  runs with --long only
    @pytest.mark.parametrize("splits", [2, *tiers.long(7, 32)])

tests/conftest.py sets `LONG` before it imports any test module.
"""

from __future__ import annotations

from typing import Any

import pytest

LONG = False


def amount(everyday: Any, long: Any) -> Any:
    """One of the two."""
    return long if LONG else everyday


def long(*values: Any, reason: str = "more of the same") -> list[Any]:
    """Values of a parametrization that the everyday tier leaves out. A tuple is several."""
    mark = pytest.mark.long(reason)
    cases = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*case, marks=mark) for case in cases]

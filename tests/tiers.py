"""How much the tests try: an everyday amount, and with `pytest --long` (`make test-long`) more.

    ROUNDS = tiers.amount(16, 2000)         everyday, long
    @pytest.mark.long("a night of faults")  runs with --long only

tests/conftest.py sets `LONG` before it imports any test module.
"""

from __future__ import annotations

LONG = False


def amount(everyday: int, long: int) -> int:
    """One of the two."""
    return long if LONG else everyday

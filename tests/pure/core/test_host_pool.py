"""Host blocks are taken or free."""

from __future__ import annotations

import pytest

from quire.core.tiers.host import HostPool


def test_takes_all_or_nothing():
    pool = HostPool(3)
    taken = pool.take(2)
    assert pool.take(2) is None
    assert pool.available == 1
    pool.check(taken)
    pool.drop(taken)
    assert pool.available == 3


def test_check_sees_a_lost_block():
    pool = HostPool(3)
    pool.take(1)
    with pytest.raises(AssertionError, match="leaked"):
        pool.check([])

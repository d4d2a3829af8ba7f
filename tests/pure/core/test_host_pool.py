"""Host blocks are taken or free."""

from __future__ import annotations

import pytest

from quire.core.kv.tiers.host import HostBlockPool


def test_takes_all_or_nothing():
    pool = HostBlockPool(3)
    taken = pool.allocate(2)
    assert pool.allocate(2) is None
    assert pool.available == 1
    pool.check(taken)
    pool.free(taken)
    assert pool.available == 3


def test_check_sees_a_lost_block():
    pool = HostBlockPool(3)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="leaked"):
        pool.check([])

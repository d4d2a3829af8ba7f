"""Blocks come back when the step that may touch them is over, and not before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.core.fence import Fence


@given(st.lists(st.tuples(st.integers(0, 8), st.lists(st.integers(0, 99), max_size=3)), max_size=9))
def test_each_block_returns_exactly_when_its_step_is_over(gifts):
    back = []
    fence = Fence(back.extend)
    for after, blocks in gifts:
        fence.give_back(blocks, after)
    for step in range(10):
        fence.landed(step)
        want = [b for after, blocks in gifts if after <= step for b in blocks]
        assert sorted(back) == sorted(want)
        assert fence.blocks == len(fence.held())
        assert sorted(back + fence.held()) == sorted(b for _, blocks in gifts for b in blocks)


def test_what_no_step_touches_returns_at_once():
    back = []
    fence = Fence(back.extend)
    fence.landed(4)
    fence.give_back([1, 2], after=4)
    assert back == [1, 2]
    fence.give_back([3], after=5)
    assert back == [1, 2]

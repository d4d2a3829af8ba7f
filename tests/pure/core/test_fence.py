"""Blocks come back when the step that may touch them is over, and not before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.core.kv.deferred_free import DeferredFree


@given(st.lists(st.tuples(st.integers(0, 8), st.lists(st.integers(0, 99), max_size=3)), max_size=9))
def test_each_block_returns_exactly_when_its_step_is_over(gifts):
    back = []
    fence = DeferredFree(back.extend)
    for after, blocks in gifts:
        fence.free_after(blocks, after)
    for step in range(10):
        fence.step_finished(step)
        want = [b for after, blocks in gifts if after <= step for b in blocks]
        assert sorted(back) == sorted(want)
        assert fence.num_pending == len(fence.pending_blocks())
        assert sorted(back + fence.pending_blocks()) == sorted(
            b for _, blocks in gifts for b in blocks
        )


def test_what_no_step_touches_returns_at_once():
    back = []
    fence = DeferredFree(back.extend)
    fence.step_finished(4)
    fence.free_after([1, 2], after=4)
    assert back == [1, 2]
    fence.free_after([3], after=5)
    assert back == [1, 2]

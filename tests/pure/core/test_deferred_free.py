"""Blocks are freed when the step that may use them has finished, and not before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.core.kv.deferred_free import DeferredFree


@given(st.lists(st.tuples(st.integers(0, 8), st.lists(st.integers(0, 99), max_size=3)), max_size=9))
def test_each_block_is_freed_when_its_step_has_finished(frees):
    freed = []
    deferred = DeferredFree(freed.extend)
    for after, blocks in frees:
        deferred.free_after(blocks, after)
    for step in range(10):
        deferred.step_finished(step)
        expected = [b for after, blocks in frees if after <= step for b in blocks]
        assert sorted(freed) == sorted(expected)
        assert deferred.num_pending == len(deferred.pending_blocks())
        assert sorted(freed + deferred.pending_blocks()) == sorted(
            b for _, blocks in frees for b in blocks
        )


def test_blocks_of_finished_steps_are_freed_at_once():
    freed = []
    deferred = DeferredFree(freed.extend)
    deferred.step_finished(4)
    deferred.free_after([1, 2], after=4)
    assert freed == [1, 2]
    deferred.free_after([3], after=5)
    assert freed == [1, 2]

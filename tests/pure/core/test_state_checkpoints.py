"""State checkpoints: where they are due, what starts from them, and what is forgotten."""

import pytest

from quire.core.kv.block_pool import BlockPool
from quire.core.kv.cache_spec import FullAttentionSpec
from quire.core.kv.kv_cache import KVCache
from quire.core.kv.state_checkpoints import StateCheckpoints
from quire.core.types import NO_BLOCK
from tests.pure.core.builders import sequence

PROMPT = tuple(range(1000))
FULL = (FullAttentionSpec(),)


def cache(size=8, specs=FULL, every=256):
    return KVCache(
        BlockPool(100 if specs else 0), 16, specs, states=StateCheckpoints(size, 16, every)
    )


def due(kv, length, prompt):
    seq = sequence(prompt=PROMPT[:prompt], tables=len(kv.specs))
    return [at for at in range(1, length + 1) if kv.states.is_due(seq, at)]


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        (40, [256, 512]),
        (65, [64, 256, 512]),
        (300, [64, 128, 256, 288, 512]),
        (600, [64, 128, 256, 512]),
    ],
)
def test_checkpoints_are_due_early_at_distances_and_at_the_end_of_a_prompt(prompt, want):
    kv = cache()
    assert due(kv, 550, prompt) == want


def test_rows_end_where_a_checkpoint_is_due():
    kv, at = cache(), []
    seq = sequence(prompt=PROMPT[:300])
    while seq.pending:
        seq.planned += kv.states.tokens_before_next(seq, seq.pending)
        at.append(seq.planned)
    assert at == [64, 128, 256, 288, 300]


def test_without_rows_nothing_is_due():
    kv = cache(size=0)
    assert due(kv, 550, 300) == []
    assert kv.states.tokens_before_next(sequence(prompt=PROMPT[:300]), 300) == 300


def saved(kv, length, step=1):
    """A sequence of 300 tokens whose state at some length step 1 saves."""
    seq = sequence(prompt=PROMPT[:300], tables=len(kv.specs), slot=3)
    assert kv.allocate(seq, 300)
    kv.take_copies(step)
    move = kv.save_state(seq, length)
    seq.computed = seq.planned = 300
    kv.cache_full_blocks(seq, 0)
    return seq, move


@pytest.mark.parametrize("specs", [FULL, ()])
def test_a_checkpoint_is_found_when_its_step_was_applied(specs):
    kv = cache(specs=specs)
    _, move = saved(kv, 128)
    other = sequence(prompt=PROMPT[:200], tables=len(specs))
    assert (move.slot, kv.find_prefix(other)) == (3, 0)
    kv.step_finished(1)
    kv.match_prefix(other)
    assert (other.planned, other.state_start) == (128, move.checkpoint)
    kv.release(other, 1)
    assert other.state_start == NO_BLOCK


def test_a_checkpoint_of_a_failed_step_or_of_a_dropped_row_is_not_found():
    other = sequence(prompt=PROMPT[:200])
    kv = cache()
    saved(kv, 128)
    kv.step_failed()
    kv.step_finished(1)
    assert kv.find_prefix(other) == 0
    kv = cache()
    seq, _ = saved(kv, 128)
    kv.step_finished(1, {seq})
    assert kv.find_prefix(other) == 0
    assert kv.states.pool.available == 8


def test_invalid_numbers_are_forgotten_with_the_states_behind_them():
    kv = cache()
    seq, _ = saved(kv, 128)
    kv.step_finished(1)
    kv.invalidate(seq)
    assert kv.find_prefix(sequence(prompt=PROMPT[:200])) == 0


@pytest.mark.parametrize("specs", [FULL, ()])
def test_replays_restore_the_hit_that_was_recorded(specs):
    kv = cache(specs=specs)
    seq = sequence(prompt=PROMPT[:200], tables=len(specs))
    kv.restore_prefix(seq, 64)
    assert kv.find_prefix(seq) == 64
    kv.restore_prefix(seq, 0)
    assert kv.find_prefix(seq) == 0

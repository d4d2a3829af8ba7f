"""Cache specs equal a count by brute force."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.core.kv.cache_spec import FullAttentionSpec, SlidingWindowSpec

small = st.integers(1, 40)


@given(small, small)
def test_full_attention_needs_all_positions(tokens, size):
    assert FullAttentionSpec().first_needed(tokens) == 0
    assert FullAttentionSpec().max_blocks(tokens, size) == len({p // size for p in range(tokens)})


@given(small, st.integers(0, 60))
def test_a_window_reads_as_many_positions_as_its_size(window, position):
    read = [p for p in range(position + 1) if position - window < p <= position]
    assert SlidingWindowSpec(window).first_needed(position) == read[0]


@given(small, small, st.integers(1, 60))
def test_a_window_needs_at_most_max_blocks(window, size, tokens):
    spec = SlidingWindowSpec(window)
    worst = max(
        len({p // size for p in range(spec.first_needed(position), position + 1)})
        for position in range(tokens)
    )
    assert worst <= spec.max_blocks(tokens, size) <= FullAttentionSpec().max_blocks(tokens, size)
    if tokens >= window + size:
        assert worst == spec.max_blocks(tokens, size)

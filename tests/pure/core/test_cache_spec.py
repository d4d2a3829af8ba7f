"""The arithmetic of layer groups, against counting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.core.cache_spec import Full, Window

small = st.integers(1, 40)


@given(small, small)
def test_full_attention_keeps_everything(tokens, size):
    assert Full().first(tokens) == 0
    assert Full().most_blocks(tokens, size) == len({p // size for p in range(tokens)})


@given(small, st.integers(0, 60))
def test_a_window_reads_as_many_positions_as_it_is_wide(window, position):
    read = [p for p in range(position + 1) if position - window < p <= position]
    assert Window(window).first(position) == read[0]


@given(small, small, st.integers(1, 60))
def test_a_window_needs_no_more_blocks_than_promised(window, size, tokens):
    spec = Window(window)
    worst = max(
        len({p // size for p in range(spec.first(position), position + 1)})
        for position in range(tokens)
    )
    assert worst <= spec.most_blocks(tokens, size) <= Full().most_blocks(tokens, size)
    if tokens >= window + size:
        assert worst == spec.most_blocks(tokens, size)

"""Steps with prompts, padded to shapes: padding loses, moves and joins no real token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.types import NO_BLOCK, Request, Row, Sequence, StepPlan, StopConditions, Wants
from quire.runner.gpu.mixed_batch_graphs import (
    MAX_TOKENS,
    largest_graph_shape,
    pad_to_shape,
    select_graph_shape,
)
from quire.runner.step_batch import build_step_batch

ROWS = st.lists(
    st.tuples(st.integers(1, 90), st.integers(0, 50), st.booleans()), min_size=1, max_size=20
)


def inputs_of(rows):
    made = []
    for slot, (count, start, samples) in enumerate(rows):
        prompt = tuple(range(1, start + count + 1))
        seq = Sequence(
            Request(f"{slot}", prompt, StopConditions(9)), 0, list(prompt), ([NO_BLOCK],)
        )
        seq.slot = slot
        made.append(Row(seq, start, count, Wants.TOKEN if samples else Wants.NOTHING))
    return build_step_batch(StepPlan(1, tuple(made)))


@given(ROWS)
def test_what_is_real_stays_as_it_was(rows):
    inputs = inputs_of(rows)
    mould = select_graph_shape(inputs, 8192, 256, waits=True)
    if inputs.decode_only or mould is None:
        return
    made = pad_to_shape(inputs, mould)
    assert len(made.token_ids) == mould.tokens == made.q_starts[-1]
    assert len(made.contexts) == len(made.slots) == len(made.num_outputs) == mould.rows
    assert made.num_decodes == mould.decodes
    assert (np.diff(made.q_starts) >= 0).all()
    ours = [*range(inputs.num_decodes)]
    ours += [mould.decodes + i for i in range(len(inputs.slots) - inputs.num_decodes)]
    for old, new in enumerate(ours):
        was = slice(inputs.q_starts[old], inputs.q_starts[old + 1])
        now = slice(made.q_starts[new], made.q_starts[new + 1])
        for name in ("token_ids", "token_slots", "positions"):
            assert getattr(made, name)[now].tolist() == getattr(inputs, name)[was].tolist()
        assert made.contexts[new] == inputs.contexts[old]
        assert made.slots[new] == inputs.slots[old]
    real = len(inputs.sampled_tokens)
    for at, before in zip(made.sampled_tokens[:real], inputs.sampled_tokens):
        assert made.token_slots[at] == inputs.token_slots[before]
        assert made.positions[at] == inputs.positions[before]
    assert made.sampled_slots == inputs.sampled_slots + (-1,) * (mould.rows - real)


@given(ROWS)
def test_what_fills_up_reads_and_writes_nothing(rows):
    inputs = inputs_of(rows)
    mould = select_graph_shape(inputs, 8192, 256, waits=True)
    if inputs.decode_only or mould is None:
        return
    made = pad_to_shape(inputs, mould)
    assert (made.token_slots >= 0).sum() == len(inputs.token_ids)
    assert (made.contexts > 0).sum() == len(inputs.contexts)
    assert made.contexts[-1] == 0, "the last row owns the tokens at the end"


@pytest.mark.parametrize(
    ("rows", "most_tokens", "most_rows"),
    [
        ([(MAX_TOKENS + 1, 0, True)], 8192, 256),
        ([(100, 0, True)], 64, 256),
        ([(100, 0, True)], 8192, 3),
        ([(2, 0, True)] * 64, 8192, 256),
    ],
    ids=["many tokens", "more than a step may have", "few seats", "many prompts"],
)
def test_other_steps_have_no_shape(rows, most_tokens, most_rows):
    assert select_graph_shape(inputs_of(rows), most_tokens, most_rows, waits=True) is None


@given(ROWS, st.integers(64, 2048), st.integers(4, 300))
def test_the_largest_shape_is_at_least_as_large_as_any(rows, most_tokens, most_rows):
    inputs = inputs_of(rows)
    mould = (
        None
        if inputs.decode_only
        else select_graph_shape(inputs, most_tokens, most_rows, waits=True)
    )
    if mould is not None:
        assert largest_graph_shape(most_tokens, most_rows).tokens >= mould.tokens


def test_a_large_step_without_an_idle_gpu_has_no_shape():
    inputs = inputs_of([(600, 0, True)])
    assert select_graph_shape(inputs, 8192, 256, waits=False) is None
    assert select_graph_shape(inputs, 8192, 256, waits=True).tokens == 640

"""Steps with prompts, padded to shapes: padding loses, moves and joins no real token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.memory.captured_steps import CAPTURED_TOKENS, MOST_CAPTURED_TOKENS
from quire.core.types import NO_BLOCK, Request, Row, Sequence, StepPlan, StopConditions, Wants
from quire.runner.gpu.mixed_batch_graphs import (
    MAX_PROMPT_ROWS,
    PROMPT_ROWS,
    GraphShape,
    graph_shapes,
    max_padding,
    pad_to_shape,
    select_graph_shape,
)
from quire.runner.step_batch import EMPTY_BATCH, build_step_batch

SHAPES = graph_shapes(8192, 256)
LARGE_SHAPES = graph_shapes(8192, 512, MOST_CAPTURED_TOKENS)

COUNTS = st.integers(1, 90) | st.integers(1, 900)
ROWS = st.lists(st.tuples(COUNTS, st.integers(0, 50), st.booleans()), min_size=1, max_size=40)


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
    mould = select_graph_shape(inputs, LARGE_SHAPES)
    if inputs.decode_only or mould is None:
        return
    made = pad_to_shape(inputs, mould)
    assert len(made.token_ids) == mould.tokens == made.q_starts[-1]
    assert len(made.contexts) == len(made.slots) == mould.rows
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
    assert made.sampled_slots == inputs.sampled_slots
    assert made.num_outputs.tolist() == inputs.num_outputs.tolist()


@given(ROWS)
def test_what_fills_up_reads_and_writes_nothing(rows):
    inputs = inputs_of(rows)
    mould = select_graph_shape(inputs, LARGE_SHAPES)
    if inputs.decode_only or mould is None:
        return
    made = pad_to_shape(inputs, mould)
    assert (made.token_slots >= 0).sum() == len(inputs.token_ids)
    assert (made.contexts > 0).sum() == len(inputs.contexts)
    assert made.contexts[-1] == 0, "the last row owns the tokens at the end"


def test_a_step_without_rows_is_padding_alone():
    for shape in LARGE_SHAPES:
        made = pad_to_shape(EMPTY_BATCH, shape)
        assert made.q_starts[-1] == shape.tokens
        assert len(made.q_starts) == shape.rows + 1
        assert (made.token_slots == -1).all()
        assert not made.contexts.any()


@pytest.mark.parametrize(
    ("rows", "max_tokens"),
    [
        ([(CAPTURED_TOKENS + 1, 0, True)], 8192),
        ([(100, 0, True)], 64),
        ([(2, 0, True)] * MAX_PROMPT_ROWS, 8192),
        ([(9, 0, True)] * PROMPT_ROWS, 8192),
        ([(1, 3, True)] * 257 + [(9, 0, True)], 8192),
    ],
    ids=["many tokens", "more than a step may have", "many prompts", "longer ones", "many decodes"],
)
def test_other_steps_have_no_shape(rows, max_tokens):
    assert select_graph_shape(inputs_of(rows), graph_shapes(max_tokens, 256)) is None


@given(ROWS, st.integers(1, 8192), st.integers(20, 600), st.integers(1024, 4096))
def test_the_shape_is_the_smallest_that_holds_the_step(rows, max_tokens, max_rows, captured):
    inputs, shapes = inputs_of(rows), graph_shapes(max_tokens, max_rows, captured)
    assert shapes == sorted(shapes)
    shape = select_graph_shape(inputs, shapes)
    prompts = len(inputs.slots) - inputs.num_decodes
    holding = [
        one
        for one in shapes
        if inputs.num_decodes <= one.decodes
        and prompts < one.prompt_rows
        and one.tokens >= len(inputs.token_ids) - inputs.num_decodes + one.decodes
    ]
    if shape is not None:
        assert shape == holding[0]
        assert shape.tokens - len(inputs.token_ids) <= max_padding(shape)
    else:
        assert not holding or holding[0].tokens - len(inputs.token_ids) > max_padding(holding[0])


def test_the_shapes_are_few_and_fit_the_budget():
    assert 15 < len(SHAPES) < 40
    assert len(LARGE_SHAPES) - len(graph_shapes(8192, 512)) == 12
    assert sorted(LARGE_SHAPES) == LARGE_SHAPES
    assert graph_shapes(63, 256) == []
    few = graph_shapes(8192, 5)
    assert {shape.decodes for shape in few} == {0, 5}
    assert max(shape.tokens for shape in graph_shapes(500, 256)) == 384


def test_the_shape_of_128_tokens_alone_has_more_rows_of_prompts():
    more = {shape for shape in LARGE_SHAPES if shape.rows != shape.decodes + PROMPT_ROWS}
    assert more == {shape for shape in LARGE_SHAPES if shape.tokens == 128}
    assert GraphShape(128, 16).rows == 16 + MAX_PROMPT_ROWS
    few, crowd = [(2, 0, True)] * (PROMPT_ROWS - 1), [(4, 0, True)] * (MAX_PROMPT_ROWS - 1)
    assert select_graph_shape(inputs_of(few), SHAPES) == (64, 0, "")
    assert select_graph_shape(inputs_of([*few, (2, 0, True)]), SHAPES) == (128, 0, "")
    assert select_graph_shape(inputs_of(crowd), SHAPES) == (128, 0, "")


def test_much_padding_is_worse_than_single_launches():
    assert select_graph_shape(inputs_of([(500, 0, True)]), SHAPES).tokens == 512
    shapes, decodes = graph_shapes(8192, 512), [(1, 3, True)] * 385
    assert select_graph_shape(inputs_of([*decodes, (255, 0, True)]), shapes) == (768, 512, "")
    assert select_graph_shape(inputs_of([*decodes, (257, 0, True)]), shapes) is None


@pytest.mark.parametrize(
    ("decodes", "prompts", "shape"),
    [
        (20, [1024], (1280, 256, "")),
        (256, [1024], (1280, 256, "")),
        (257, [768], (1280, 512, "")),
        (3, [700, 700, 700], (2560, 256, "")),
        (0, [4096], None),
        (1, [3840], (4096, 256, "")),
        (1, [3841], None),
    ],
)
def test_small_models_have_large_shapes(decodes, prompts, shape):
    rows = [(1, 3, True)] * decodes + [(count, 0, True) for count in prompts]
    assert select_graph_shape(inputs_of(rows), LARGE_SHAPES) == shape

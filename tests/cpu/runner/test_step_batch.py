"""What a step's tensors are made of, from plans written by hand."""

import random
from types import SimpleNamespace

import numpy as np

from quire.core.types import UNKNOWN, Request, Row, Sequence, StepPlan, StopConditions, Wants
from quire.runner import step_batch
from quire.runner.slots import SlotTables, TableShape
from quire.runner.step_batch import build_step_batch

BLOCK = 4


def sequence(name, prompt, output=(), *, slot, table):
    request = Request(name, tuple(prompt), StopConditions(max_tokens=9))
    return Sequence(request, 0, [*prompt, *output], (list(table),), slot=slot)


def gathered(*rows):
    return build_step_batch(StepPlan(1, rows, joins=tuple(row.seq for row in rows)))


def updated(slots, step, *rows, **more):
    return [tuple(change) for change in slots.collect_updates(StepPlan(step, rows, **more))]


def test_rows_of_prompts_and_outputs_are_packed_those_of_one_token_first():
    a = sequence("a", range(10, 16), slot=2, table=[7, 3])
    b = sequence("b", [20, 21], [22, UNKNOWN], slot=0, table=[5])
    c = sequence("c", range(30, 39), slot=1, table=[1, 2, 0])
    made = gathered(
        Row(a, 2, 4, Wants.TOKEN), Row(b, 3, 1, Wants.TOKEN), Row(c, 0, 5, Wants.NOTHING)
    )
    assert made.rows == [1, 0, 2]
    assert (made.num_decodes, made.max_query, made.max_context) == (1, 5, 6)
    assert made.token_ids.tolist() == [UNKNOWN, 12, 13, 14, 15, 30, 31, 32, 33, 34]
    assert made.token_slots.tolist() == [0, 2, 2, 2, 2, 1, 1, 1, 1, 1]
    assert made.positions.tolist() == [3, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert made.q_starts.tolist() == [0, 1, 5, 10]
    assert made.contexts.tolist() == [4, 6, 5]
    assert made.slots.tolist() == [0, 2, 1]
    assert made.sampled_tokens.tolist() == [0, 4]
    assert (made.sampled_rows, made.sampled_slots) == ([1, 0], (0, 2))
    assert made.num_outputs.tolist() == [2, 0], "how many outputs each has: the random counter"
    assert not made.decode_only


def test_a_step_of_last_tokens_is_decode_only():
    a = sequence("a", [1, 2, 3], [4], slot=0, table=[0])
    b = sequence("b", [9], slot=1, table=[1])
    made = gathered(Row(a, 3, 1, Wants.TOKEN), Row(b, 0, 1, Wants.TOKEN))
    assert made.decode_only
    assert made.positions.tolist() == [3, 0]
    assert made.num_outputs.tolist() == [1, 0]
    assert (list(made.sampled_rows), made.sampled_slots) == ([0, 1], (0, 1))
    assert (made.num_decodes, made.max_query, made.max_context) == (2, 1, 4)


def test_what_was_gathered_does_not_change_with_the_scheduler_s_objects():
    slots = SlotTables(TableShape(4, 8, 1, BLOCK))
    a = sequence("a", [1, 2, 3], slot=0, table=[6])
    made = gathered(Row(a, 0, 3, Wants.TOKEN))
    changes = slots.collect_updates(StepPlan(1, (Row(a, 0, 3, Wants.TOKEN),), joins=(a,)))
    a.tokens[0] = 99
    a.tables[0][0] = 5
    assert made.token_ids.tolist() == [1, 2, 3]
    assert changes == [(0, 0, 0, [6])]


def test_tables_grow_by_what_was_appended_and_move_whole():
    slots = SlotTables(TableShape(4, 8, 1, BLOCK))
    a = sequence("a", range(20), slot=3, table=[6])
    assert updated(slots, 1, Row(a, 0, 4, Wants.NOTHING), joins=(a,)) == [(0, 3, 0, [6])]
    a.tables[0].append(2)
    assert updated(slots, 2, Row(a, 4, 4, Wants.NOTHING)) == [(0, 3, 1, [2])]
    assert updated(slots, 3, Row(a, 8, 1, Wants.NOTHING)) == []
    a.tables[0][0] = 1
    assert updated(slots, 4, Row(a, 9, 1, Wants.NOTHING), changed_tables=(a,)) == [
        (0, 3, 0, [1, 2])
    ]


def test_a_row_of_one_token_brings_a_block_when_it_begins_one_and_all_when_it_joins():
    slots = SlotTables(TableShape(4, 8, 2, BLOCK))
    a = Sequence(Request("a", (1,) * 6, StopConditions(9)), 0, [1] * 6, ([4, 5], [0, 1]), slot=1)
    rows = (Row(a, 5, 1, Wants.TOKEN),)
    assert updated(slots, 1, *rows, joins=(a,)) == [(0, 1, 0, [4, 5]), (1, 1, 0, [0, 1])]
    assert updated(slots, 2, Row(a, 6, 1, Wants.TOKEN)) == []
    for table in a.tables:
        table.append(7)
    assert updated(slots, 3, Row(a, 8, 1, Wants.TOKEN)) == [(0, 1, 2, [7]), (1, 1, 2, [7])]


def test_a_slot_serves_its_next_sequence_from_the_start():
    slots = SlotTables(TableShape(1, 8, 1, BLOCK))
    a = sequence("a", range(8), slot=0, table=[6, 7])
    updated(slots, 1, Row(a, 0, 8, Wants.TOKEN), joins=(a,))
    b = sequence("b", range(4), slot=0, table=[3])
    assert updated(slots, 2, Row(b, 0, 4, Wants.TOKEN), joins=(b,), leaves=(0,)) == [(0, 0, 0, [3])]


def test_a_step_of_rows_that_decode_with_drafts_is_built_as_any_other():
    """Its own function, which is quicker, gives the numbers of the one for all steps."""
    draw, compared = random.Random(1), 0
    while compared < 100:
        planned = []
        for _ in range(draw.randrange(1, 9)):
            length, drafts = draw.randrange(5, 30), draw.randrange(4)
            request = SimpleNamespace(prompt=(0,) * draw.randrange(1, length + 1))
            seq = SimpleNamespace(
                slot=draw.randrange(50),
                tokens=[draw.randrange(90) for _ in range(length)],
                drafts=tuple(range(drafts + draw.randrange(2))),
                request=request,
            )
            planned.append(Row(seq, length - 1, 1 + drafts, Wants.TOKEN, drafts))
        if not any(row.drafts for row in planned):
            continue
        want = step_batch._build_mixed_batch(tuple(planned))
        got = step_batch.build_step_batch(StepPlan(1, tuple(planned)))
        for name in want.__slots__:
            one, other = getattr(got, name), getattr(want, name)
            if isinstance(other, np.ndarray):
                assert one.dtype == other.dtype, name
                assert one.tolist() == other.tolist(), name
            else:
                assert one == other, name
        compared += 1

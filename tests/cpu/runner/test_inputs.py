"""What a step's tensors are made of, from plans written by hand."""

import numpy as np

from quire.core.types import UNKNOWN, Request, Row, Sequence, StepPlan, Stop
from quire.runner.inputs import gather
from quire.runner.slots import Slots

BLOCK = 4


def sequence(name, prompt, output=(), *, slot, table):
    request = Request(name, tuple(prompt), Stop(max_tokens=9))
    return Sequence(request, 0, [*prompt, *output], (list(table),), slot=slot)


def gathered(*rows, slots=None):
    slots = slots or Slots(max_seqs=4, max_blocks=8, groups=1)
    plan = StepPlan(1, rows, joins=tuple(row.seq for row in rows))
    slots.update(plan)
    return gather(plan, slots, BLOCK)


def test_rows_of_prompts_and_outputs_are_packed():
    a = sequence("a", range(10, 16), slot=2, table=[7, 3])
    b = sequence("b", [20, 21], [22, UNKNOWN], slot=0, table=[5])
    c = sequence("c", range(30, 39), slot=1, table=[1, 2, 0])
    made = gathered(Row(a, 2, 4, True), Row(b, 3, 1, True), Row(c, 0, 5, False))
    assert made.token_ids.tolist() == [12, 13, 14, 15, UNKNOWN, 30, 31, 32, 33, 34]
    assert made.positions.tolist() == [2, 3, 4, 5, 3, 0, 1, 2, 3, 4]
    assert made.q_starts.tolist() == [0, 4, 5, 10]
    assert made.contexts.tolist() == [6, 4, 5]
    assert made.kv_slots[0].tolist() == [30, 31, 12, 13, 23, 4, 5, 6, 7, 8]
    assert made.tables[0].tolist() == [[7, 3], [5, -1], [1, 2]]
    assert made.late.tolist() == [4]
    assert made.late_slots.tolist() == [0]
    assert made.sampled.tolist() == [3, 4]
    assert (made.sampled_rows, made.sampled_slots) == ((0, 1), (2, 0))
    assert made.outputs == (0, 2), "how many outputs each has: the random counter"
    assert not made.decode_only


def test_a_step_of_last_tokens_is_decode_only():
    a = sequence("a", [1, 2, 3], [4], slot=0, table=[0])
    b = sequence("b", [9], slot=1, table=[1])
    made = gathered(Row(a, 3, 1, True), Row(b, 0, 1, True))
    assert made.decode_only
    assert made.positions.tolist() == [3, 0]
    assert made.outputs == (1, 0)


def test_what_was_gathered_does_not_change_with_the_scheduler_s_objects():
    slots = Slots(max_seqs=4, max_blocks=8, groups=1)
    a = sequence("a", [1, 2, 3], slot=0, table=[6])
    made = gathered(Row(a, 0, 3, True), slots=slots)
    a.tokens[0] = 99
    a.tables[0][0] = 5
    slots.tables[0][:] = 0
    assert made.token_ids.tolist() == [1, 2, 3]
    assert made.tables[0].tolist() == [[6]]


def test_tables_grow_by_what_was_appended_and_move_whole():
    slots = Slots(max_seqs=4, max_blocks=8, groups=1)
    a = sequence("a", range(20), slot=3, table=[6])
    slots.update(StepPlan(1, (Row(a, 0, 4, False),), joins=(a,)))
    a.tables[0].append(2)
    slots.update(StepPlan(2, (Row(a, 4, 4, False),)))
    assert slots.tables[0][3, :2].tolist() == [6, 2]
    a.tables[0][0] = 1
    slots.update(StepPlan(3, (Row(a, 8, 4, False),), moved=(a,)))
    assert slots.tables[0][3, :2].tolist() == [1, 2]


def test_a_slot_serves_its_next_sequence_from_the_start():
    slots = Slots(max_seqs=1, max_blocks=8, groups=1)
    a = sequence("a", range(8), slot=0, table=[6, 7])
    slots.update(StepPlan(1, (Row(a, 0, 8, True),), joins=(a,)))
    b = sequence("b", range(4), slot=0, table=[3])
    slots.update(StepPlan(2, (Row(b, 0, 4, True),), joins=(b,), leaves=(0,)))
    assert slots.tables[0][0, 0] == 3
    assert np.all(slots.tables[0][0, 2:] == -1)

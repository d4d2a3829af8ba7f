"""What takes a chain of drafts from pass to pass, beside loops over numbers."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.gpu.runtime import chain_io
from quire.kernels.gpu.runtime.chain_io import ANY_TOKEN, PassInputs
from quire.runner.gpu.draft_chain import ChainResult, _expected_tokens, _known_tokens
from quire.runner.step_batch import EMPTY_BATCH, DraftInputs, ahead_code
from quire.sampling.step_sampling import StepTokens

BLOCK, STRIDE = 4, 32


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def drawn_rows(draw, count, ahead):
    """Rows of a step: sampled tokens, drafts behind each, contexts; and where each row ends. Some
    rows have drafts that are in `ahead`."""
    chosen, expected, contexts, rows, ends = [], [], [], [], []
    before = draw.sample(range(STRIDE), count)  # of the step before
    for _ in range(count):
        tokens, start = draw.randrange(1, 6), draw.randrange(1, 30)
        rows.append((len(chosen), tokens))
        sampled = [draw.randrange(9) for _ in range(tokens)]
        drafts = [draw.choice([token, token, 9, ANY_TOKEN]) for token in sampled[:-1]] + [-1]
        agree = [draft in (token, ANY_TOKEN) for token, draft in zip(sampled, drafts)]
        ends.append(len(chosen) + agree.index(False))
        if draw.random() < 0.5 and ANY_TOKEN not in drafts:
            place = before[len(rows) - 1]
            ahead[2 : 1 + tokens, place] = ints(*drafts[:-1])
            drafts = [ahead_code(place, j) for j in range(1, tokens)] + [-1]
        chosen += sampled
        expected += drafts
        contexts += range(start, start + tokens)
    return chosen, expected, contexts, rows, ends


@pytest.mark.parametrize("count", [1, 5, 17])
def test_a_chain_begins_behind_the_last_accepted_token_of_each_row(count):
    ahead = torch.full((2 + 4, STRIDE), 50, dtype=torch.int32)
    chosen, expected, contexts, rows, want = drawn_rows(random.Random(count), count, ahead)
    drafts = ahead[2:].clone()
    table = torch.zeros((4, STRIDE), dtype=torch.int32)
    table[:2, :count] = torch.tensor(rows, dtype=torch.int32).T
    ends, places = torch.full((2, count + 2), 7, dtype=torch.int32)
    number = ints(5)
    chain_io.find_ends(
        ints(*chosen), ints(*expected), ints(*contexts), table, ends, places, number, ahead, 5
    )
    assert ends.tolist() == [*want, 0, 0]
    assert places[:count].tolist() == [contexts[end] - 1 for end in want]
    assert number.tolist() == [0]
    assert ahead[0, :count].tolist() == [end - first for end, (first, _) in zip(want, rows)]
    assert ahead[1, :count].tolist() == [chosen[end] for end in want]
    assert torch.equal(ahead[2:], drafts)


def test_a_pass_follows_in_its_blocks_and_rows_without_room_are_padding():
    tables = torch.arange(2 * 3 * 4, dtype=torch.int32).view(2, 3, 4)  # groups, slots, blocks
    table = torch.zeros((4, STRIDE), dtype=torch.int32)
    table[2, :4] = ints(8, 8, 16, 0)  # positions that have blocks
    table[3, :4] = ints(2, 0, 1, -1)
    places, number = ints(6, 7, 9, 0), ints(1)
    inputs = PassInputs(*torch.full((4, 4), 99, dtype=torch.int32), torch.full((2, 4), 99))
    drafts = torch.zeros((3, STRIDE), dtype=torch.int32)
    chain_io.advance_rows(number, ints(5, 6, 7, 8), table, tables, places, inputs, drafts, BLOCK)
    assert number.tolist() == [2]
    assert drafts[:, :4].tolist() == [[0] * 4, [5, 6, 7, 8], [0] * 4]
    assert places.tolist() == [7, 8, 10, 1]
    assert inputs.tokens.tolist() == [5, 6, 7, 8]
    assert inputs.positions.tolist() == [7, 0, 10, 0]
    assert inputs.contexts.tolist() == [8, 0, 11, 0]
    assert inputs.rows.tolist() == [2, 0, 1, 0]
    of = lambda group, slot, place: int(tables[group, slot, place // BLOCK]) * BLOCK + place % BLOCK  # noqa: E731
    for group in (0, 1):
        want = [of(group, 2, 7), -1, of(group, 1, 10), -1]
        assert inputs.kv_slots[group].tolist() == want


def test_a_row_has_as_many_drafts_as_its_blocks_and_its_request_allow():
    accepted = SimpleNamespace(
        sampled_rows=[0, 0, 1, 3, 3],  # row 2 is a part of a prompt
        sampled_tokens=np.array([0, 1, 2, 5, 6]),
        positions=np.array([10, 11, 5, 0, 0, 8, 9]),
        accepted=lambda ids, ends: [0, 1, 2, 3],
    )
    drafts = np.arange(15, dtype=np.int32).reshape(3, 5)  # [D, m], padded by one
    arrays = np.array([0, 1, 3]), np.array([3, 0, 2]), np.array([13, 16, 16])
    result = ChainResult(*arrays, drafts)
    found = result.as_field(accepted, StepTokens([0] * 5))
    assert found == {"drafts": {0: (0, 5), 3: (3, 8)}}
    assert result.of_row(3) == [3, 8, 13]


@pytest.mark.parametrize("has_rotary", [False, True])
def test_tokens_are_placed_behind_what_the_rows_before_yield(has_rotary):
    ahead = torch.zeros((2 + 3, STRIDE), dtype=torch.int32)
    ahead[0, [4, 2]], ahead[1, [4, 2]], ahead[2, 2], ahead[3, 2] = ints(2, 0), ints(70, 80), 90, 91
    codes = [ahead_code(4, 0), ahead_code(2, 0), ahead_code(2, 1), ahead_code(2, 2), 7, -5]
    positions = ints(10, 20, 21, 22, 30, 31)
    inputs = SimpleNamespace(
        token_ids=ints(*codes), positions=positions, contexts=ints(11, 21, 22, 23, 32),
        outputs=ints(1, 2, 3, 4, 9, 9), rotary=ints(0, 1, 2, 3, 4, 5) if has_rotary else positions,
    )  # fmt: skip
    written = inputs.token_ids, inputs.positions, inputs.contexts, inputs.outputs
    chain_io.place_tokens(*written, inputs.rotary if has_rotary else None, ahead, 4)
    assert inputs.token_ids.tolist() == [70, 80, 90, 91, 7, -5]
    assert inputs.positions.tolist() == [12, 20, 21, 22, 30, 31]
    assert inputs.contexts.tolist() == [13, 21, 22, 23, 32]
    assert inputs.outputs.tolist() == [3, 2, 3, 4, 9, 9]
    assert not has_rotary or inputs.rotary.tolist() == [2, 1, 2, 3, 4, 5]


def test_a_head_is_given_the_token_behind_each():
    """Rows: two tokens with a draft, a part of a prompt before an image, one before token 9."""
    batch = replace(
        EMPTY_BATCH,
        token_ids=np.array([-1, 5, 11, 12, -7, 21, 22]),
        q_starts=np.array([0, 1, 2, 5, 7]),
        sampled_tokens=np.array([0, 1]),
        draft_inputs=DraftInputs(np.array([-1, -1, -8, 9]), np.ones(4), np.ones(4)),
    )
    assert _known_tokens(batch).tolist() == [-1, -2, 12, 0, 0, 22, 9]


def test_made_up_acceptance_takes_the_place_of_drafts():
    batch = SimpleNamespace(sampled_tokens=[0, 1, 2], next_drafts=[7, 8, -1], agreement=())
    assert _expected_tokens(batch).tolist() == [7, 8, -1]
    batch.agreement = [True, False, True]
    assert _expected_tokens(batch).tolist() == [ANY_TOKEN, -1, -1]
    batch.next_drafts = [ahead_code(3, 1), ahead_code(3, 2), -1]
    assert _expected_tokens(batch).tolist() == [ANY_TOKEN, -1, -1]
    batch.next_drafts = ()
    assert _expected_tokens(batch).tolist() == [-1, -1, -1]

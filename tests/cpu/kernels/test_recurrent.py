"""The promises of recurrent kernels about bits: cuts of a prompt, other rows, states that move."""

import itertools

import pytest
import torch
from torch import Tensor

from quire.kernels.causal_conv import causal_conv
from quire.kernels.framework.op import OPS
from quire.kernels.gated_delta_rule import gated_delta_rule
from quire.kernels.selective_scan import selective_scan
from quire.kernels.ssd_scan import ssd_scan
from quire.kernels.state_rows import StateRows

SCANS = [causal_conv, ssd_scan, selective_scan, gated_delta_rule]
TOKENS = 72  # of the last case of each op

pytestmark = [
    pytest.mark.usefixtures("seeded", "poisoned", "native"),
    pytest.mark.parametrize("op", SCANS, ids=lambda op: op.__name__),
]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def case(request, op):
    *_, case = OPS[op.__name__].cases(torch.device("cpu"))
    dtype = request.param
    return {k: v.to(dtype) if _is_bf16(v) else v for k, v in case.items()}


def _is_bf16(value):
    return isinstance(value, Tensor) and value.dtype == torch.bfloat16


def run(op, case, state, first, end, rows):
    """The outputs of tokens [first, end); `state` is written."""
    cut = {k: v[first:end] for k, v in case.items() if isinstance(v, Tensor) and len(v) == TOKENS}
    return op(**{**case, **cut, "state": state, "rows": rows})


def prompt(op, case, state, first, end):
    rows, count = torch.tensor([1]), end - first
    one = StateRows(rows, 1) if count == 1 else StateRows(rows, 0, ((0, count),))
    return run(op, case, state, first, end, one)


def test_a_prompt_gives_the_same_bits_however_it_is_cut(op, case):
    whole_state, state = case["state"].clone(), case["state"].clone()
    whole = prompt(op, case, whole_state, 0, TOKENS)
    ends = [0, 1, 2, 19, 51, TOKENS]
    parts = [prompt(op, case, state, low, high) for low, high in itertools.pairwise(ends)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(state, whole_state)
    assert torch.equal(state[[0, 2]], case["state"][[0, 2]])


def test_a_row_gives_the_same_bits_whatever_is_beside_it(op, case):
    state = case["state"].clone()
    rows = StateRows(torch.tensor([4, 2, 0, 1]), 3, ((3, 40),))
    together = run(op, case, state, 0, 40, rows)
    want = case["state"].clone()
    for i, row in enumerate((4, 2, 0)):
        alone = run(op, case, want, i, i + 1, StateRows(torch.tensor([row]), 1))
        assert torch.equal(alone[0], together[i])
    assert torch.equal(prompt(op, case, want, 3, 40), together[3:])
    assert torch.equal(state, want)


def test_a_row_continues_from_the_state_that_the_row_before_it_wrote(op, case):
    state, want = case["state"].clone(), case["state"].clone()
    targets = torch.tensor([2, 3, 4])
    got = run(op, case, state, 0, 3, StateRows(targets, 3, sources=torch.tensor([1, 2, 3])))
    assert torch.equal(prompt(op, case, want, 0, 3), got)
    assert torch.equal(state[4], want[1])
    assert torch.equal(state[1], case["state"][1])
    rows = StateRows(torch.tensor([0]), 0, ((0, 30),), sources=torch.tensor([1]))
    got, want = run(op, case, state, 0, 30, rows), case["state"].clone()
    assert torch.equal(prompt(op, case, want, 0, 30), got)
    assert torch.equal(state[0], want[1])
    assert torch.equal(state[1], case["state"][1])

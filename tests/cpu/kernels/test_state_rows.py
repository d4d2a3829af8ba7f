"""Ops of recurrent layers keep the state after each token of a row with drafts."""

import inspect

import pytest
import torch

from quire.kernels import causal_conv, gated_delta_rule, selective_scan, ssd_scan
from quire.kernels.state_rows import StateRows

OPS = {
    "causal_conv": causal_conv,
    "gated_delta_rule": gated_delta_rule,
    "selective_scan": selective_scan,
    "ssd_scan": ssd_scan,
}
ONE_TOKEN = ("x", "dt", "b", "c", "z", "q", "k", "v", "a")


def of_token(case, i):
    return {name: one[i : i + 1] if name in ONE_TOKEN else one for name, one in case.items()}


@pytest.mark.parametrize("name", OPS)
def test_a_row_with_drafts_is_its_tokens_one_by_one(name):
    torch.manual_seed(0)
    module = OPS[name]
    op = getattr(module, name)
    case = next(one for one in module._cases(torch.device("cpu")) if not one["rows"].spans)
    assert set(case) == set(inspect.signature(op).parameters)
    start, slot, other = case["state"].clone(), 1, 4
    want, states, alone = [], [], {**case, "state": start.clone()}
    for i, row in enumerate((slot, slot, other)):  # two tokens of a sequence, and another sequence
        alone["rows"] = StateRows(torch.tensor([row]), 1)
        want.append(op(**of_token(alone, i)))
        states.append(alone["state"][row].clone())
    rows = StateRows(
        torch.tensor([slot, 3, other]),
        3,
        sources=torch.tensor([slot, slot, other]),
        order=(torch.tensor([0, 2]), torch.tensor([1])),
    )
    case["state"] = found = start.clone()
    out = op(**{**case, "rows": rows})
    assert torch.allclose(out, torch.cat(want), atol=1e-6)
    for row, state in zip((slot, 3, other), states):
        assert torch.allclose(found[row], state, atol=1e-6)
    rest = [0, 2, 5]
    assert torch.equal(found[rest], start[rest]), "no other row is written"

"""Rows that go in chunks against the recurrences in float64, token by token."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from quire.kernels.framework.op import OPS
from quire.kernels.gated_delta_rule import gated_delta_rule  # noqa: F401 - registers the op
from quire.kernels.ssd_scan import ssd_scan  # noqa: F401 - registers the op
from quire.kernels.state_rows import StateRows
from tests.op_cases import flat, poison

pytestmark = pytest.mark.slow("kernels in the interpreter")

DECODES = 2
LENGTHS = (5, 64, 130, 0, 70)  # of prompts; the last is padding
ROWS = torch.tensor([3, 1, 0, 5, 2, 6, 6])
BOUND, ALIKE = 5e-3, 4e-2
"""Of the largest difference, as a share of the largest number. Where keys are alike, each token
corrects what the one before it has written, and the rounding of operands adds up."""


@pytest.fixture
def device():
    return "cpu"


def rows_of(device, decodes=DECODES, lengths=LENGTHS, rows=ROWS):
    starts = [*range(decodes), *itertools.accumulate(lengths, initial=decodes)]
    starts = torch.tensor(starts, dtype=torch.int32, device=device)
    return StateRows(rows.to(device), decodes, starts=starts)


def delta_case(tokens, dtype, device, alike=False, sizes=(24, 40)):
    """alike: all keys and gates are the same, as those of one token that repeats."""
    make = lambda *shape: torch.randn(*shape, device=device).to(dtype)  # noqa: E731
    keys, values = sizes
    k = make(1, 1, keys).expand(tokens, 1, keys).contiguous() if alike else make(tokens, 1, keys)
    gates = torch.full((tokens, 2), 3.0 if alike else 0.0, device=device).to(dtype)
    return {
        "q": make(tokens, 1, keys),
        "k": k,
        "v": make(tokens, 2, values),
        "a": make(tokens, 5)[:, :2] - (9 if alike else 0),
        "b": gates if alike else make(tokens, 2),
        "a_log": torch.rand(2, device=device),
        "dt_bias": torch.randn(2, device=device),
    }, (2, keys, values)


def ssd_case(tokens, dtype, device, sizes=(40, 24)):
    make = lambda *shape: torch.randn(*shape, device=device).to(dtype)  # noqa: E731
    size, numbers = sizes
    return {
        "x": make(tokens, 2, size),
        "dt": make(tokens, 5)[:, 2:4],
        "b": make(tokens, 1, numbers),
        "c": make(tokens, 1, numbers),
        "a_log": torch.rand(2, device=device),
        "d": torch.randn(2, device=device),
        "dt_bias": torch.randn(2, device=device),
        "dt_limit": (0.01, 3.0),
    }, (2, size, numbers)


CASES = {
    "gated_delta_rule": ("gated_delta_rule", delta_case),
    "keys alike": ("gated_delta_rule", lambda *args: delta_case(*args, alike=True)),
    "ssd_scan": ("ssd_scan", ssd_case),
}


def wanted(name, case, state, rows):
    """The op's outputs and states in float64, token by token."""
    given = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in case.items()}
    state, starts = state.double(), rows.token_starts().tolist()
    out = torch.zeros_like(given["v" if name == "gated_delta_rule" else "x"])
    for row, (start, end) in zip(rows.rows.tolist(), itertools.pairwise(starts)):
        if row == len(state) - 1:
            continue
        for t in range(start, end):
            step = {k: v[t] for k, v in given.items() if k in ("x", *"qkvabc", "dt")}
            state[row], out[t] = STEPS[name](state[row], given, **step)
    return out, state


def delta_step(state, given, q, k, v, a, b):
    decay = torch.exp(-given["a_log"].exp() * torch.nn.functional.softplus(a + given["dt_bias"]))
    unit = lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)  # noqa: E731
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    state = state * decay[:, None, None]
    change = (v - (state * k[..., None]).sum(1)) * b.sigmoid()[:, None]
    state = state + k[..., None] * change[:, None]
    return state, (state * q[..., None]).sum(1)


def ssd_step(state, given, x, dt, b, c):
    step = torch.nn.functional.softplus(dt + given["dt_bias"]).clamp(*given["dt_limit"])
    decay = torch.exp(-given["a_log"].exp() * step)
    state = state * decay[:, None, None] + (x * step[:, None])[..., None] * b[:, None]
    return state, (state * c[:, None]).sum(-1) + given["d"][:, None] * x


STEPS = {"gated_delta_rule": delta_step, "ssd_scan": ssd_step}


def run(name, case, state, rows):
    gpu, given = OPS[name].gpu, {**case, "state": state, "rows": rows}
    out = gpu.outputs(**given)
    poison(flat(out), given)
    gpu.launch(out, **given)
    return out


def off(got, want):
    """The largest difference, as a share of the largest number."""
    return ((got.double() - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("name", CASES)
def test_chunks_are_near_the_recurrence(name, device):
    torch.manual_seed(3)
    bound = ALIKE if name == "keys alike" else BOUND
    name, make = CASES[name]
    rows = rows_of(device)
    case, shape = make(DECODES + sum(LENGTHS), torch.bfloat16, device)
    before = torch.randn(7, *shape, device=device)
    before[-1] = torch.nan  # padding: neither read nor written
    state = before.clone()
    got = run(name, case, state, rows)
    want, states = wanted(name, case, before, rows)
    assert off(got, want) < bound
    assert off(state[:-1], states[:-1]) < bound
    assert state[-1].isnan().all()
    assert not got[-LENGTHS[-1] :].any()
    assert torch.equal(state[4], before[4])  # of no row


@pytest.mark.parametrize("name", ["gated_delta_rule", "ssd_scan"])
def test_a_row_has_the_same_bits_whatever_is_beside_it(name, device):
    """One in chunks beside the longest that is not."""
    torch.manual_seed(4)
    ends, (name, make) = (0, 63, 133), CASES[name]
    case, shape = make(ends[-1], torch.bfloat16, device)
    before = torch.randn(4, *shape, device=device)
    state, alone = before.clone(), before.clone()
    both = rows_of(device, 0, (63, 70), torch.tensor([2, 0]))
    got = run(name, case, state, both)
    for row, (start, end) in zip((2, 0), itertools.pairwise(ends)):
        cut = {k: v[start:end] if k in ("x", *"qkvabc", "dt") else v for k, v in case.items()}
        one = rows_of(device, 0, (end - start,), torch.tensor([row]))
        assert torch.equal(run(name, cut, alone, one), got[start:end])
    assert torch.equal(alone, state)

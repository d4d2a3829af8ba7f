"""Rows that go in chunks on the device, also at sizes of published models."""

import pytest
import torch

from tests.cpu.gpu_kernels.test_chunk_scans import (
    BOUND,
    delta_case,
    off,
    rows_of,
    run,
    ssd_case,
    test_a_row_has_the_same_bits_whatever_is_beside_it,  # noqa: F401
    test_chunks_are_near_the_recurrence,  # noqa: F401
    wanted,
)

SIZES = {
    "gated_delta_rule": (delta_case, (128, 128)),
    "ssd_scan": (ssd_case, (64, 128)),
}


@pytest.fixture
def device():
    return "cuda"


@pytest.mark.parametrize("name", SIZES)
def test_a_long_prompt_is_near_the_recurrence(name, device):
    torch.manual_seed(6)
    make, sizes = SIZES[name]
    case, shape = make(700, torch.bfloat16, device, sizes=sizes)
    before = torch.randn(3, *shape, device=device)
    state, rows = before.clone(), rows_of(device, 0, (700,), torch.tensor([1]))
    got = run(name, case, state, rows)
    want, states = wanted(name, case, before, rows)
    assert off(got, want) < BOUND
    assert off(state, states) < BOUND

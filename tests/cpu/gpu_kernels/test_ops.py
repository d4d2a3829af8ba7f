"""Every op's GPU body against its reference, over the op's own cases, in the interpreter."""

import pytest
import torch

from quire.kernels.framework.op import OPS
from tests import tiers
from tests.op_cases import agree, elements, ops_on_gpu

pytest.importorskip("triton", reason="triton is not installed")
SMALL = 40_000  # elements of a case the interpreter does in time; larger ones run on a GPU


@pytest.mark.slow("kernels in the interpreter")
@pytest.mark.parametrize("name", ops_on_gpu())
def test_a_gpu_body_agrees_with_its_reference(name):
    torch.manual_seed(7)
    cases = sorted(OPS[name].cases(torch.device("cpu")), key=elements)
    taken, enough = 0, tiers.amount(1, len(cases))
    for case in cases:
        if elements(case) <= SMALL and taken < enough:
            taken += agree(name, case)
    assert taken >= tiers.amount(1, 2)

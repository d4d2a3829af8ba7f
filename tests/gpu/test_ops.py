"""Every op's GPU body against its reference, over the op's own cases, on the device."""

import pytest
import torch

from quire.kernels.framework.op import OPS
from tests.op_cases import agree, ops_on_gpu


@pytest.mark.parametrize("name", ops_on_gpu())
def test_a_gpu_body_agrees_with_its_reference(name):
    torch.manual_seed(7)
    assert sum(agree(name, case) for case in OPS[name].cases(torch.device("cuda"))) >= 2

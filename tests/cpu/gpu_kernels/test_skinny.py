"""A few rows times a matrix: the product, its bias, its activation."""

import pytest
import torch

from quire.kernels.act import act_mul

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize("rows", [2, 7, 16])
@pytest.mark.parametrize("inputs", [96, 100])
@pytest.mark.parametrize("kind", [None, "silu"])
def test_a_few_rows_are_multiplied(rows, inputs, kind):
    from quire.kernels.gpu import skinny
    from quire.kernels.gpu.gemv import Act

    torch.manual_seed(1)
    outputs = 40
    x = torch.randn(rows, 2 * inputs).bfloat16()[:, :inputs]
    w = (torch.randn(2 * outputs if kind else outputs, inputs) / inputs**0.5).bfloat16()
    bias = torch.randn(w.shape[0]).bfloat16()
    z = torch.full((rows, w.shape[0]), float("nan")).bfloat16()
    a = torch.full((rows, outputs), float("nan")).bfloat16()
    skinny.launch(z, x, w, bias, Act(kind, a) if kind else None, skinny.Band(16, 8, 32, 2, 1))
    want = torch.nn.functional.linear(x.float(), w.float(), bias.float()).bfloat16()
    torch.testing.assert_close(z, want, atol=2e-2, rtol=2e-2)
    if kind:
        torch.testing.assert_close(a, act_mul(z, kind), atol=2e-2, rtol=2e-2)

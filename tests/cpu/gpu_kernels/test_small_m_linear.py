"""A few rows times a matrix: the product, its bias, its activation, on the tensor cores or not."""

import pytest
import torch

from quire.kernels.act import act_mul
from tests import tiers

pytest.importorskip("triton", reason="triton is not installed")


def on_tensor_cores(*args):
    from quire.kernels.gpu.linear import small_m_gemm

    small_m_gemm.launch(*args, small_m_gemm.SmallMPlan(16, 8, 32, 2, 1))


def row_by_row(z, x, w, bias, act):
    from quire.kernels.gpu.linear import gemv, gemv_rows

    gemv_rows.launch(z, x, w, bias, act, gemv.GemvPlan(4, 32, 3, 1))


@pytest.mark.parametrize(
    ("rows", "inputs", "kind"),
    [
        (2, 100, None),
        (7, 96, "silu"),
        *tiers.long((2, 96, "silu"), (7, 100, "silu"), (7, 96, None)),
    ],
)
@pytest.mark.parametrize("launch", [on_tensor_cores, row_by_row])
def test_a_few_rows_are_multiplied(rows, inputs, kind, launch):
    from quire.kernels.gpu.linear.gemv import FusedActivation

    torch.manual_seed(1)
    outputs = 40
    x = torch.randn(rows, 2 * inputs).bfloat16()[:, :inputs]
    w = (torch.randn(2 * outputs if kind else outputs, inputs) / inputs**0.5).bfloat16()
    bias = torch.randn(w.shape[0]).bfloat16()
    z = torch.full((rows, w.shape[0]), float("nan")).bfloat16()
    a = torch.full((rows, outputs), float("nan")).bfloat16()
    launch(z, x, w, bias, FusedActivation(kind, a) if kind else None)
    want = torch.nn.functional.linear(x.float(), w.float(), bias.float()).bfloat16()
    torch.testing.assert_close(z, want, atol=2e-2, rtol=2e-2)
    if kind:
        torch.testing.assert_close(a, act_mul(z, kind), atol=2e-2, rtol=2e-2)

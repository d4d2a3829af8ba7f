"""Few rows times a matrix by the Gluon kernels, whose bodies run as Python here."""

import pytest
import torch

from quire.kernels.act import act_mul
from tests import tiers
from tests.cpu.gpu_kernels import gluon_on_torch

pytest.importorskip("triton.experimental.gluon", reason="Triton with Gluon is not installed")

PLANS = [
    ("registers", (8, 16, 2, 1)),
    ("ring", (8, 32, 32, 3, 2)),
    *tiers.long(
        ("registers", (16, 32, 1, 2)),
        ("registers", (8, 16, 4, 2)),
        ("ring", (16, 16, 64, 4, 1)),
    ),
]


@pytest.fixture
def in_python(monkeypatch):
    """Kernels run as Python."""
    from quire.kernels.gpu.linear import small_m_registers, small_m_ring

    functions = {
        "activate": lambda x, kind: x * torch.sigmoid(x),
        "launch_dependents": lambda: None,
        "wait_for_previous_kernel": lambda: None,
    }
    for module in (small_m_registers, small_m_ring):
        name = f"_{module.__name__.rpartition('.')[2]}"
        body = getattr(module, name)

        def launch(grid, tensors, numbers, consts, warps, pdl, body=body):
            gluon_on_torch.run(body, grid, tensors, numbers, consts, functions)

        monkeypatch.setattr(module, name, launch)


@pytest.mark.parametrize("kind", [None, "silu"])
@pytest.mark.parametrize(("kernel", "plan"), PLANS)
def test_a_few_rows_are_multiplied(kernel, plan, kind, in_python):
    from quire.kernels.gpu.linear import small_m_plans
    from quire.kernels.gpu.linear.gemv import FusedActivation

    torch.manual_seed(1)
    rows, inputs, outputs = 11, 256, 64
    x = torch.randn(rows, 2 * inputs).bfloat16()[:, :inputs]
    w = (torch.randn(2 * outputs if kind else outputs, inputs) / inputs**0.5).bfloat16()
    bias = torch.randn(w.shape[0]).bfloat16()
    z = torch.full((rows, w.shape[0]), float("nan")).bfloat16()
    a = torch.full((rows, outputs), float("nan")).bfloat16()
    act = FusedActivation(kind, a) if kind else None
    small_m_plans.launch(z, x, w, bias, act, small_m_plans.GluonPlan(kernel, plan))
    want = torch.nn.functional.linear(x.float(), w.float(), bias.float()).bfloat16()
    torch.testing.assert_close(z, want, atol=2e-2, rtol=2e-2)
    if kind:
        torch.testing.assert_close(a, act_mul(z, kind), atol=2e-2, rtol=2e-2)

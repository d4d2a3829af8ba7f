"""Few rows times a matrix by the Gluon kernels, whose bodies run as Python here."""

import pytest
import torch

from quire.kernels.act import act_mul
from quire.kernels.formats.lora_bank import LoraBank
from quire.kernels.framework.meta_device import on_meta_device
from quire.kernels.gpu.linear import small_m_plans
from quire.kernels.gpu.runtime.target import GpuTarget
from quire.kernels.lora import lora_linear, random_bank, random_rows, sort_rows
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
    from quire.kernels.gpu.lora import small_m_ring_lora

    functions = {
        "activate": lambda x, kind: x * torch.sigmoid(x),
        "launch_dependents": lambda: None,
        "wait_for_previous_kernel": lambda: None,
    }
    for module in (small_m_registers, small_m_ring, small_m_ring_lora):
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


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(("parts", "kind"), [((64, 32, 32), None), ((64, 64), "silu")])
def test_a_ring_has_the_adapters_of_its_rows(parts, kind, dora, in_python):
    from quire.kernels.gpu.linear import small_m_ring
    from quire.kernels.gpu.linear.gemv import FusedActivation
    from quire.kernels.gpu.lora import small_m_ring_lora

    torch.manual_seed(1)
    rows, inputs, outputs = 11, 256, sum(parts)
    x = torch.randn(rows, inputs).bfloat16()
    w, bias = (torch.randn(outputs, inputs) / 16).bfloat16(), torch.randn(outputs).bfloat16()
    ranks = [[16, 3, 8][: len(parts)], [0, 16, 1][: len(parts)]]
    cpu, ranks = torch.device("cpu"), [*ranks, [40] * len(parts)]  # the last is in no row
    bank = random_bank(ranks, inputs, parts, torch.bfloat16, cpu, dora=dora).narrow(16)
    given = random_rows(rows, 3, cpu)
    given.slots.clamp_(max=1)
    sort_rows(given)
    plan = small_m_ring.RingPlan(8, 32, 32, 3, 2)
    assert small_m_ring_lora.supports(bank, plan)

    def empty():
        width = outputs // 2 if kind else outputs
        act = FusedActivation(kind, torch.zeros(rows, width).bfloat16()) if kind else None
        return torch.full((rows, outputs), float("nan")).bfloat16(), act

    (base, _), (z, act) = empty(), empty()
    small_m_ring.launch(base, x, w, bias, empty()[1], plan)
    v = torch.full((rows, len(parts), bank.rank), float("nan"))
    for t, slot in enumerate(given.slots.tolist()):
        for p, rank in enumerate(ranks[slot] if slot >= 0 else ()):
            v[t, p, :rank] = bank.a[slot, p, :rank].float() @ x[t].float()
    small_m_ring_lora.launch(z, x, w, bias, bank, given, v, True, act, plan)
    want = lora_linear(base.clone(), x, bank, given)
    torch.testing.assert_close(z, want, atol=2e-2, rtol=2e-2)
    assert torch.equal(z[given.slots < 0], base[given.slots < 0])
    assert not torch.equal(z, base)
    if kind:
        torch.testing.assert_close(act.out, act_mul(z, kind), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "form"),
    [(8, 4096, 1024, "late"), (16, 4096, 1024, "beside"), (32, 6144, 4096, "beside")],
)
def test_rings_of_more_rows_have_adapters_beside_them(rows, outputs, inputs, form):
    from quire.kernels.gpu.lora import adapted_linear

    meta = torch.device("meta")
    with on_meta_device(GpuTarget((9, 0), 132)):
        bank = LoraBank.allocate(4, 16, inputs, (outputs,), torch.bfloat16, meta)
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=meta)
        assert small_m_plans.find_plan(rows, weight, False).kernel == "ring"
        assert adapted_linear._form_of(rows, weight, bank, False) == form

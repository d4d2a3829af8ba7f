"""Few rows times a matrix by the Gluon kernels, whose bodies run as Python here."""

from functools import partial

import pytest
import torch

from quire.kernels.act import act_mul
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
    from quire.kernels.gpu.linear import small_m_bands, small_m_registers, small_m_ring
    from quire.kernels.gpu.lora import (
        small_m_bands_lora,
        small_m_ring_groups,
        small_m_ring_lora,
    )

    functions = {
        "activate": lambda x, kind: x * torch.sigmoid(x),
        "launch_dependents": lambda: None,
        "wait_for_previous_kernel": lambda: None,
    }
    rings = small_m_ring, small_m_ring_lora, small_m_ring_groups
    for module in (small_m_registers, *rings, small_m_bands, small_m_bands_lora):
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


def adapted(parts, rows, inputs, dora):
    """Random x, weight, bias, bank and slots of rows, and v = A x of these."""
    outputs, cpu = sum(parts), torch.device("cpu")
    x = torch.randn(rows, inputs).bfloat16()
    w, bias = (torch.randn(outputs, inputs) / 16).bfloat16(), torch.randn(outputs).bfloat16()
    ranks = [[16, 3, 8][: len(parts)], [0, 16, 1][: len(parts)]]
    ranks = [*ranks, [40] * len(parts)]  # the last is in no row
    bank = random_bank(ranks, inputs, parts, torch.bfloat16, cpu, dora=dora).narrow(16)
    given = random_rows(rows, 3, cpu)
    given.slots[:] = torch.arange(rows) * 7 % 5 % 3 - 1
    sort_rows(given)
    v = torch.full((rows, len(parts), bank.rank), float("nan"))
    for t, slot in enumerate(given.slots.tolist()):
        for p, rank in enumerate(ranks[slot] if slot >= 0 else ()):
            v[t, p, :rank] = bank.a[slot, p, :rank].float() @ x[t].float()
    return x, w, bias, bank, given, v


def check_adapted(base_launch, launch, parts, rows, inputs, kind, dora):
    from quire.kernels.gpu.linear.gemv import FusedActivation

    torch.manual_seed(1)
    x, w, bias, bank, given, v = adapted(parts, rows, inputs, dora)
    outputs = sum(parts)

    def empty():
        width = outputs // 2 if kind else outputs
        act = FusedActivation(kind, torch.zeros(rows, width).bfloat16()) if kind else None
        return torch.full((rows, outputs), float("nan")).bfloat16(), act

    (base, base_act), (z, act) = empty(), empty()
    base_launch(base, x, w, bias, base_act)
    launch(z, x, w, bias, bank, given, v, True, act)
    want = lora_linear(base.clone(), x, bank, given)
    torch.testing.assert_close(z, want, atol=2e-2, rtol=2e-2)
    plain = given.slots < 0
    assert torch.equal(z[plain], base[plain])
    assert not torch.equal(z, base)
    if kind:
        assert torch.equal(act.out[plain], base_act.out[plain])
        torch.testing.assert_close(act.out, act_mul(z, kind), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("groups", [None, 1, 4])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(("parts", "kind"), [((64, 32, 32), None), ((64, 64), "silu")])
def test_a_ring_has_the_adapters_of_its_rows(parts, kind, dora, groups, in_python, monkeypatch):
    from quire.kernels.gpu.linear import small_m_ring
    from quire.kernels.gpu.lora import small_m_ring_groups, small_m_ring_lora

    body = small_m_ring_lora if groups is None else small_m_ring_groups
    monkeypatch.setattr(small_m_ring_groups, "GROUPS", groups)
    plan = small_m_ring.RingPlan(8, 32, 32, 3, 2)
    base, launch = partial(small_m_ring.launch, plan=plan), partial(body.launch, plan=plan)
    check_adapted(base, launch, parts, 11, 256, kind, dora)


@pytest.mark.parametrize("rows", [5, 8])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(("parts", "kind"), [((64, 32, 32), None), ((64, 64), "silu")])
def test_bands_have_the_adapters_of_their_rows(parts, kind, dora, rows, in_python):
    from quire.kernels.gpu.linear import small_m_bands
    from quire.kernels.gpu.lora import small_m_bands_lora

    plan = small_m_bands.BandsPlan(4, 32, 2, 3)

    def base(z, x, w, bias, act):
        small_m_bands.launch(z, x, w, bias, plan, act=act)

    launch = partial(small_m_bands_lora.launch, plan=plan)
    check_adapted(base, launch, parts, rows, 256, kind, dora)

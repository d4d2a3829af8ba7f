"""Two to eight rows times a matrix by bands, with the norm before and the sum after inside."""

import pytest
import torch

from quire.kernels.act import act_mul
from quire.kernels.framework import lazy_fusion
from quire.kernels.lora import lora_linear, random_bank, random_rows, sort_rows
from quire.kernels.rms_norm import rms_norm
from tests import tiers
from tests.cpu.gpu_kernels import gluon_on_torch
from tests.fused import call

pytest.importorskip("triton.experimental.gluon", reason="Triton with Gluon is not installed")

PLANS = [(2, 32, 3, 3), *tiers.long((4, 16, 2, 99), (1, 64, 5, 1), (4, 32, 4, 2))]
PLAN = ("warps", "columns", "stages", "programs")
OUTPUTS, INPUTS = 64, 256


@pytest.fixture
def in_python(monkeypatch):
    """The kernel runs as Python."""
    from quire.kernels.gpu.linear import small_m_bands

    functions = {
        "activate": lambda x, kind: x * torch.sigmoid(x),
        "launch_dependents": lambda: None,
        "wait_for_previous_kernel": lambda: None,
    }
    body = small_m_bands._small_m_bands

    def launch(grid, tensors, numbers, consts, warps, pdl):
        gluon_on_torch.run(body, grid, tensors, numbers, consts, functions)

    monkeypatch.setattr(small_m_bands, "_small_m_bands", launch)


def rand(*shape):
    return torch.randn(shape).bfloat16()


def empty(*shape):
    return torch.full(shape, float("nan")).bfloat16()


@pytest.mark.parametrize(PLAN, PLANS)
@pytest.mark.parametrize(("rows", "kind"), [(3, None), (8, "silu")])
def test_a_band_goes_through_the_ring(rows, kind, warps, columns, stages, programs, in_python):
    from quire.kernels.gpu.linear import small_m_bands
    from quire.kernels.gpu.linear.gemv import FusedActivation

    torch.manual_seed(1)
    x = rand(rows, 2 * INPUTS)[:, :INPUTS]
    w, bias = rand(2 * OUTPUTS, INPUTS) / 16, rand(2 * OUTPUTS)
    z, a = empty(rows, 2 * OUTPUTS), empty(rows, OUTPUTS)
    act = FusedActivation(kind, a) if kind else None
    plan = small_m_bands.BandsPlan(warps, columns, stages, programs)
    small_m_bands.launch(z, x, w, bias, plan, act=act)
    want = torch.nn.functional.linear(x.float(), w.float(), bias.float()).bfloat16()
    torch.testing.assert_close(z, want, atol=2e-2, rtol=2e-2)
    if kind:
        torch.testing.assert_close(a, act_mul(z, kind), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(PLAN, PLANS)
@pytest.mark.parametrize("kind", [None, "silu"])
def test_the_norm_needs_sums_of_squares_only(kind, warps, columns, stages, programs, in_python):
    """Of a product that adds a residual, and of the product of the normed sum."""
    from quire.kernels.gpu.linear import small_m_bands, small_m_plans
    from quire.kernels.gpu.linear.gemv import AddedResidual, FusedActivation, FusedNorm

    torch.manual_seed(2)
    rows, plan = 5, small_m_bands.BandsPlan(warps, columns, stages, programs)
    x, residual, scale = rand(rows, OUTPUTS), rand(rows, INPUTS), rand(INPUTS)
    w, w2 = rand(INPUTS, OUTPUTS) / 8, rand(2 * OUTPUTS, INPUTS) / 16
    z, r, y = empty(rows, INPUTS), empty(rows, INPUTS), empty(rows, INPUTS)
    squares = small_m_plans.empty_squares(r).fill_(float("nan"))
    added = AddedResidual(residual, r, squares)
    small_m_bands.launch(z, x, w, None, plan._replace(columns=16), added=added)
    assert torch.equal(r, z + residual)
    torch.testing.assert_close(squares.sum(0)[:rows], r.float().square().sum(1))
    want, _ = rms_norm(z, scale, 1e-5, residual, 1.0)
    normed = FusedNorm(r, scale, 1e-5, None, 1.0, y, r, squares)
    z2, a = empty(rows, 2 * OUTPUTS), empty(rows, OUTPUTS)
    act = FusedActivation(kind, a) if kind else None
    small_m_bands.launch(z2, y.clone(), w2, None, plan, normed, act)
    torch.testing.assert_close(y, want, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(z2, y @ w2.T, atol=2e-2, rtol=2e-2)
    if kind:
        torch.testing.assert_close(a, act_mul(z2, kind), atol=2e-2, rtol=2e-2)


def test_two_products_and_the_norm_between_them_are_two_kernels(in_python, monkeypatch):
    from quire.kernels.gpu.linear import small_m_bands, small_m_plans
    from quire.kernels.gpu.rowwise import rms_norm as gpu_rms_norm

    plan = small_m_bands.BandsPlan(2, 16, 3, 3)
    monkeypatch.setattr(small_m_plans, "find_bands", lambda *args: plan)
    monkeypatch.setattr(gpu_rms_norm, "_rms_norm", None)  # the norm has no kernel of its own
    torch.manual_seed(3)
    rows = 4
    a, residual, scale = rand(rows, OUTPUTS), rand(rows, INPUTS), rand(INPUTS)
    w, w2 = rand(INPUTS, OUTPUTS) / 8, rand(2 * OUTPUTS, INPUTS) / 16
    y, r = call("rms_norm", call("linear", a, w), scale, 1e-5, residual)
    out = call("act_mul", call("linear", y, w2), "silu")
    lazy_fusion.flush()
    want, want_r = rms_norm(a @ w.T, scale, 1e-5, residual)
    torch.testing.assert_close(r, want_r, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(y, want, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(out, act_mul(y @ w2.T, "silu"), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("reader", ["another op", "adapters"])
def test_a_norm_whose_squares_are_known_can_be_a_kernel(reader, in_python, monkeypatch):
    from quire.kernels.gpu.linear import small_m_bands, small_m_plans
    from quire.kernels.gpu.lora import adapted_linear

    plan = small_m_bands.BandsPlan(2, 16, 3, 3)
    monkeypatch.setattr(small_m_plans, "find_bands", lambda *args, **named: plan)
    torch.manual_seed(3)
    rows = 4
    a, residual, scale = rand(rows, OUTPUTS), rand(rows, INPUTS), rand(INPUTS)
    w, w2 = rand(INPUTS, OUTPUTS) / 8, rand(OUTPUTS, INPUTS) / 16
    y, r = call("rms_norm", call("linear", a, w), scale, 1e-5, residual)
    if reader == "another op":
        out, want_out = call("add", y, r), lambda y, r: y + r
    else:
        cpu = torch.device("cpu")
        monkeypatch.setattr(adapted_linear, "FORMS", {64: adapted_linear.BEFORE})
        bank = random_bank([[16], [3]], INPUTS, (OUTPUTS,), torch.bfloat16, cpu)
        given = random_rows(rows, 2, cpu)
        sort_rows(given)
        out = call("lora_linear", call("linear", y, w2), y, bank, given)
        want_out = lambda y, r: lora_linear(y @ w2.T, y, bank, given)  # noqa: E731
    lazy_fusion.flush()
    want, want_r = rms_norm(a @ w.T, scale, 1e-5, residual)
    torch.testing.assert_close(y, want, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(out, want_out(want, want_r), atol=4e-2, rtol=4e-2)


def test_bands_are_for_weights_that_fill_the_programs_with_several():
    from quire.kernels.gpu.linear.small_m_plans import bands_of

    assert bands_of(4, 14336, 4096, True, True, 132) == (4, 512, 2, 132)
    assert bands_of(4, 4096, 14336, False, False, 132) == (4, 256, 2, 264)
    assert bands_of(8, 4096, 4096, False, False, 132) == (4, 256, 4, 132)
    assert bands_of(5, 6144, 4096, False, True, 132) is None  # a norm of more than four rows
    assert bands_of(4, 1024, 3072, False, False, 132) is None  # a small weight
    assert bands_of(4, 4096, 4100, False, False, 132) is None  # no whole stages

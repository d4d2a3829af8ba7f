"""The fp8 kernels in the interpreter: the bits of the CPU, and products as exact as float32 is."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from quire.kernels.act import act_mul
from quire.kernels.formats.fp8_weight import Fp8Weight, quantize_blocks, quantize_channels
from quire.kernels.gpu.linear import fp8_linear as product
from quire.kernels.gpu.linear import quantize_fp8 as kernel
from quire.kernels.gpu.linear import quantize_fused as fused
from quire.kernels.quantize_fp8 import quantize_fp8
from quire.kernels.rms_norm import rms_norm

CPU = torch.device("cpu")
BLOCKS = pytest.mark.parametrize("block", [0, 128])


def poisoned(rows, inputs, block):
    q, scale = kernel.empty_quantized(rows, inputs, block, CPU)
    q.view(torch.uint8).fill_(0xFF)
    return q, scale.fill_(float("nan"))


def same(got, want):
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1], want[1])


def near(got, want):
    """Made from a row that a sum in another order, or another exp, rounded otherwise here and there."""
    torch.testing.assert_close(got[1], want[1], rtol=1e-2, atol=0)
    off = (got[0].float() - want[0].float()).abs()
    assert off.max() <= 32
    assert (off > 0).float().mean() < 0.1


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@BLOCKS
def test_rows_have_the_bits_that_the_cpu_gives_them(block):
    x = torch.randn(5, 520).bfloat16()[:, 8:]
    x[1] = 0
    rows = poisoned(5, 512, block)
    kernel.launch(rows, x, block)
    same(rows, quantize_fp8.__wrapped__(x, block))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@BLOCKS
def test_a_row_that_is_not_finite_becomes_nan(bad, block):
    x = torch.ones(2, 256)
    x[1, 200] = bad
    q, scale = poisoned(2, 256, block)
    kernel.launch((q, scale), x, block)
    value = q.float() * (scale.t().repeat_interleave(128, 1) if block else scale[:, None])
    assert value[0].isfinite().all()
    assert value[1].isnan().any()


@BLOCKS
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("added", [True, False])
def test_a_norm_quantizes_what_it_makes(block, keep, added):
    x, residual = torch.randn(2, 3, 384).bfloat16()
    weight, given = torch.randn(384).bfloat16(), residual if added else None
    y, r = torch.empty_like(x), torch.empty_like(x)
    rows = poisoned(3, 384, block)
    fused.rms_norm_quantize(
        rows, x, weight, 1e-5, given, 1.0, y if keep else None, r if added else None
    )
    want, summed = rms_norm.__wrapped__(x, weight, 1e-5, given, 1.0)
    near(rows, quantize_fp8.__wrapped__(want, block))
    assert not keep or (y != want).float().mean() < 0.02
    assert not added or torch.equal(r, summed)


@BLOCKS
def test_a_gated_activation_quantizes_what_it_makes(block):
    x = torch.randn(3, 600).bfloat16()
    rows = poisoned(3, 300, block)
    fused.act_mul_quantize(rows, x, "silu")
    near(rows, quantize_fp8.__wrapped__(act_mul.__wrapped__(x, "silu"), block))


@pytest.mark.parametrize("make", [quantize_channels, quantize_blocks])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 130, 70), (20, 256, 136), (65, 96, 64)]
)
def test_the_product_for_any_shape_is_exact(make, rows, inputs, outputs):
    weight = make(torch.randn(outputs, inputs))
    x, bias = torch.randn(rows, inputs), torch.randn(outputs)
    q, scale = quantize_fp8.__wrapped__(x, weight.block_size)
    y = torch.full((rows, outputs), float("nan"))
    product.triton_scaled_mm(y, q, scale, weight, bias)
    wide = scale.t().repeat_interleave(128, 1)[:, :inputs] if weight.block_size else scale[:, None]
    want = (q.double() * wide.double()) @ weight.dequantize(torch.float64).t() + bias.double()
    torch.testing.assert_close(y.double(), want, atol=1e-4, rtol=1e-5)


def test_a_fixed_scale_is_every_row_s_scale():
    made = quantize_channels(torch.randn(32, 64))
    weight = Fp8Weight(made.data, made.scale, torch.tensor([0.02]))
    x = torch.randn(3, 64)
    y = product.outputs(x, weight)
    product.launch(y, x, weight)
    q, scale = quantize_fp8.__wrapped__(x, 0, weight.input_scale)
    assert scale.tolist() == pytest.approx([0.02] * 3)
    torch.testing.assert_close(y, (q.float() * 0.02) @ weight.dequantize().t())

"""One row times weights of a byte, in the interpreter: each kind, with what is fused with it."""

import pytest
import torch

from quire.kernels.act import act_mul
from quire.kernels.formats.fp8_weight import Fp8Weight, quantize_blocks, quantize_channels
from quire.kernels.formats.int8_weight import quantize_outputs
from quire.kernels.fp8_linear import multiply_quantized
from quire.kernels.int8_linear import int8_linear
from quire.kernels.quantize_fp8 import quantize_fp8
from quire.kernels.rms_norm import rms_norm

pytest.importorskip("triton", reason="triton is not installed")


def product(x, weight, bias):
    """The product of x, quantized by itself."""
    if isinstance(weight, Fp8Weight):
        q, scale = quantize_fp8.__wrapped__(x, weight.block_size)
        y = multiply_quantized(q, scale, weight)
        return (y if bias is None else y + bias.float()).to(x.dtype)
    return int8_linear.__wrapped__(x, weight, bias)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("quantize", [quantize_channels, quantize_blocks, quantize_outputs])
def test_a_row_is_quantized_and_multiplied(quantize, fused):
    from quire.kernels.gpu.linear import gemv_bytes
    from quire.kernels.gpu.linear.gemv import FusedActivation, FusedNorm, GemvPlan

    torch.manual_seed(1)
    inputs, outputs = 208, 256
    weight = quantize(torch.randn(outputs, inputs) * inputs**-0.5)
    x, res, bias = (torch.randn(1, size).bfloat16() for size in (inputs, inputs, outputs))
    z = torch.full((1, outputs), float("nan")).bfloat16()
    plan = GemvPlan(4, 128, 2, 1)
    if not fused:
        gemv_bytes.launch(z, x, weight, bias[0], cut=plan)
        torch.testing.assert_close(z, product(x, weight, bias[0]), atol=2e-2, rtol=2e-2)
        return
    scale = torch.rand(inputs).bfloat16() + 0.5
    y, r, a = torch.empty_like(x), torch.empty_like(x), torch.empty(1, outputs // 2).bfloat16()
    norm = FusedNorm(x, scale, 1e-6, res, 0.0, y, r)
    gemv_bytes.launch(z, x, weight, None, norm, FusedActivation("silu", a), cut=plan)
    normed, total = rms_norm.__wrapped__(x, scale, 1e-6, res)
    assert torch.equal(r, total)
    torch.testing.assert_close(y, normed, atol=2e-2, rtol=2e-2)
    want = product(normed, weight, None)
    torch.testing.assert_close(z, want, atol=4e-2, rtol=4e-2)
    torch.testing.assert_close(a, act_mul.__wrapped__(want, "silu"), atol=4e-2, rtol=4e-2)

"""What a model over e4m3 weights computes on a CPU: the reference, and how far it drifts."""

import pytest
import torch

from quire.kernels.formats.fp8_weight import Fp8Weight, quantize_blocks, quantize_channels
from quire.kernels.fp8_linear import fp8_linear
from quire.kernels.linear import linear
from quire.kernels.quantize_fp8 import quantize_fp8
from tests.cpu.models.harness import Stepper
from tests.cpu.quant.checkpoints import LLAMA, load, plain

from quire.models.build import read_model_config  # isort: skip

E4M3 = torch.float8_e4m3fn


def exact(x, weight, bias=None):
    """The product of the quantized operands, in float64."""
    q, scale = quantize_fp8(x, weight.block_size, weight.input_scale)
    wide = (
        scale.t().repeat_interleave(128, 1)[:, : x.shape[1]]
        if weight.block_size
        else scale[:, None]
    )
    y = (q.double() * wide.double()) @ weight.dequantize(torch.float64).t()
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("make", [quantize_channels, quantize_blocks])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 128, 64), (5, 300, 200)])
def test_the_product_is_that_of_the_quantized_operands(make, rows, inputs, outputs):
    torch.manual_seed(0)
    weight = make(torch.randn(outputs, inputs))
    x, bias = torch.randn(rows, inputs), torch.randn(outputs)
    torch.testing.assert_close(
        fp8_linear(x, weight, bias).double(), exact(x, weight, bias), atol=1e-4, rtol=1e-5
    )
    assert torch.equal(linear(x, weight, bias), fp8_linear(x, weight, bias))
    half = fp8_linear(x.bfloat16(), weight)
    assert half.dtype == torch.bfloat16


def test_a_fixed_scale_clamps_what_it_cannot_hold():
    made = quantize_channels(torch.eye(16))
    weight = Fp8Weight(made.data, made.scale, torch.tensor([0.01]))
    x = torch.tensor([[1.0, 4.0, 100.0, -100.0, *[0.0] * 12]])
    y = fp8_linear(x, weight)
    assert y[0, :4].tolist() == pytest.approx([1.0, 4.0, 4.48, -4.48], rel=0.04)


def test_the_largest_number_of_a_row_is_kept_and_zeros_stay_zero():
    x = torch.tensor([[0.3, -7.7, 1.0, 0.0], [0.0] * 4])
    q, scale = quantize_fp8(x)
    assert q[0, 1] == -448
    assert (q.float() * scale[:, None])[0, 1] == pytest.approx(-7.7)
    assert not q[1].float().any()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("block", [0, 128])
def test_a_row_that_is_not_finite_stays_so(bad, block):
    x = torch.ones(2, 256)
    x[1, 5] = bad
    y = fp8_linear(x, (quantize_blocks if block else quantize_channels)(torch.ones(128, 256)))
    assert y[0].isfinite().all()
    assert y[1].isnan().all()


def test_what_is_held_is_within_a_part_in_sixteen_of_each_weight():
    w = torch.randn(200, 300)
    for made in (quantize_channels(w), quantize_blocks(w)):
        near = made.dequantize()
        normal = w.abs() > near.abs().max() / 448 / 64 * 2
        assert ((near - w).abs() <= w.abs() / 16 + 1e-6)[normal].all()


@pytest.mark.parametrize("asked", ["fp8", "fp8_block"])
def test_log_probabilities_drift_little(tmp_path, asked):
    ids = torch.randint(3, 96, (48,), generator=torch.Generator().manual_seed(1)).tolist()
    _, config = read_model_config(LLAMA)
    found = []
    for i, quant in enumerate((None, asked)):
        (tmp_path / str(i)).mkdir()
        model = load(tmp_path / str(i), plain(torch.float32), dtype=torch.float32, quant=quant)
        logits = Stepper(model, config, max_tokens=64).logits(ids)
        found.append(logits.log_softmax(-1))
    drift = (found[1] - found[0]).abs()
    assert 1e-3 < drift.mean() < 0.2  # random layers: each adds a few percent
    assert (found[0].exp() * (found[0] - found[1])).sum(-1).mean() < 0.03

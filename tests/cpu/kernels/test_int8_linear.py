"""Weights in bytes: sums of integers are exact, and rows are quantized as the definition states."""

from dataclasses import replace

import pytest
import torch

from quire.kernels.formats.int8_weight import Int8ExpertWeights, quantize_outputs
from quire.kernels.formats.panel_int8 import PanelInt8, pack_panel_int8
from quire.kernels.framework.op import OPS
from quire.kernels.int8_linear import (
    int8_linear,
    multiply_exactly,
    pack,
    pack_experts,
    random_weights,
    sum_inputs,
)
from quire.kernels.moe_experts import ExpertActivation
from quire.kernels.native.op_tape import TapeRecorder
from quire.kernels.quantize_int8 import quantize_int8
from quire.quant.int8 import to_codes

pytestmark = pytest.mark.usefixtures("seeded")
CPU = torch.device("cpu")


def test_sums_of_bytes_are_exact_at_their_largest():
    q = torch.full((2, 5000), -128, dtype=torch.int8)
    data = torch.randint(-128, 128, (9, 5000), dtype=torch.int8)
    data[0] = -128
    assert torch.equal(multiply_exactly(q, data).long(), q.long() @ data.long().t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_that_of_the_quantized_operands(dtype):
    x, bias = (torch.randn(5, 300) + 0.5).to(dtype), torch.randn(70).to(dtype)
    for weight in random_weights(70, 300, CPU):
        q, scale, zero = quantize_int8(
            x, weight.symmetric, weight.input_scale, weight.input_zero_point
        )
        rows = (q.double() - zero[:, None]) * scale[:, None].double()
        want = rows @ weight.dequantize(torch.float64).t() + bias.double()
        got = weight.product(x, bias)
        assert got.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 8e-3
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)
        assert torch.equal(got[2:3], weight.product(x[2:3], bias))


@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_are_within_half_a_step_and_zero_is_exact(symmetric):
    x = torch.randn(6, 200) * torch.tensor([1e-6, 1, 5, 1e4, 2, 1])[:, None]
    x[4] = x[4].abs() + 3  # all of one sign
    x[5] = 0
    x[:, 7] = 0
    q, scale, zero = quantize_int8(x, symmetric)
    back = (q.float() - zero[:, None]) * scale[:, None]
    assert ((back - x).abs() <= scale[:, None] * (0.5001 if symmetric else 1.0001)).all()
    assert not back[:, 7].any()
    if symmetric:
        assert not zero.any()
        assert q[:5].abs().amax(1).tolist() == [127] * 5
    else:
        assert zero[4] == -128
        assert quantize_int8(x, True)[1][4] / scale[4] == pytest.approx(255 / 127, rel=1e-5)


def test_a_fixed_scale_and_zero_clamp_what_they_cannot_hold():
    x = torch.tensor([[0.0, 1.0, -1.0, 90.0, -90.0]])
    static, zero = torch.tensor([0.5]), torch.tensor([-100], dtype=torch.int32)
    assert quantize_int8(x, True, static)[0].tolist() == [[0, 2, -2, 127, -128]]
    assert quantize_int8(x, False, static, zero)[0].tolist() == [[-100, -98, -102, 80, -128]]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_row_that_is_not_finite_stays_so(bad, symmetric):
    x = torch.randn(3, 64)
    weight = quantize_outputs(torch.randn(16, 64), symmetric_inputs=symmetric)
    want = int8_linear(x, weight)
    x[1, 5] = bad
    got = int8_linear(x, weight)
    assert got[1].isnan().all()
    assert torch.equal(got[::2], want[::2])


def test_a_bank_is_its_experts():
    ones = [quantize_outputs(torch.randn(64, 32), symmetric_inputs=False) for _ in range(4)]
    ups = Int8ExpertWeights(
        data=torch.stack([one.data for one in ones]),
        scale=torch.stack([one.scale for one in ones]),
        sums=torch.stack([one.sums for one in ones]),
    )
    downs = replace(
        ups,
        data=ups.data[:, :32],
        scale=ups.scale[:, :32].contiguous(),
        sums=ups.sums[:, :32].contiguous(),
    )
    assert torch.equal(ups.dequantize()[2], ones[2].dequantize())
    assert torch.equal(to_codes(ups).dequantize(), ups.dequantize())
    x, ids = torch.randn(3, 32), torch.tensor([[0, 2], [3, 1], [2, 3]], dtype=torch.int32)
    shares, gate = torch.rand(3, 2), ExpertActivation()
    got = ups.mlp(x, ids, shares, downs, gate)
    for t in range(3):
        want = sum(
            w * downs[i].product(gate(ups[i].product(x[t : t + 1])))[0]
            for i, w in zip(ids[t].tolist(), shares[t])
        )
        torch.testing.assert_close(got[t], want)


def extreme(weight):
    """The weight with rows of its largest bytes, at which sums of 16 bits would saturate."""
    data = weight.data.clone()
    data[0], data[1], data[2, ::2] = -128, 127, -128
    sums = None if weight.sums is None else sum_inputs(data)
    return replace(weight, data=data, sums=sums)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 256, 70), (7, 101, 33), (97, 64, 40), (500, 32, 5)])
def test_panels_have_the_bits_of_the_reference(shape, dtype):
    rows, inputs, outputs = shape
    x, bias = (3 * torch.randn(rows, 2 * inputs) + 1).to(dtype), torch.randn(outputs).to(dtype)
    x[-1] = -x[-1].abs()
    if rows > 4:
        x[1], x[2, 5], x[3, 7], x[4, 3] = 0, float("inf"), float("nan"), 1e30
    x = x[:, :inputs]
    for weight in map(extreme, random_weights(outputs, inputs, CPU)):
        packed = pack(weight, dtype)
        assert isinstance(packed, PanelInt8)
        assert torch.equal(packed.int8_weight().data, weight.data)
        want = OPS["int8_linear"].reference(x, weight, bias)
        assert torch.equal(packed.product(x, bias).nan_to_num(9e9), want.nan_to_num(9e9))
        assert torch.equal(OPS["int8_linear"].reference(x[:1], packed, bias), want[:1])
        assert packed.product(x[:0]).shape == (0, outputs)


@pytest.mark.usefixtures("native")
def test_a_tape_records_products_of_bytes():
    weight = pack(quantize_outputs(torch.randn(64, 64)), torch.bfloat16)
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        tape = TapeRecorder().record(lambda: weight.product(weight.product(x)))
        x.copy_(torch.randn(3, 64))
        assert torch.equal(tape.replay(), weight.product(weight.product(x)))


@pytest.mark.usefixtures("native")
def test_experts_in_panels_are_those_in_rows():
    made = [quantize_outputs(torch.randn(64, 32)) for _ in range(3)]
    bank = Int8ExpertWeights(
        data=torch.stack([one.data for one in made]),
        scale=torch.stack([one.scale for one in made]),
    )
    downs = replace(bank, data=bank.data[:, :32], scale=bank.scale[:, :32].contiguous())
    x, ids = torch.randn(5, 32), torch.tensor([[0], [2], [1], [2], [0]], dtype=torch.int32)
    further = ExpertActivation()
    packed = pack_experts(bank, torch.float32)
    assert packed.kind == "panel_int8"
    assert torch.equal(packed.dequantize(), bank.dequantize())
    got = packed.mlp(x, ids, torch.ones(5, 1), pack_experts(downs, torch.float32), further)
    assert torch.equal(got, bank.mlp(x, ids, torch.ones(5, 1), downs, further))


def test_dtypes_without_kernels_have_the_weight_in_rows():
    weight = quantize_outputs(torch.randn(40, 32))
    assert pack(weight, torch.float16) is weight
    x = torch.randn(2, 32).half()
    assert torch.equal(pack_panel_int8(weight).product(x), weight.product(x))

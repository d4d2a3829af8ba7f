"""Products of bytes in the interpreter: what the op's cases do not reach."""

import pytest
import torch

from quire.kernels import int8_linear, quantize_int8
from quire.kernels.framework.op import OPS

body = pytest.importorskip("quire.kernels.gpu.linear.int8_linear", reason="triton is not installed")
CPU = torch.device("cpu")
TILES = [body.Int8LinearTile(16, 32, 64, 4, 2), body.Int8LinearTile(64, 32, 32, 4, 2)]


def run(x, weight, bias=None, tile=None):
    out = torch.full((x.shape[0], weight.shape[0]), float("nan"), dtype=x.dtype)
    if tile is None:
        body.launch(out, x, weight, bias)
    else:
        how = (weight.symmetric, weight.input_scale, weight.input_zero_point)
        body.multiply(out, *quantize_int8.quantize_int8(x, *how), weight, bias, tile)
    return out


def weights(outputs=40, inputs=101):
    torch.manual_seed(0)
    return list(int8_linear.random_weights(outputs, inputs, CPU))


def test_rows_are_quantized_to_the_bits_of_the_reference():
    for case in quantize_int8._cases(CPU):
        mine = OPS["quantize_int8"].gpu.outputs(**case)
        OPS["quantize_int8"].gpu.launch(mine, **case)
        for got, want in zip(mine, OPS["quantize_int8"].reference(**case), strict=True):
            assert torch.equal(got, want)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", range(4))
def test_a_row_has_the_same_bits_in_any_tile_and_in_any_company(kind):
    weight, x = weights()[kind], torch.randn(70, 101) + 0.3
    whole = [run(x, weight, tile=tile) for tile in TILES]
    assert torch.equal(*whole)
    assert torch.equal(run(x[5:6], weight), whole[0][5:6])
    want = OPS["int8_linear"].reference(x, weight)
    torch.testing.assert_close(whole[0], want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", range(2))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_gone_bad_stays_in_its_row(kind, bad):
    weight, x = weights()[kind], torch.randn(6, 101)
    want = run(x, weight)
    x[3, 7] = bad
    got = run(x, weight)
    assert got[3].isnan().all()
    keep = [0, 1, 2, 4, 5]
    assert torch.equal(got[keep], want[keep])


def test_no_rows_give_no_rows():
    assert run(torch.empty(0, 101), weights()[0]).shape == (0, 40)

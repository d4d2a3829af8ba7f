"""Quantizers: the codes' values are those that the formats' own libraries read, and errors are small."""

import gguf
import pytest
import torch

from quire.kernels.quantizers.floats import (
    e2m1_table,
    nvfp4_global_scale,
    quantize_mxfp4,
    quantize_nvfp4,
    round_to_e2m1,
)
from quire.kernels.quantizers.ggml import LAYOUTS, quantize_ggml
from quire.kernels.quantizers.integers import quantize_int8, quantize_integers
from quire.quantize.gguf_blocks import to_blocks


def weights(outputs=24, inputs=512, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=draw) * (
        0.02 + torch.rand(outputs, 1, generator=draw) / 9
    )


def error(weight, codes):
    return float((codes.dequantize() - weight).square().sum() / weight.square().sum())


def from_gguf(kind, data):
    return torch.from_numpy(gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("case", ["normal", "positive", "zeros", "spikes", "tiny"])
def test_gguf_reads_the_values_of_our_blocks(kind, case):
    weight = weights()
    if case == "positive":
        weight = weight.abs()
    elif case == "zeros":
        weight[3] = 0
        weight[4, 256:] = 0
    elif case == "spikes":
        weight[:, 7] = 30.0
        weight[:, 300] = -30.0
    elif case == "tiny":
        weight *= 1e-6
    codes = quantize_ggml(kind, weight)
    data = to_blocks(kind, codes)
    assert torch.equal(from_gguf(kind, data), codes.dequantize())


BOUNDS = {"Q4_0": 0.0072, "Q4_1": 0.006, "Q5_0": 0.0018, "Q5_1": 0.0014, "Q8_0": 2.9e-5} | {
    "Q2_K": 0.075, "Q3_K": 0.023, "Q4_K": 0.0056, "Q5_K": 0.0014, "Q6_K": 3.6e-4
}  # fmt: skip
"""Relative squared error on normal weights; gguf's own writers: 0.0074, 0.0061, 0.0018, 0.0014, 2.8e-5."""


@pytest.mark.parametrize("kind", BOUNDS)
def test_errors_of_block_types_are_small(kind):
    assert error(weights(64), quantize_ggml(kind, weights(64))) < BOUNDS[kind]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_errors_are_no_larger_than_those_of_gguf(kind):
    weight, own = weights(64), gguf.GGMLQuantizationType[kind]
    theirs = from_gguf(kind, torch.from_numpy(gguf.quants.quantize(weight.numpy(), own)))
    assert (
        error(weight, quantize_ggml(kind, weight))
        < (theirs - weight).square().sum() / weight.square().sum()
    )


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q6_K", "Q4_0"])
def test_importance_moves_the_error_to_other_inputs(kind):
    weight, importance = weights(64), torch.ones(512)
    importance[::4] = 50.0
    plain, moved = (quantize_ggml(kind, weight, one).dequantize() for one in (None, importance))
    of = lambda made: ((made - weight).square() * importance).sum()  # noqa: E731
    assert of(moved) < 0.97 * of(plain)


def test_rows_are_quantized_alone_whatever_their_number(monkeypatch):
    whole = quantize_ggml("Q4_K", weights()).dequantize()
    monkeypatch.setattr("quire.kernels.quantizers.search.CHUNK_ELEMENTS", 3000)
    assert torch.equal(quantize_ggml("Q4_K", weights()).dequantize(), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_integers_clip_no_worse_than_the_full_range(bits, symmetric, dtype):
    weight, group, top = weights(), 64, (1 << bits) - 1
    made = quantize_integers(weight, bits=bits, group=group, symmetric=symmetric, scale_dtype=dtype)
    assert made.scale.values.dtype == dtype
    assert int(made.q.max()) <= top
    x = weight.unflatten(1, (-1, group))
    if symmetric:
        scale = (x.abs().amax(2, True) * 2 / top).to(dtype).float()
        full = ((x / scale).round().clamp(-(top + 1) // 2, top // 2) * scale).flatten(1)
    else:
        low, high = x.amin(2, True), x.amax(2, True)
        scale = ((high - low) / top).to(dtype).float()
        zero = (-low / scale).round()
        full = (((x / scale).round() + zero).clamp(0, top) - zero).mul(scale).flatten(1)
    assert error(weight, made) <= (full - weight).square().sum() / weight.square().sum() + 1e-9


def test_int8_and_int4_keep_zero_and_outputs_of_zeros():
    weight = weights()
    weight[5] = 0
    weight[:, 9] = 0
    how = {"bits": 4, "group": 128, "symmetric": True, "scale_dtype": torch.bfloat16}
    for made in (quantize_int8(weight), quantize_integers(weight, **how)):
        wide = made.dequantize()
        assert not wide[5].any()
        assert not wide[:, 9].any()


def test_every_e2m1_number_rounds_to_itself_and_ties_to_even():
    table = e2m1_table(torch.device("cpu"))
    assert torch.equal(table[round_to_e2m1(table).int()], table.abs().copysign(table))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0, -0.75])
    assert table[round_to_e2m1(ties).int()].tolist() == [0, 1, 1, 2, 2, 4, 4, 6, -1]


def test_fp4_scales_are_numbers_of_their_formats():
    weight = weights()
    mx, nv = quantize_mxfp4(weight), quantize_nvfp4(weight)
    assert torch.equal(mx.scale.values.log2(), mx.scale.values.log2().round())
    assert nv.scale.codes.dtype == torch.float8_e4m3fn
    assert nvfp4_global_scale(float(weight.abs().max())) == 1 / nv.scale.values.unique().item()
    assert error(weight, mx) < 0.014
    assert error(weight, nv) < 0.0095
    assert not quantize_nvfp4(torch.zeros(2, 32)).dequantize().any()
    assert not quantize_mxfp4(torch.zeros(2, 32)).dequantize().any()

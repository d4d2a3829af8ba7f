"""Weights of two to eight bits on the device: products against float64, exact widening, clean rows."""

from functools import partial

import pytest
import torch

from quire.kernels.formats.tiled_weight import PLANES, TiledExperts, TiledWeight
from quire.kernels.framework import lazy_fusion
from quire.kernels.grouped_linear import grouped_embedding, pack, pack_experts, random_codes
from quire.kernels.linear import linear
from quire.kernels.moe_experts import ExpertActivation, moe_experts
from tests.cpu.gpu_kernels.test_grouped_linear import check, stacked

CUDA = torch.device("cuda", 0)
ROWS = [1, 2, 8, 9, 17, 33, 64, 65, 128, 300, 2048, 2049, 4097]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def weights_of(outputs, inputs, bits, group, dtype=torch.bfloat16):
    for codes in random_codes(outputs, inputs, bits, group, CUDA):
        weight = pack(codes, dtype)
        assert isinstance(weight, TiledWeight)
        yield codes, weight


def product(x, weight, bias=None):
    y = linear(x, weight, bias)
    lazy_fusion.flush()
    return y


@pytest.mark.parametrize("bits", PLANES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("outputs", "inputs", "group"),
    [(1024, 4096, 128), (576, 2048, 32), (200, 320, 16), (4096, 1024, 64), (70, 704, 704)],
)
def test_products_of_all_sizes_are_near_float64(bits, dtype, outputs, inputs, group):
    bias = torch.randn(outputs, device=CUDA).to(dtype)
    for _, weight in weights_of(outputs, inputs, bits, group, dtype):
        for rows in ROWS:
            x = torch.randn(rows, inputs, device=CUDA).to(dtype)
            check(product(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("bits", PLANES)
def test_widening_is_exact(bits):
    for codes, weight in weights_of(200, 512, bits, 32):
        assert torch.equal(weight.dequantize(), codes.dequantize())
        ids = torch.randint(0, 200, (33,), device=CUDA, dtype=torch.int32)
        if weight.perm is None:
            want = codes.dequantize().bfloat16()[ids.long()]
            assert torch.equal(grouped_embedding(ids, weight), want)


@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 4096), (4096, 14336), (151936, 1024)])
def test_results_do_not_depend_on_timing_and_hardly_on_the_number_of_rows(shape):
    _, weight = next(weights_of(*shape, 4, 128))
    x = torch.randn(64, shape[1], device=CUDA).bfloat16()
    whole = product(x, weight)
    for rows in (1, 2, 7, 16, 17, 33, 64):
        first = product(x[:rows], weight)
        for _ in range(3):
            assert torch.equal(product(x[:rows], weight), first)
        torch.testing.assert_close(first, whole[:rows], atol=1e-2, rtol=2**-7)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("rows", [3, 40, 200, 3000])
def test_what_is_not_finite_stays_in_its_row(bad, rows):
    for _, weight in weights_of(256, 1024, 4, 32):
        x = torch.randn(rows, 1024, device=CUDA).bfloat16()
        clean = product(x, weight)
        x[1, 700] = bad
        y = product(x, weight)
        others = torch.arange(rows, device=CUDA) != 1
        assert not y[1].isfinite().all()
        assert torch.equal(y[others], clean[others])


def test_a_captured_product_follows_its_input():
    for _, weight in weights_of(512, 1024, 4, 128):
        for rows in (1, 16, 128, 2100):
            x = torch.randn(rows, 1024, device=CUDA).bfloat16()
            product(x, weight)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = product(x, weight)
            x.copy_(torch.randn_like(x))
            for _ in range(3):
                graph.replay()
            assert torch.equal(y, product(x, weight))


@pytest.mark.parametrize("bits", PLANES)
@pytest.mark.parametrize("tokens", [1, 5, 64, 700])
def test_experts_are_near_those_of_the_widened_banks(bits, tokens):
    kinds = len(list(random_codes(8, 32, bits, 32, CUDA)))
    make = partial(random_codes, bits=bits, group=32, device=CUDA)
    for kind in range(kinds):
        banks = []
        for outputs, inputs in ((512, 384), (384, 256)):
            ones = [list(make(outputs, inputs))[kind] for _ in range(16)]
            banks.append(pack_experts(stacked(ones), torch.bfloat16))
            assert isinstance(banks[-1], TiledExperts)
        x = torch.randn(tokens, 384, device=CUDA).bfloat16()
        ids = torch.rand(tokens, 16, device=CUDA).argsort(-1)[:, :4].int().contiguous()
        weights, gate = torch.rand(tokens, 4, device=CUDA), ExpertActivation()
        got = moe_experts(x, ids, weights, *banks, gate)
        lazy_fusion.flush()
        wide = [bank.dequantize() for bank in banks]
        want = moe_experts.__wrapped__(x.float(), ids, weights, *wide, gate)
        torch.testing.assert_close(
            got.float(), want, atol=2e-2 * want.abs().max().item(), rtol=2e-2
        )

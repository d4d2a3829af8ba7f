"""Weights of two to eight bits on the device: products against float64, exact widening, clean rows.

Each new constant of a kernel is a compilation of seconds. So all bit widths and kinds of codes have
cases here, among which the other axes vary together; the long tier has the full product.
"""

from dataclasses import replace
from itertools import islice, product

import pytest
import torch

from quire.kernels.act import act_mul
from quire.kernels.formats.tiled_weight import PLANES, TiledExperts, TiledWeight
from quire.kernels.framework import lazy_fusion
from quire.kernels.grouped_linear import grouped_embedding, pack, pack_experts, random_codes
from quire.kernels.linear import linear
from quire.kernels.moe_experts import ExpertActivation, moe_experts
from tests import tiers
from tests.cpu.gpu_kernels.test_grouped_linear import check, kinds_of, stacked

CUDA = torch.device("cuda", 0)
DTYPES = [torch.bfloat16, torch.float16]
SHAPES = [(1024, 4096, 128), (576, 2048, 32), (200, 320, 16), (4096, 1024, 64), (70, 704, 704)]
ROWS = [(1, 2, 8, 17, 65, 2049), (1, 9, 64, 300, 2049)]
"""Each has one row, few, up to 64, more, and as many as the library multiplies."""
ALL_ROWS = (1, 2, 8, 9, 17, 33, 64, 65, 128, 300, 2048, 2049, 4097)
TOKENS = [(1, 5), (64,), (700,)]
"""Pairs with an expert that are not sorted; few for each expert; several tiles for each."""
KINDS = [(b, kind) for b, bits in enumerate(PLANES) for kind in range(kinds_of(bits))]
"""(place of the bit width, kind of codes): tables have up to 4 bits, floats 8."""
BITS = list(PLANES)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def codes_of(outputs, inputs, bits, group, kind):
    return next(islice(random_codes(outputs, inputs, bits, group, CUDA), kind, None))


def weight_of(outputs, inputs, bits, group, kind, dtype=torch.bfloat16):
    weight = pack(codes_of(outputs, inputs, bits, group, kind), dtype)
    assert isinstance(weight, TiledWeight)
    return weight


def multiply(x, weight, bias=None):
    y = linear(x, weight, bias)
    lazy_fusion.flush()
    return y


@pytest.mark.parametrize(
    ("bits", "kind", "shape", "dtype", "sizes"),
    [
        *((BITS[b], k, SHAPES[(b + 2 * k) % 5], DTYPES[(b + k) % 2], ROWS[(b // 2 + k // 2) % 2])
          for b, k in KINDS),
        *tiers.long(*((BITS[b], k, *more, ALL_ROWS)
                      for (b, k), *more in product(KINDS, SHAPES, DTYPES))),
    ],
)  # fmt: skip
def test_products_are_near_float64_and_rows_apart(bits, kind, shape, dtype, sizes):
    outputs, inputs, group = shape
    bias = torch.randn(outputs, device=CUDA).to(dtype)
    weight = weight_of(outputs, inputs, bits, group, kind, dtype)
    for rows in sizes:
        x = torch.randn(rows, inputs, device=CUDA).to(dtype)
        clean = multiply(x, weight, bias)
        check(clean, x, weight, bias)
        for bad in (float("inf"), float("nan")) if rows > 1 else ():
            x[1, inputs - 20] = bad
            y = multiply(x, weight, bias)
            assert not y[1].isfinite().all()
            assert torch.equal(y[:1], clean[:1])
            assert torch.equal(y[2:], clean[2:])


@pytest.mark.parametrize(
    ("bits", "group", "kind"), [(4, 32, 0), (4, 64, 3), (8, 128, 2), (8, 64, 3), (3, 64, 1)]
)
@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 2048), (704, 320)])
def test_a_product_and_the_activation_after_it_are_those_apart(outputs, inputs, bits, group, kind):
    weight = weight_of(outputs, inputs, bits, group, kind)
    for rows in (1, 5, 8):
        x = torch.randn(rows, inputs, device=CUDA).bfloat16()
        z = linear(x, weight)
        joined = act_mul(z, "silu")
        lazy_fusion.flush()
        with lazy_fusion.disabled():
            want = act_mul(linear(x, weight), "silu")
        check(z, x, weight)
        torch.testing.assert_close(joined, want, atol=1e-2, rtol=2**-6)


@pytest.mark.parametrize("bits", PLANES)
def test_widening_is_exact(bits):
    for codes in random_codes(200, 512, bits, 32, CUDA):
        weight = pack(codes, torch.bfloat16)
        assert torch.equal(weight.dequantize(), codes.dequantize())
        ids = torch.randint(0, 200, (33,), device=CUDA, dtype=torch.int32)
        if weight.perm is None:
            want = codes.dequantize().bfloat16()[ids.long()]
            assert torch.equal(grouped_embedding(ids, weight), want)


@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(28672, 4096), (4096, 14336), *tiers.long((4096, 4096), (151936, 1024))],
)
def test_results_do_not_depend_on_timing_and_hardly_on_the_number_of_rows(outputs, inputs):
    weight = weight_of(outputs, inputs, 4, 128, 0)
    x = torch.randn(64, inputs, device=CUDA).bfloat16()
    whole = multiply(x, weight)
    for rows in tiers.amount((1, 2, 7, 17, 64), (1, 2, 7, 16, 17, 33, 64)):
        first = multiply(x[:rows], weight)
        for _ in range(3):
            assert torch.equal(multiply(x[:rows], weight), first)
        torch.testing.assert_close(first, whole[:rows], atol=1e-2, rtol=2**-7)


@pytest.mark.parametrize(
    ("outputs", "inputs", "group", "kind", "dtype", "rows"),
    [
        (16384, 4096, 128, 1, torch.bfloat16, 13),
        (4096, 8192, 128, 0, torch.float16, 32),
        (4096, 4160, 4160, 0, torch.bfloat16, 20),
        (4096, 4096, 128, 1, torch.bfloat16, 64),
    ],
)
def test_parts_of_large_matrices_are_near_float64(outputs, inputs, group, kind, dtype, rows):
    from quire.kernels.gpu.linear import grouped_gemm_wgmma as wgmma

    weight = replace(weight_of(outputs, inputs, 4, group, kind, dtype), perm=None)
    x, bias = torch.randn(rows, inputs, device=CUDA).to(dtype), torch.randn(outputs).to(CUDA, dtype)
    if not wgmma.supports(x, weight):
        pytest.skip("Hopper only")
    found = multiply(x, weight, bias)
    check(found, x, weight, bias)
    for _ in range(3):
        assert torch.equal(multiply(x, weight, bias), found)
    assert not weight.counters.any()


@pytest.mark.parametrize(
    ("outputs", "inputs", "group", "kind", "dtype", "rows"),
    [
        (8192, 4096, 128, 1, torch.bfloat16, 100),
        (6144, 4096, 128, 0, torch.float16, 300),
        (4352, 14336, 128, 1, torch.bfloat16, 256),
        (28672, 4096, 128, 1, torch.bfloat16, 520),
        (4096, 4160, 4160, 0, torch.bfloat16, 1000),
        (384, 1024, 128, 1, torch.float16, 200),
    ],
)
def test_tiles_and_their_parts_are_near_float64(outputs, inputs, group, kind, dtype, rows):
    from quire.kernels.gpu.linear import grouped_gemm_tiles as tiles

    weight = replace(weight_of(outputs, inputs, 4, group, kind, dtype), perm=None)
    x, bias = torch.randn(rows, inputs, device=CUDA).to(dtype), torch.randn(outputs).to(CUDA, dtype)
    if not tiles.supports(x, weight):
        pytest.skip("Hopper only")
    found = multiply(x, weight, bias)
    check(found, x, weight, bias)
    for _ in range(3):
        assert torch.equal(multiply(x, weight, bias), found)
    assert not weight.counters.any()


@pytest.mark.parametrize("kind", [1, *tiers.long(0, 2, 3, 4)])
def test_a_captured_product_follows_its_input(kind):
    weight = weight_of(512, 1024, 4, 128, kind)
    for rows in (1, 16, 128, 2100):
        x = torch.randn(rows, 1024, device=CUDA).bfloat16()
        multiply(x, weight)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = multiply(x, weight)
        x.copy_(torch.randn_like(x))
        for _ in range(3):
            graph.replay()
        assert torch.equal(y, multiply(x, weight))


@pytest.mark.parametrize(
    ("bits", "kind", "dtype", "sizes"),
    [
        *((BITS[b], k, DTYPES[(b // 3 + k) % 2], TOKENS[(b + k) % 3]) for b, k in KINDS),
        *tiers.long(*((BITS[b], k, *more) for (b, k), *more in product(KINDS, DTYPES, TOKENS))),
    ],
)
def test_experts_are_near_those_of_the_widened_banks(bits, kind, dtype, sizes):
    banks = []
    for outputs, inputs in ((512, 384), (384, 256)):
        ones = [codes_of(outputs, inputs, bits, 32, kind) for _ in range(16)]
        banks.append(pack_experts(stacked(ones), dtype))
        assert isinstance(banks[-1], TiledExperts)
    for tokens in sizes:
        x = torch.randn(tokens, 384, device=CUDA).to(dtype)
        ids = torch.rand(tokens, 16, device=CUDA).argsort(-1)[:, :4].int().contiguous()
        weights, gate = torch.rand(tokens, 4, device=CUDA), ExpertActivation()
        got = moe_experts(x, ids, weights, *banks, gate)
        lazy_fusion.flush()
        wide = [bank.dequantize() for bank in banks]
        want = moe_experts.__wrapped__(x.float(), ids, weights, *wide, gate)
        torch.testing.assert_close(
            got.float(), want, atol=2e-2 * want.abs().max().item(), rtol=2e-2
        )

"""Weights of two to eight bits on the GPU: products near float64, exact widening, clean rows."""

from dataclasses import replace

import pytest
import torch

from quire.kernels.formats.tiled_weight import PLANES, pack_tiled_experts, pack_tiles
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.grouped_linear import random_codes
from quire.kernels.moe_experts import ExpertActivation, moe_experts
from tests import tiers

pytest.importorskip("triton", reason="triton is not installed")

from quire.kernels.gpu.linear import grouped_gemm, grouped_linear, grouped_widen
from quire.kernels.gpu.moe import moe_experts as moe

pytestmark = [pytest.mark.usefixtures("seeded"), pytest.mark.sampled(2)]
CPU = torch.device("cpu")
SHARE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Of the products of magnitudes: the rounding of the result, and of a table's values."""


@pytest.fixture
def seeded():
    torch.manual_seed(5)


def codes_of(outputs, inputs, bits, group, kind):
    return list(random_codes(outputs, inputs, bits, group, CPU))[kind]


def kinds_of(bits):
    """How many kinds of codes random_codes has."""
    return 5 if bits <= 4 else 3 + (bits == 8)


def check(y, x, weight, bias=None):
    """Each number is as near to float64 as its rounding, and that of weights from tables, allow."""
    plain = weight.dequantize(torch.float64)
    want = x.double() @ plain.t() + (0 if bias is None else bias.double())
    room = x.double().abs() @ plain.abs().t() + want.abs()
    assert ((y.double() - want).abs() <= SHARE.get(y.dtype, 2.0**-20) * room).all()


@pytest.mark.parametrize("bits", PLANES)
@pytest.mark.parametrize("group", [16, 32, 64, 96, 128, 384])
def test_tiles_hold_the_values_of_their_codes(bits, group):
    for codes in random_codes(70, 384, bits, group, CPU):
        weight = pack_tiles(codes, torch.bfloat16)
        assert weight.shape == (70, 384)
        assert torch.equal(weight.dequantize(), codes.dequantize())


def test_tiles_take_the_bits_of_their_codes():
    for bits in PLANES:
        codes = codes_of(128, 1024, bits, 128, 0)
        weight = pack_tiles(codes, torch.bfloat16)
        planes = [one for one in (weight.low, weight.high) if one is not None]
        assert sum(one.nbytes for one in planes) == 128 * 1024 * bits // 8
        assert weight.nbytes - weight.counters.nbytes == 128 * 1024 * bits // 8 + 128 * 8 * 2


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("bits", [2, 4])
def test_offsets_in_float32(bits, rows):
    """As HQQ has them: a scale times a zero that is no integer."""
    codes = codes_of(64, 256, bits, 64, 0)
    zero = torch.rand(64, 4) * 2**bits
    offset = GroupFactors(-codes.scale.expand() * zero)
    weight = pack_tiles(replace(codes, zero=0, offset=offset), torch.bfloat16)
    x = torch.randn(rows, 256).bfloat16()
    out = grouped_linear.outputs(x, weight)
    grouped_linear.launch(out, x, weight)
    check(out, x, weight)


def test_a_bank_is_its_experts():
    for kind in range(5):
        ones = [codes_of(72, 96, 4, 32, kind) for _ in range(3)]
        bank = pack_tiled_experts(stacked(ones), torch.bfloat16)
        assert (len(bank), *bank[1].shape) == bank.shape == (3, 72, 96)
        for i, one in enumerate(ones):
            assert torch.equal(bank[i].dequantize(), one.dequantize())


def stacked(ones):
    """Codes of several matrices as those of experts; the permutation is that of the first."""

    def both(values):
        first = values[0]
        if isinstance(first, torch.Tensor):
            return torch.stack(values) if first.dim() > 1 else first
        if hasattr(first, "tensors"):
            return type(first)(*(torch.stack(t) for t in zip(*(v.tensors for v in values))))
        return first

    names = WeightCodes.__dataclass_fields__
    found = {name: both([getattr(one, name) for one in ones]) for name in names}
    for one in ones[1:]:
        object.__setattr__(one, "perm", ones[0].perm)
        if ones[0].table is not None and ones[0].table.dim() == 1:
            object.__setattr__(one, "table", ones[0].table)
    return WeightCodes(**found)


CASES = [
    # rows, outputs, inputs, bits, group, kind, dtype
    (1, 64, 128, 4, 128, 0, torch.bfloat16),
    (1, 21, 200, 4, 32, 1, torch.bfloat16),
    (1, 10, 256, 8, 128, 2, torch.float16),
    (1, 8, 304, 6, 16, 2, torch.bfloat16),
    (1, 6, 640, 3, 64, 1, torch.bfloat16),
    (1, 6, 544, 5, 544, 1, torch.bfloat16),
    (1, 10, 128, 4, 128, 2, torch.bfloat16),
    (1, 16, 96, 2, 16, 1, torch.bfloat16),
    (1, 64, 128, 4, 64, 3, torch.bfloat16),
    (3, 70, 200, 4, 32, 1, torch.bfloat16),
    (9, 40, 128, 8, 64, 0, torch.bfloat16),
    (2, 64, 256, 4, 32, 2, torch.float16),
    (5, 64, 128, 4, 64, 3, torch.bfloat16),
    (2, 65, 96, 4, 96, 4, torch.float16),
    (2, 33, 128, 8, 128, 1, torch.float16),
    (4, 64, 256, 6, 16, 2, torch.bfloat16),
    (2, 64, 512, 3, 128, 1, torch.bfloat16),
    (2, 64, 544, 5, 32, 2, torch.bfloat16),
    (2, 64, 96, 2, 16, 2, torch.bfloat16),
    (3, 64, 160, 4, 160, 1, torch.bfloat16),
    (1, 10, 256, 8, 128, 3, torch.bfloat16),
    (2, 33, 160, 8, 160, 3, torch.float16),
]
MORE = [
    (rows, 72, 320 if group != 128 else 384, bits, group, kind, dtype)
    for rows in (1, 17, 65, 300)
    for bits in PLANES
    for group in (16, 32, 64, 128)
    for kind in range(kinds_of(bits))
    for dtype in (torch.bfloat16, torch.float16)
]


@pytest.mark.slow("kernels in the interpreter")
@pytest.mark.parametrize("case", [*CASES, *tiers.long(*((one,) for one in MORE))])
def test_products_are_near_float64(case):
    rows, outputs, inputs, bits, group, kind, dtype = case
    weight = pack_tiles(codes_of(outputs, inputs, bits, group, kind), dtype)
    x = torch.randn(rows, inputs + 8).to(dtype)[:, :inputs]
    bias = torch.randn(outputs).to(dtype)
    y = grouped_linear.outputs(x, weight, bias).fill_(float("nan"))
    grouped_linear.launch(y, x, weight, bias)
    check(y, x, weight, bias)


@pytest.mark.parametrize("group", [64, 200])
@pytest.mark.parametrize("rows", [3, 130])
def test_sums_of_a_group_with_a_nan_are_nan(rows, group):
    codes = codes_of(66, 200 if group == 200 else 256, 8, group, 3)
    codes.q[5, 70], codes.q[65, 0] = 127, 255
    weight = pack_tiles(codes, torch.bfloat16)
    x = torch.randn(rows, weight.shape[1]).bfloat16()
    y = grouped_linear.outputs(x, weight)
    grouped_linear.launch(y, x, weight)
    assert y[:, [5, 65]].isnan().all()
    whole = [o for o in range(66) if o not in (5, 65)]
    assert torch.equal(weight.dequantize()[whole], codes.dequantize()[whole])
    assert y[:, whole].isfinite().all()


@pytest.mark.parametrize("kind", [0, *tiers.long(1, 2, 3)])
def test_parts_of_a_sum_are_added_in_one_order(kind):
    weight = pack_tiles(codes_of(64, 700 if not kind else 640, 4, 700 if not kind else 64, kind),
                        torch.bfloat16)  # fmt: skip
    x = torch.randn(3, weight.shape[1]).bfloat16()
    x = x if weight.perm is None else x[:, weight.perm.long()]
    found = []
    for _ in range(2):
        y = torch.full((3, 64), float("nan")).bfloat16()
        grouped_gemm.launch(y, x, weight, None, grouped_gemm.GroupedGemmPlan(8, 64, 4, 2, 4))
        found.append(y)
    assert torch.equal(*found)
    assert not weight.counters.any()
    back = x if weight.perm is None else x[:, weight.perm.long().argsort()]
    check(found[0], back, weight)


def test_tiles_of_many_rows_are_near_float64():
    weight = pack_tiles(codes_of(130, 128, 4, 64, 1), torch.bfloat16)
    x = torch.randn(130, 128).bfloat16()
    y = torch.full((130, 130), float("nan")).bfloat16()
    grouped_linear.launch(y, x, weight)
    check(y, x, weight)


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fn])
def test_scales_of_a_byte_are_read_as_they_are(dtype):
    """Those of MXFP4, and of NVFP4 with one float32 for the matrix."""
    codes = codes_of(64, 64, 4, 32, 3)
    every = torch.arange(128, dtype=torch.uint8).view(64, 2) % 127
    scale = GroupFactors((every + 63 if dtype == torch.float8_e8m0fnu else every).view(dtype))
    if dtype == torch.float8_e4m3fn:
        scale = GroupFactors(torch.rand(64, 1), scale.values)
    codes = replace(codes, scale=scale)
    weight = pack_tiles(codes, torch.bfloat16)
    assert torch.equal(weight.dequantize(), codes.dequantize())
    assert torch.equal(grouped_widen.widen(weight, torch.float32), codes.dequantize())


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("kind", [1, 2])
def test_what_is_not_finite_stays_in_its_row(bad, kind):
    weight = pack_tiles(codes_of(64, 128, 4, 32, kind), torch.bfloat16)
    x = torch.randn(9, 128).bfloat16()
    x[4, 77] = bad
    y = torch.empty(9, 64).bfloat16()
    grouped_linear.launch(y, x, weight)
    others = [t for t in range(9) if t != 4]
    assert not y[4].isfinite().any()
    check(y[others], x[others], weight)


@pytest.mark.parametrize("bits", [4, *tiers.long(2, 3, 5, 6, 8)])
def test_widening_rounds_once(bits):
    for codes in random_codes(70, 96, bits, 32, CPU):
        weight = pack_tiles(codes, torch.bfloat16)
        plain = (
            codes.dequantize() if codes.perm is None else codes.dequantize()[:, codes.perm.long()]
        )
        assert torch.equal(grouped_widen.widen(weight, torch.float32), plain)
        assert torch.equal(grouped_widen.widen(weight, torch.bfloat16), plain.bfloat16())


def test_rows_in_float32_are_exact():
    weight = pack_tiles(codes_of(70, 96, 4, 32, 1), torch.float32)
    x, bias = torch.randn(5, 96), torch.randn(70)
    y = grouped_linear.outputs(x, weight, bias)
    grouped_linear.launch(y, x, weight, bias)
    check(y, x, weight, bias)


BANKS = [
    # tokens, experts, hidden, width, bits, group, kind, dtype
    (1, 4, 96, 64, 4, 32, 0, torch.bfloat16),
    (3, 4, 64, 72, 8, 64, 1, torch.bfloat16),
    (34, 4, 64, 64, 4, 32, 2, torch.bfloat16),
    (2, 4, 64, 64, 4, 32, 1, torch.float32),
    (1, 2, 32, 32, 5, 32, 2, torch.bfloat16),
    (2, 2, 64, 32, 8, 32, 3, torch.bfloat16),
]
MORE_BANKS = [
    (tokens, 8, 96, 80, bits, group, kind, dtype)
    for tokens in (1, 9, 40, 300)
    for bits in PLANES
    for group in (16, 32)
    for kind in range(kinds_of(bits))
    for dtype in (torch.bfloat16, torch.float16)
]


@pytest.mark.slow("kernels in the interpreter")
@pytest.mark.parametrize("case", [*BANKS, *tiers.long(*((one,) for one in MORE_BANKS))])
def test_experts_are_near_those_of_the_widened_banks(case):
    tokens, count, hidden, width, bits, group, kind, dtype = case

    def bank(outputs, inputs):
        size = group if inputs % group == 0 else inputs
        ones = [codes_of(outputs, inputs, bits, size, kind) for _ in range(count)]
        return pack_tiled_experts(stacked(ones), dtype)

    first, second = bank(2 * width, hidden), bank(hidden, width)
    x = torch.randn(tokens, hidden).to(dtype)
    ids = torch.rand(tokens, count).argsort(-1)[:, :2].int().contiguous()
    weights, gate = torch.rand(tokens, 2), ExpertActivation("clamped" if kind == 1 else "silu")
    first_bias = torch.randn(count, 2 * width).to(dtype) if kind == 1 else None
    args = (x, ids, weights, first, second, gate, first_bias)
    y = moe.outputs(*args).fill_(float("nan"))
    moe.launch(y, *args)
    wide = [one.dequantize(torch.float32) for one in (first, second)]
    bias = None if first_bias is None else first_bias.float()
    want = moe_experts.__wrapped__(x.float(), ids, weights, *wide, gate, bias)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(
        y.float(), want, atol=tolerance * want.abs().max().item(), rtol=tolerance
    )

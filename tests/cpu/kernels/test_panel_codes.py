"""Weights of two to eight bits in the layout of the CPU: values, products, bits of results."""

from dataclasses import replace

import pytest
import torch

from quire.kernels import grouped_linear
from quire.kernels.formats.grouped_weight import PLANES, GroupedWeight
from quire.kernels.formats.panel_codes import PanelCodes, pack_panel_codes, round_table
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.grouped_linear import pack, pack_experts, random_codes
from quire.kernels.moe_experts import ExpertActivation
from quire.kernels.native import library as loader
from quire.kernels.native.op_tape import TapeRecorder

pytestmark = pytest.mark.usefixtures("seeded", "poisoned")
CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
BITS = sorted(PLANES)


def forms(outputs, inputs, group, all_bits=BITS):
    """WeightCodes of every meaning, with factors of every dtype."""
    for bits in all_bits:
        ones = list(random_codes(outputs, inputs, bits, group, CPU))
        yield from ones
        values = ones[0].scale.values
        yield replace(ones[0], scale=GroupFactors(values.bfloat16()))
        yield replace(ones[1], scale=GroupFactors(values.float()))
        fine = (torch.rand(values.shape) + 0.1).to(torch.float8_e4m3fn)
        yield replace(ones[0], scale=GroupFactors(torch.full((outputs, 1), 0.01), fine))
        signed = torch.randint(-60, 60, values.shape, dtype=torch.int8)
        yield replace(ones[0], scale=GroupFactors(torch.full((outputs, 1), 1e-3), signed))


def quantized(x, unit):
    """Rows as the products in integers see them, in float64, and half a step of each value."""
    wide = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % unit)).unflatten(1, (-1, unit))
    most = wide.abs().amax(2, keepdim=True)
    factor = torch.full_like(most, 127).div(most)  # 127 / most would round twice
    step, whole = most / 127, torch.where(most > 0, wide * factor, 0).round()
    cut = slice(x.shape[1])
    return (whole.double() * step).flatten(1)[:, cut], (step / 2).expand_as(wide).flatten(1)[:, cut]


def widened(codes, weight):
    """The matrix in float64, with the table that products in integers use."""
    if weight.levels is not None and weight.dtype == BF16:
        codes = replace(codes, table=weight.levels.float() * weight.unit)
    return codes.dequantize().double()


@pytest.mark.parametrize("shape", [(33, 96, 32), (64, 128, 16), (5, 70, 70), (32, 256, 64)])
def test_packing_gives_every_code_and_factor_back(shape):
    for codes in forms(*shape):
        weight = pack_panel_codes(codes, FP32)
        assert weight.shape == shape[:2]
        assert torch.equal(weight.weight_codes().q, codes.q)
        assert torch.equal(weight.dequantize(), codes.dequantize())


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_one_factor_for_all_groups_of_a_row_is_spread(dtype):
    codes = next(iter(random_codes(33, 96, 4, 32, CPU)))
    one = GroupFactors(torch.rand(33, 1).half())
    coded = GroupFactors(one.values, torch.randint(1, 9, (33, 1), dtype=torch.uint8))
    zero = torch.randint(0, 16, (33, 1), dtype=torch.uint8)
    for mixed in (
        replace(codes, offset=one, zero=zero),
        replace(codes, scale=one),
        replace(codes, scale=coded),
    ):
        weight, x = pack(mixed, dtype), torch.randn(3, 96).to(dtype)
        assert torch.equal(weight.dequantize(), mixed.dequantize())
        want = x.float() @ mixed.dequantize().t()
        tol = 1e-4 if dtype == FP32 else 4e-2 * want.abs().max().item()
        torch.testing.assert_close(weight.product(x).float(), want, atol=tol, rtol=1e-4)


def test_a_weight_of_b_bits_takes_b_bits():
    for bits in BITS:
        codes = next(iter(random_codes(64, 128, bits, 32, CPU)))
        assert pack_panel_codes(codes, BF16).codes.nbytes * 8 == 64 * 128 * bits


def test_tables_of_whole_numbers_are_exact_in_eight_bits():
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for table in (torch.cat([e2m1, -e2m1]), torch.tensor([-127.0, 1, 113, 25]), torch.zeros(16)):
        levels, unit = round_table(table)
        assert torch.equal(levels[: len(table)].float() * unit, table)
    table = torch.randn(16)
    levels, unit = round_table(table)
    assert (levels.float() * unit - table).abs().max() <= unit * 0.5001
    assert table.abs().max() / unit >= 64


@pytest.mark.usefixtures("native")
def test_pack_chooses_the_layout_of_the_cpu():
    codes = next(iter(random_codes(33, 96, 4, 32, CPU)))
    assert isinstance(pack(codes, BF16), PanelCodes)
    assert isinstance(pack(codes, torch.float16), GroupedWeight)  # no kernels of that dtype
    assert isinstance(pack(replace(codes, group=24), BF16), GroupedWeight)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("shape", [(70, 96, 32), (33, 128, 16), (64, 300, 300), (40, 768, 128)])
def test_products_of_float32_are_those_of_the_widened_weight(shape):
    x, bias = torch.randn(97, shape[1]), torch.randn(shape[0])
    for codes in forms(*shape, all_bits=(3, 4, 8)):
        plain, weight = codes.dequantize().double(), pack(codes, FP32)
        want, bound = x.double() @ plain.t() + bias, 1e-5 * (x.double().abs() @ plain.abs().t() + 1)
        for rows in (1, 6, 97):
            got = weight.product(x[:rows], bias)
            assert ((got.double() - want[:rows]).abs() <= bound[:rows]).all()


def check_integers(shape, rows, x=None, all_bits=BITS):
    x = torch.randn(rows, shape[1]).to(BF16) if x is None else x
    bias = torch.randn(shape[0]).to(BF16)
    for codes in forms(*shape, all_bits=all_bits):
        weight = pack(codes, BF16)
        turned = x[:, codes.perm.long()] if codes.perm is not None else x
        order = slice(None) if codes.perm is None else codes.perm.long()
        plain = widened(codes, weight)
        seen, half = quantized(turned, 16 if shape[2] == 16 else 32)
        if codes.table is not None and weight.levels is None:  # of each output: in float32
            seen, half = turned.double(), torch.zeros(())
        want = seen @ plain[:, order].t() + bias.double()
        sizes = seen.abs() @ plain[:, order].abs().t()
        got = weight.product(x, bias).double()
        assert ((got - want).abs() <= 2**-8 * want.abs() + 1e-5 * sizes + 1e-6).all(), codes.bits
        # and what quantizing rows costs: half a step of each value
        exact = turned.double() @ plain[:, order].t() + bias.double()
        cost = half.double().expand_as(turned) @ plain[:, order].abs().t()
        assert ((got - exact).abs() <= 1.01 * cost + 2**-8 * want.abs() + 1e-5 * sizes + 1e-6).all()


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("shape", [(70, 96, 32), (33, 128, 16), (64, 300, 300), (40, 768, 128)])
def test_products_of_bfloat16_are_those_of_rows_in_int8(shape):
    for rows in (1, 6, 97):
        check_integers(shape, rows, all_bits=BITS if rows == 6 else (4, 8))


def extremes(bits, group):
    """Codes and rows whose sums of 16 bits would be largest: all codes at one end, or in turn."""
    inputs, most = 256, (1 << bits) - 1
    q = torch.zeros(32, inputs, dtype=torch.uint8)
    q[:8], q[8:16, ::2], q[16:24, 1::2] = most, most, most
    q[24:, ::4] = q[24:, 3::4] = most
    scale = GroupFactors(torch.full((32, inputs // group), 2.0**-8))
    x = torch.full((6, inputs), 127.0)
    x[1], x[2, ::2], x[3, 1::2], x[4, ::4] = -127, -127, -127, -127
    x[5, ::2] = 0
    table = None
    if bits == 4:
        table = torch.full((16,), -127.0)
        table[1] = 127
    for zero in (0, most // 2 + 1, most):
        yield WeightCodes(q=q, bits=bits, group=group, scale=scale, zero=zero), x.to(BF16)
    if table is not None:
        yield WeightCodes(q=q & 1, bits=4, group=group, scale=scale, table=table), x.to(BF16)


def check_extremes():
    for bits in BITS:
        for group in (16, 32, 256):
            for codes, x in extremes(bits, group):
                weight = pack(codes, BF16)
                want = (x.double() @ codes.dequantize().double().t()).to(BF16)
                for rows in (x, x[:1], x.repeat(3, 1), x[1:4]):
                    again = want.repeat(3, 1) if len(rows) > 6 else want
                    again = want[:1] if len(rows) == 1 else want[1:4] if len(rows) == 3 else again
                    assert torch.equal(weight.product(rows), again), (bits, group, len(rows))


@pytest.mark.usefixtures("native")
def test_no_sum_saturates_at_the_largest_codes_and_rows():
    check_extremes()


def results():
    """Products of every form, for the same seeds."""
    torch.manual_seed(3)
    x, out = torch.randn(11, 192).to(BF16), []
    x[3] *= 1e4
    for group in (16, 32, 96):
        for codes in forms(40, 192, group):
            if codes.table is None or codes.table.dim() == 1:
                weight = pack(codes, BF16)
                out += [weight.product(x[:rows]) for rows in (1, 3, 11)]
    return out


@pytest.mark.long("compiles the library for lesser CPUs: `make isa` runs it")
@pytest.mark.parametrize("narrow", ["sse2", "avx2", "avx512"], indirect=True)
def test_results_are_equal_on_all_instruction_sets(narrow, monkeypatch, native_one):
    check_extremes()
    check_integers((70, 96, 32), 6)
    got = results()
    monkeypatch.setattr(loader, "load_library", lambda: native_one)
    for mine, theirs in zip(got, results(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_row_has_the_same_bits_whatever_the_rows_beside_it(dtype):
    x = torch.randn(530, 160).to(dtype)
    for codes in forms(40, 160, 32, all_bits=(4, 6, 8)):
        weight = pack(codes, dtype)
        whole = weight.product(x)
        for first, count in [(0, 1), (7, 2), (3, 5), (100, 13), (250, 30), (350, 100), (515, 15)]:
            assert torch.equal(weight.product(x[first : first + count]), whole[first:][:count])


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(dtype, bad):
    x = torch.randn(7, 96).to(dtype)
    spoilt = x.clone()
    spoilt[2, 40] = bad
    for codes in forms(33, 96, 32, all_bits=(4, 8)):
        weight = pack(codes, dtype)
        got, want = weight.product(spoilt), weight.product(x)
        assert torch.equal(got[[0, 1, 3, 4, 5, 6]], want[[0, 1, 3, 4, 5, 6]])
        spread = codes.dequantize()[:, 40] != 0
        assert not got[2][spread].isfinite().any()


@pytest.mark.usefixtures("native")
def test_rows_of_zeros_and_no_rows_and_rows_far_apart():
    for codes in forms(40, 96, 32, all_bits=(4, 8)):
        weight, wide = pack(codes, BF16), torch.randn(9, 200).to(BF16)
        assert not weight.product(torch.zeros(3, 96, dtype=BF16)).any()
        assert weight.product(wide[:0, :96]).shape == (0, 40)
        got = weight.product(wide[:, 40:136])
        assert torch.equal(got, weight.product(wide[:, 40:136].contiguous()))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_rows_of_an_embedding_are_widened_alone(dtype):
    ids = torch.tensor([0, 69, 33, 33], dtype=torch.int32)
    for codes in forms(70, 96, 32):
        weight, plain = pack(codes, dtype), codes.dequantize()
        got = weight.rows(ids, 3.0)
        want = (plain[ids.long()].to(dtype).float() * 3).to(dtype)
        torch.testing.assert_close(got, want, rtol=2e-2 if dtype == BF16 else 1e-5, atol=1e-6)
    outside = weight.rows(torch.tensor([70, -1, 0], dtype=torch.int32))
    assert outside[:2].isnan().all()
    assert outside[2].isfinite().all()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("rows", [1, 40])
def test_a_tape_records_products_and_rows(rows):
    weights = [pack(codes, BF16) for codes in forms(64, 64, 32, all_bits=(4, 8))]
    ids = torch.zeros(rows, dtype=torch.int32)

    def forward():
        for weight in weights[1:]:
            x = weight.product(weights[0].rows(ids))
        return x

    with torch.inference_mode():
        tape = TapeRecorder().record(forward)
        assert tape.num_ops == 2 * (len(weights) - 1)
        ids.copy_(torch.randint(0, 64, (rows,)))
        assert torch.equal(tape.replay(), forward())


@pytest.mark.usefixtures("native")
def test_experts_of_few_bits_are_their_matrices():
    up, down = (next(iter(random_codes(4 * n, 64, 4, 32, CPU))) for n in (128, 64))
    banks = []
    for one in (up, down):
        factors = GroupFactors(one.scale.values.unflatten(0, (4, -1)))
        codes = replace(one, q=one.q.unflatten(0, (4, -1)), scale=factors)
        banks.append((pack_experts(codes, FP32), codes.dequantize()))
    x, ids = torch.randn(5, 64), torch.randint(0, 4, (5, 1), dtype=torch.int32)
    shares, gate = torch.rand(5, 1), ExpertActivation()
    (first, up), (second, down) = banks
    assert torch.equal(first.dequantize(), up)
    got = first.mlp(x, ids, shares, second, gate)
    for t, i in enumerate(ids[:, 0].tolist()):
        want = shares[t] * (gate((up[i] @ x[t])[None])[0] @ down[i].t())
        torch.testing.assert_close(got[t], want, atol=1e-5, rtol=1e-4)


def test_the_reference_multiplies_panels_too(monkeypatch):
    monkeypatch.setattr(loader, "load_library", lambda: None)
    codes = next(iter(random_codes(33, 96, 4, 32, CPU)))
    x, weight = torch.randn(3, 96), pack_panel_codes(codes, FP32)
    assert isinstance(pack(codes, FP32), GroupedWeight)
    torch.testing.assert_close(grouped_linear.grouped_linear(x, weight), x @ codes.dequantize().t())

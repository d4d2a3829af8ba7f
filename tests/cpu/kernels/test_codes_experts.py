"""Experts of few bits in the layout of the CPU: bounds against float64, bits of results."""

from dataclasses import replace

import pytest
import torch

from quire.kernels.formats.panel_codes import PanelExperts
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.framework.op import OPS
from quire.kernels.grouped_linear import pack_experts, random_codes
from quire.kernels.moe_experts import ExpertActivation, moe_experts
from quire.kernels.native import library as loader
from quire.kernels.native.op_tape import TapeRecorder
from tests.cpu.kernels.test_panel_codes import BITS, quantized

pytestmark = pytest.mark.usefixtures("seeded", "poisoned")
CPU, BF16 = torch.device("cpu"), torch.bfloat16
SIZES = (5, 48, 80)  # experts, width, hidden size
ROW = 1000  # a group: as many inputs as there are


def split_experts(codes, experts):
    """Codes [X * O, I] as those of X experts [X, O, I]."""

    def split(one):
        if isinstance(one, GroupFactors):
            return GroupFactors(*map(split, one.tensors))
        return one.unflatten(0, (experts, -1)) if isinstance(one, torch.Tensor) else one

    own = codes.table is not None and codes.table.dim() == 2
    perm = codes.perm
    if perm is not None:  # each expert has its own
        perm = torch.stack([perm.roll(i) for i in range(experts)])
    return replace(
        codes, q=split(codes.q), scale=split(codes.scale), offset=split(codes.offset),
        zero=split(codes.zero), table=split(codes.table) if own else codes.table, perm=perm,
    )  # fmt: skip


def banks(experts, width, hidden, bits, group):
    """The two banks of each kind of codes: ((gate_up, down) in panels, the same in float32)."""
    first = random_codes(experts * 2 * width, hidden, bits, min(group, hidden), CPU)
    second = random_codes(experts * hidden, width, bits, min(group, width), CPU)
    for one, other in zip(first, second, strict=True):
        codes = split_experts(one, experts), split_experts(other, experts)
        packed = tuple(pack_experts(c, BF16) for c in codes)
        yield packed, tuple(map(seen_by, codes, packed))


def seen_by(codes, bank):
    """A bank [X, O, I] in float64, with the levels of a table that products in integers use."""
    if bank[0].levels is not None:
        codes = replace(codes, table=bank[0].levels.float() * bank[0].unit)
    return codes.dequantize().double()


def routes(rows, experts, top=2):
    ids = torch.rand(rows, experts).argsort(-1)[:, :top].int().contiguous()
    return ids, torch.rand(rows, top)


def check_bounds(given, dense, x, ids, weights, unit, bias, back):
    """The result is within what rounding rows to int8 and to bfloat16 may cost.

    A row of x and a row of h cost half a step of each value times the weights' magnitudes; |silu'|
    is at most 1.1; every rounding to bfloat16 is 2^-8 of the value.
    """
    got = moe_experts(x, ids, weights, *given, ExpertActivation(), bias, back).double()
    (first, second), rows = dense, x.double()
    want, bound = torch.zeros_like(got), torch.full_like(got, 1e-5)
    for t, k in torch.cartesian_prod(torch.arange(len(x)), torch.arange(ids.shape[1])).tolist():
        up, down, share = first[ids[t, k]], second[ids[t, k]], weights[t, k].double()
        most = rows[t].abs().max() / 254 * torch.ones_like(rows[t])
        u = up @ rows[t] + bias[ids[t, k]].double()
        du = up.abs() @ most + 2**-8 * u.abs() + 1e-5 * (up.abs() @ rows[t].abs())
        (gate, value), (dg, dv) = u.chunk(2), du.chunk(2)
        soft = torch.nn.functional.silu(gate)
        h = soft * value
        dh = 1.1 * dg * (value.abs() + dv) + soft.abs() * dv
        dh = dh + 2**-7 * (h.abs() + dh)
        half = quantized((h.abs() + dh).float()[None], unit)[1][0]
        v = down @ h + back[ids[t, k]].double()
        want[t] += share * v
        bound[t] += share * (down.abs() @ (half + dh) * 1.01 + 2**-8 * v.abs())
    bound += 2**-8 * want.abs()
    assert ((got - want).abs() <= bound).all()
    assert bound.mean() < want.std()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("group", [16, ROW])
def test_results_are_within_bounds_of_float64(group):
    experts, width, hidden = SIZES
    x, (ids, weights) = torch.randn(6, hidden).to(BF16), routes(6, experts)
    bias, back = torch.randn(experts, 2 * width).to(BF16), torch.randn(experts, hidden).to(BF16)
    unit = 16 if group == 16 else 32
    for bits in (4, 8):
        for packed, dense in banks(*SIZES, bits, group):
            if packed[0][0].in_integers:
                check_bounds(packed, dense, x, ids, weights, unit, bias, back)


def close(got, want):
    """Equal, but for numbers at a border of rounding."""
    torch.testing.assert_close(got.float(), want.float(), atol=1e-2, rtol=1e-2)
    assert (got != want).float().mean() < 0.02


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "clamped"])
def test_experts_are_what_their_matrices_make_of_a_row(kind):
    experts, _, hidden = SIZES
    x, gate = torch.randn(131, hidden).to(BF16), ExpertActivation(kind, limit=0.7)
    for bits in BITS if kind == "silu" else (4,):
        for packed, _ in banks(*SIZES, bits, 16):
            assert isinstance(packed[0], PanelExperts)
            for rows in (1, 131):
                ids, weights = routes(rows, experts)
                case = (x[:rows], ids, weights, *packed, gate)
                close(moe_experts(*case), OPS["moe_experts"].reference(*case))


@pytest.mark.usefixtures("native")
def test_a_row_has_the_same_bits_whatever_the_rows_beside_it():
    sizes = (8, 32, 1024)
    x, (ids, weights) = torch.randn(1700, 1024).to(BF16), routes(1700, 8, 6)
    (packed, _) = next(banks(*sizes, 4, 32))
    whole = moe_experts(x, ids, weights, *packed, ExpertActivation())  # in two rounds
    turned = torch.randperm(1700)
    for some in (turned[:1], turned[:7], turned[:120], turned):
        got = moe_experts(x[some], ids[some], weights[some], *packed, ExpertActivation())
        assert torch.equal(got, whole[some])


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(bad):
    experts, _, hidden = SIZES
    x, (ids, weights) = torch.randn(9, hidden).to(BF16), routes(9, experts)
    spoilt = x.clone()
    spoilt[4, 40] = bad
    for bits in (3, 4, 8):
        for packed, _ in banks(*SIZES, bits, 16):
            want = moe_experts(x, ids, weights, *packed, ExpertActivation())
            got = moe_experts(spoilt, ids, weights, *packed, ExpertActivation())
            assert torch.equal(got[[0, 1, 2, 3, 5, 6, 7, 8]], want[[0, 1, 2, 3, 5, 6, 7, 8]])
            assert not got[4].isfinite().all()


@pytest.mark.usefixtures("native")
def test_experts_that_are_not_there_make_a_row_nan():
    (packed, _) = next(banks(*SIZES, 4, ROW))
    x, (ids, weights) = torch.randn(4, 80).to(BF16), routes(4, 5)
    want = moe_experts(x, ids, weights, *packed, ExpertActivation())
    ids[1, 0], ids[2, 1] = 5, -2
    got = moe_experts(x, ids, weights, *packed, ExpertActivation())
    assert got[1:3].isnan().all()
    assert torch.equal(got[[0, 3]], want[[0, 3]])
    assert moe_experts(x[:0], ids[:0], weights[:0], *packed, ExpertActivation()).shape == (0, 80)


@pytest.mark.usefixtures("native")
def test_a_tape_records_experts():
    (packed, _) = next(banks(*SIZES, 4, ROW))
    x, (ids, weights) = torch.randn(3, 80).to(BF16), routes(3, 5)

    def forward():
        return moe_experts(x, ids, weights, *packed, ExpertActivation("clamped"))

    with torch.inference_mode():
        tape = TapeRecorder().record(forward)
        assert tape.num_ops == 1
        x.copy_(torch.randn(3, 80))
        assert torch.equal(tape.replay(), forward())


def test_banks_lie_in_one_piece_of_memory():
    codes = WeightCodes(
        q=torch.randint(0, 16, (3, 40, 64), dtype=torch.uint8), bits=4, group=64,
        scale=GroupFactors(torch.rand(3, 40, 1)),
    )  # fmt: skip
    bank = pack_experts(codes, BF16)
    assert torch.equal(bank.dequantize(), codes.dequantize())
    if isinstance(bank, PanelExperts):
        assert len({one.codes.untyped_storage().data_ptr() for one in bank}) == 1


def results():
    """Results of experts of every number of bits, for the same seeds."""
    torch.manual_seed(3)
    x, (ids, weights) = torch.randn(40, 80).to(BF16), routes(40, 5)
    return [
        moe_experts(x[:rows], ids[:rows], weights[:rows], *packed, ExpertActivation("relu"))
        for bits in BITS
        for packed, _ in banks(*SIZES, bits, 16)
        if packed[0][0].in_integers
        for rows in (1, 40)
    ]


@pytest.mark.long("compiles the library for lesser CPUs: `make isa` runs it")
@pytest.mark.parametrize("narrow", ["sse2", "avx2", "avx512"], indirect=True)
def test_results_are_equal_on_all_instruction_sets(narrow, monkeypatch, native_one):
    got = results()
    monkeypatch.setattr(loader, "load_library", lambda: native_one)
    for mine, theirs in zip(got, results(), strict=True):
        assert torch.equal(mine, theirs)

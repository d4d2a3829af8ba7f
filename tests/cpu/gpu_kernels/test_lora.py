"""Adapters on the GPU, in the interpreter: what the ops' own cases do not reach."""

from unittest import mock

import pytest
import torch

import quire.kernels.linear  # noqa: F401 - registers the products of forms
from quire.kernels import lora_experts
from quire.kernels.formats.lora_bank import LoraBank, LoraRows
from quire.kernels.formats.tiled_weight import pack_tiled_experts
from quire.kernels.framework import lazy_fusion
from quire.kernels.lora import _cases, _pair_cases, _sort_cases, random_bank, random_rows, sort_rows
from tests import tiers
from tests.cpu.gpu_kernels.test_grouped_linear import codes_of, stacked
from tests.cpu.kernels.test_lora import check
from tests.fused import call
from tests.op_cases import agree, elements

pytestmark = pytest.mark.sampled(2)

body = pytest.importorskip("quire.kernels.gpu.lora.lora_linear", reason="triton is not installed")
adapted_linear = pytest.importorskip("quire.kernels.gpu.lora.adapted_linear")
few_rows = pytest.importorskip("quire.kernels.gpu.lora.few_rows")
act_mul = pytest.importorskip("quire.kernels.gpu.elementwise.act_mul")
small_m_linear = pytest.importorskip("quire.kernels.gpu.linear.small_m_linear")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


def run(y, x, bank, rows):
    y = y.clone()
    body.launch(body.outputs(y, x, bank, rows), y, x, bank, rows)
    return y


@pytest.mark.slow("kernels in the interpreter")
def test_products_are_near_float64():
    few = sorted(_cases(CPU), key=elements)[: tiers.amount(7, 20)]
    for case in few:
        check(run(**case), **case)


def test_rows_and_pairs_are_sorted_as_the_reference_sorts_them():
    for name, cases in (("sort_by_slot", _sort_cases), ("sort_pairs", _pair_cases)):
        for case in cases(CPU):
            if len(case["starts"]) < 100 and len(case["order"]) <= 300:
                assert agree(name, case)


@pytest.mark.parametrize("inputs", [64, 256, 1000, 1024, 4096, 14336, 28672])
def test_slices_are_of_a_layer_and_cover_it(inputs):
    slices, steps = body.plan_slices(inputs)
    assert (slices - 1) * steps * body.STEP < inputs <= slices * steps * body.STEP
    assert slices <= body.MAX_SLICES


@pytest.mark.slow("kernels in the interpreter")
@pytest.mark.parametrize("split", [0, 512])
def test_many_rows_and_few_have_one_sum(split, monkeypatch):
    """One program with all slices after one another, or a program for each: the same order."""
    bank = random_bank([[20, 16], [0, 4], [16, 16]], 600, (40, 24), torch.bfloat16, CPU, dora=True)
    rows = random_rows(40, 3, CPU)
    x, y = torch.randn(40, 600).bfloat16(), torch.randn(40, 64).bfloat16()
    monkeypatch.setattr(few_rows, "MAX_ROWS", 0)
    monkeypatch.setattr(body, "MAX_SPLIT_ROWS", split)
    got = run(y, x, bank, rows)
    check(got, y, x, bank, rows)
    x[0, 7] = float("nan")
    bad = run(y, x, bank, rows)
    assert bad[0].isnan().any()
    assert torch.equal(bad[1:], got[1:])


def test_no_adapter_in_a_step_changes_nothing():
    bank, rows = random_bank([[8]], 64, (32,), torch.bfloat16, CPU), LoraRows.allocate(5, 1, CPU)
    sort_rows(rows)
    x, y = torch.randn(5, 64).bfloat16(), torch.randn(5, 32).bfloat16()
    assert torch.equal(run(y, x, bank, rows), y)


@pytest.mark.slow("kernels in the interpreter")
def test_experts_of_every_form_have_adapters():
    cases = sorted(lora_experts._cases(CPU), key=elements)
    few = [one for one in cases if isinstance(one["down"], torch.Tensor)][: tiers.amount(1, 9)]
    few += [one for one in cases if not isinstance(one["down"], torch.Tensor)][: tiers.amount(1, 9)]
    tiled = next(one for one in cases if len(one["down"]) == 4)
    banks = {}
    for name in ("gate_up", "down"):
        count, outputs, inputs = tiled[name].shape
        ones = [codes_of(outputs, inputs, 4, inputs, 0) for _ in range(count)]
        banks[name] = pack_tiled_experts(stacked(ones), tiled["x"].dtype)
    for case in [*few, {**tiled, **banks}]:
        assert agree("lora_experts", case)


@pytest.mark.slow("kernels in the interpreter")
@pytest.mark.parametrize("slots", [2, 33])
def test_an_activation_is_computed_with_the_sums_of_all_rows(slots):
    ranks = [[16, 0], [5, 33]] + [[0, 8]] * (slots - 2)
    bank = random_bank(ranks, 64, (72, 72), torch.bfloat16, CPU, dora=True)
    rows = random_rows(21, slots, CPU)
    x, y = torch.randn(21, 64).bfloat16(), torch.randn(21, 144).bfloat16()
    y[rows.slots < 0, :3] = -0.0
    want = run(y, x, bank, rows)
    acted, got = (torch.full((21, 72), float("nan")).bfloat16() for _ in range(2))
    act_mul.launch(acted, want, "silu")
    lazy_fusion.submit("lora_linear", body.launch, y, (y, x, bank, rows), {})
    assert not torch.equal(y, want)  # pending
    lazy_fusion.submit("act_mul", act_mul.launch, got, (y, "silu"), {})
    assert torch.equal(y, want)
    assert torch.equal(got, acted)


def test_sums_of_a_pending_op_are_there_for_others():
    bank, rows = random_bank([[8, 8]], 64, (32, 32), torch.bfloat16, CPU), random_rows(3, 1, CPU)
    x, y = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    want = run(y, x, bank, rows)
    lazy_fusion.submit("lora_linear", body.launch, y, (y, x, bank, rows), {})
    lazy_fusion.flush()
    assert torch.equal(y, want)


class Chain:
    """A norm, a product, its adapters and perhaps an activation, of some shape."""

    def __init__(self, rows, inputs, parts, ranks, dora=False):
        self.parts, self.rows = parts, random_rows(rows, len(ranks), CPU)
        self.bank = random_bank(ranks, inputs, parts, torch.bfloat16, CPU, dora=dora)
        x, res, norm = torch.randn(rows, inputs), torch.randn(rows, inputs), torch.randn(inputs)
        weight, bias = torch.randn(sum(parts), inputs) / inputs**0.5, torch.randn(sum(parts))
        self.given = [one.bfloat16() for one in (x, res, norm, weight, bias)]

    def run(self, *, adapted=True, act=True):
        x, res, norm, weight, bias = self.given
        normed, _ = call("rms_norm", x, norm, 1e-6, res)
        y = call("linear", normed, weight, bias)
        if adapted:
            call("lora_linear", y, normed, self.bank, self.rows)
        acted = call("act_mul", y, "silu") if act else y
        lazy_fusion.flush()
        return y, acted

    def check(self, **how):
        """Like the ops one by one; and rows of the base have the bits of the product alone."""
        with mock.patch.object(few_rows, "launch_expand", side_effect=AssertionError):
            got, base = self.run(**how), self.run(adapted=False, **how)
        with lazy_fusion.disabled():
            want = self.run(**how)
        plain = self.rows.slots < 0
        for one, other, alone in zip(got, want, base):
            torch.testing.assert_close(one, other, atol=6e-2, rtol=6e-2)
            assert torch.equal(one[plain], alone[plain])
            assert torch.equal(one, alone) == (not self.bank.ranks[self.rows.slots[~plain]].any())


FUSED = [  # rows, inputs, parts, ranks of each slot
    (1, 64, (32, 32), [[8, 8]]),
    (1, 264, (32, 32, 32), [[16, 0, 5], [0, 16, 16]]),
    (5, 64, (32, 32), [[8, 8], [16, 0], [0, 0]]),
    (7, 304, (96,), [[16], [1], [64]]),
]
MORE_FUSED = [
    (1, 300, (96,), [[16], [50], [3]]),
    (1, 520, (64, 32, 32), [[16, 0, 5], [0, 16, 16]]),
    (8, 528, (64, 32, 32), [[16, 0, 40], [4, 33, 16]] * 2),
]


@pytest.mark.slow("kernels in the interpreter")
@pytest.mark.parametrize("shape", tiers.amount(FUSED, FUSED + MORE_FUSED))
@pytest.mark.parametrize("dora", [False, True])
def test_a_product_of_few_rows_has_its_adapters_in_it(shape, dora, monkeypatch):
    monkeypatch.setattr(small_m_linear, "_SMALL_WEIGHT", 0)
    monkeypatch.setattr(adapted_linear, "MAX_RANK_INSIDE", 64)
    chain = Chain(*shape, dora=dora)
    gated = len(chain.parts) == 2
    chain.check(act=gated)
    slots = chain.rows.slots.clone()
    for slot in range(-1, tiers.amount(0, len(shape[3]))):  # a launch leaves nothing for the next
        chain.rows.slots.copy_(torch.where(slots < 0, -1, slot))
        sort_rows(chain.rows)
        chain.check(act=gated)


def test_what_is_not_finite_in_one_slot_stays_in_its_rows(monkeypatch):
    monkeypatch.setattr(small_m_linear, "_SMALL_WEIGHT", 0)
    chain = Chain(6, 64, (32, 32), [[16, 16], [16, 8]])
    chain.rows.slots.copy_(torch.tensor([0, 1, -1, 0, 1, 1]))
    sort_rows(chain.rows)
    want, _ = chain.run()
    chain.bank.a[1].fill_(float("nan"))
    chain.bank.b[1].fill_(float("inf"))
    got, _ = chain.run()
    theirs = chain.rows.slots == 1
    assert got[theirs].isnan().all()
    assert torch.equal(got[~theirs], want[~theirs])


@pytest.mark.slow("kernels in the interpreter")
@pytest.mark.parametrize("rows", [1, 3, 12, "tiles", "split tiles"])
def test_a_narrow_view_has_the_sums_of_a_bank_of_its_rank(rows, monkeypatch):
    """Products alone, and products in which the adapters are."""
    monkeypatch.setattr(small_m_linear, "_SMALL_WEIGHT", 0)
    if rows == 12:
        monkeypatch.setattr(adapted_linear, "FORMS", {64: "behind"})
    if isinstance(rows, str):
        monkeypatch.setattr(few_rows, "MAX_ROWS", 0)
        monkeypatch.setattr(body, "MAX_SPLIT_ROWS", 512 * (rows == "split tiles"))
        rows = 5
    for parts in ((32, 32), (64, 32, 32)):
        chain = Chain(rows, 64, parts, [[16, 5, 8][: len(parts)], [3, 0, 16][: len(parts)]])
        own = chain.bank
        wide = LoraBank.allocate(2, 48, 64, parts, torch.bfloat16, CPU)
        for tensor in (wide.a, wide.b):
            tensor.fill_(float("nan"))
        wide.a[:, :, :16] = own.a
        wide.b[:, :16] = own.b
        wide.ranks.copy_(own.ranks)
        assert own.narrow(16) is own
        gated = len(parts) == 2
        want = chain.run(act=gated)
        chain.bank = wide.narrow(16)
        assert (chain.bank.rank, chain.bank.room) == (16, 48)
        for one, other in zip(chain.run(act=gated), want):
            assert torch.equal(one, other)


@pytest.mark.slow("kernels in the interpreter")
@pytest.mark.parametrize("form", ["before", "behind"])
@pytest.mark.parametrize("rows", [1, 12])
def test_adapters_around_a_product_are_those_of_ops_one_by_one(form, rows, monkeypatch):
    monkeypatch.setattr(adapted_linear, "FORMS", {64: form})
    chain = Chain(rows, 64, (32, 32), [[8, 8], [16, 0]])
    with mock.patch.object(few_rows, "launch_expand", wraps=few_rows.launch_expand) as expand:
        got = chain.run()
    assert expand.call_count == 1
    with lazy_fusion.disabled():
        want = chain.run()
    plain = chain.rows.slots < 0
    for one, other, base in zip(got, want, chain.run(adapted=False)):
        assert torch.equal(one, other)
        assert torch.equal(one[plain], base[plain])
        assert not torch.equal(one, base)


def test_adapters_of_other_products_are_behind_them():
    """The first half before a product that another kernel computes; of one row, after it."""
    chain = Chain(3, 64, (32, 32), [[8, 8], [16, 0]])
    got = chain.run(act=False)
    with lazy_fusion.disabled():
        want = chain.run(act=False)
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other, atol=6e-2, rtol=6e-2)

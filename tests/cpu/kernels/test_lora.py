"""Adapters of a step's rows: sums against loops in float64, bits of rows that share a step."""

import random

import pytest
import torch

from quire.kernels.formats.lora_bank import LoraBank, LoraRows, lora_part
from quire.kernels.lora import (
    _cases,
    _embedding_cases,
    _pair_cases,
    lora_embedding,
    lora_linear,
    lora_pairs,
    random_bank,
    random_rows,
    sort_rows,
)
from quire.kernels.lora_experts import ExpertsLora, lora_experts
from quire.kernels.moe_experts import ExpertActivation, moe_experts
from quire.kernels.native.op_tape import TapeRecorder
from tests import tiers

CPU = torch.device("cpu")
SHARE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-20}
"""Of the magnitudes of all terms: the rounding of the result, and of v to TF32 on a GPU."""
pytestmark = pytest.mark.usefixtures("seeded", "native")


def rows_of(slots, count):
    rows = LoraRows.allocate(len(slots), count, CPU)
    rows.slots.copy_(torch.tensor(slots))
    sort_rows(rows)
    return rows


def exact(y, x, bank, rows):
    """In float64, one number after the other; and what the magnitudes of the terms sum to."""
    out, size = y.double(), y.double().abs()
    for t, slot in enumerate(rows.slots.tolist()):
        for p, columns in enumerate(bank.columns()):
            rank = 0 if slot < 0 else int(bank.ranks[slot, p])
            if not rank:
                continue
            a, b = bank.a[slot, p, :rank].double(), bank.b[slot, :rank, columns].double()
            if bank.factor is not None:
                out[t, columns] *= bank.factor[slot, columns].double()
            if bank.shift is not None:
                out[t, columns] += bank.shift[slot, columns].double()
            out[t, columns] += (a @ x[t].double()) @ b
            size[t, columns] = size[t, columns] * 2 + 1 + (a.abs() @ x[t].double().abs()) @ b.abs()
    return out, size


def check(got, y, x, bank, rows):
    want, size = exact(y, x, bank, rows)
    assert ((got.double() - want).abs() <= SHARE[y.dtype] * size).all()
    base = rows.slots < 0
    assert torch.equal(got[base], y[base])


def test_rows_are_sorted_by_slot_and_those_without_one_come_first():
    rows = rows_of([2, -1, 0, 2, -3, 0, 2], 4)
    assert rows.order.tolist() == [1, 4, 2, 5, 0, 3, 6]
    assert rows.starts.tolist() == [2, 4, 4, 7, 7]
    few = rows.first(3)
    sort_rows(few)
    assert few.order.tolist() == [1, 2, 0]
    assert rows.starts.tolist() == [1, 2, 2, 3, 3]


def test_products_are_near_float64():
    for case in _cases(CPU):
        got = lora_linear(case["y"].clone(), *(case[name] for name in ("x", "bank", "rows")))
        check(got, **case)


def test_products_of_any_shape_are_near_float64():
    draw = random.Random(7)
    for _ in range(tiers.amount(4, 400)):
        parts = tuple(draw.randint(1, 90) for _ in range(draw.randint(1, 3)))
        slots, inputs = draw.randint(1, 6), draw.randint(1, 200)
        ranks = [[draw.choice((0, 1, 3, 8, 16, 40)) for _ in parts] for _ in range(slots)]
        ranks[0][0] = 2
        dtype = draw.choice(list(SHARE))
        bank = random_bank(ranks, inputs, parts, dtype, CPU, dora=draw.random() < 0.5)
        rows = random_rows(draw.choice((1, 2, 5, 30, 200)), slots, CPU)
        x = torch.randn(len(rows.slots), inputs).to(dtype)
        y = torch.randn(len(rows.slots), sum(parts)).to(dtype)
        check(lora_linear(y.clone(), x, bank, rows), y, x, bank, rows)


def test_embeddings_are_products_of_one_hot_rows():
    for case in _embedding_cases(CPU):
        got = lora_embedding(case["y"].clone(), case["ids"], case["bank"], case["rows"])
        x = torch.nn.functional.one_hot(case["ids"].long(), case["bank"].a.shape[-1])
        check(got, case["y"], x, case["bank"], case["rows"])


def test_an_id_outside_the_vocabulary_is_not_read():
    bank, rows = random_bank([[8]], 20, (24,), torch.float32, CPU), rows_of([0, 0, -1, 0], 1)
    y, ids = torch.randn(4, 24), torch.tensor([3, 20, -5, -1], dtype=torch.int32)
    got = lora_embedding(y.clone(), ids, bank, rows)
    assert got[0].isfinite().all()
    assert got[[1, 3]].isnan().all()
    assert torch.equal(got[2], y[2])


def experts_bank(slots, experts, rank, inputs, parts):
    bank = LoraBank.allocate(slots, rank, inputs, parts, torch.float32, CPU, experts=experts)
    for slot in range(slots - 1):  # the last has no adapter
        given = [torch.randn(experts, rank, inputs), torch.randn(experts, sum(parts), rank)]
        bs = given[1].split(parts, 1)
        bank.write(slot, [lora_part(given[0], b, torch.float32) for b in bs])
    return bank


def test_pairs_of_tokens_and_experts_are_rows_of_their_own():
    for case in _pair_cases(CPU):
        ids, count = case["ids"], len(case["row_starts"]) - 1
        top, experts = ids.shape[1], (len(case["starts"]) - 1) // count
        rows = random_rows(len(ids), count, CPU)
        slots = rows.slots
        pairs = lora_pairs(rows, ids, experts)
        bank = experts_bank(count, experts, 4, 20, (16, 8))
        x, y = torch.randn(len(slots), 20), torch.randn(len(slots) * top, 24)
        got = lora_linear(y.clone(), x, bank, pairs)
        check(got, y, x.repeat_interleave(top, 0), bank, pairs)
        pair = torch.arange(len(y))
        want = slots[pair // top] * experts + ids.flatten()[pair]
        assert torch.equal(pairs.slots, torch.where(slots[pair // top] < 0, -1, want))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inputs", [96, 301])
def test_a_row_has_the_same_bits_in_any_company(dtype, inputs):
    bank = random_bank([[16, 4], [33, 33], [1, 0]], inputs, (72, 33), dtype, CPU, dora=True)
    rows = random_rows(80, 3, CPU)
    x, y = torch.randn(80, inputs).to(dtype), torch.randn(80, 105).to(dtype)
    whole = lora_linear(y.clone(), x, bank, rows)
    for count in (1, 2, 3, 7, 79):
        part = rows_of(rows.slots[:count].tolist(), 3)
        assert torch.equal(lora_linear(y[:count].clone(), x[:count], bank, part), whole[:count])
    alone = [
        lora_linear(y[t : t + 1].clone(), x[t : t + 1], bank, rows_of([int(slot)], 3))
        for t, slot in enumerate(rows.slots)
    ]
    assert torch.equal(torch.cat(alone), whole)


def test_rows_of_a_wider_tensor_are_read_and_written_where_they_are():
    bank, rows = random_bank([[8]], 40, (24,), torch.float32, CPU), rows_of([0, -1, 0], 1)
    wide_x, wide_y = torch.randn(3, 64), torch.randn(3, 50)
    want = wide_y.clone()
    want[:, 10:34] = lora_linear(want[:, 10:34].clone(), wide_x[:, 8:48].clone(), bank, rows)
    lora_linear(wide_y[:, 10:34], wide_x[:, 8:48], bank, rows)
    assert torch.equal(wide_y, want)


def test_a_tape_reads_the_rows_and_adapters_of_each_replay():
    bank = random_bank([[8], [16]], 64, (48,), torch.bfloat16, CPU)
    rows, x = rows_of([-1, -1, -1], 2), torch.randn(3, 64).bfloat16()
    y = torch.randn(3, 48).bfloat16()
    kept = y.clone()
    tape = TapeRecorder().record(lambda: lora_linear(y, x, bank, rows))
    assert torch.equal(tape.replay(), kept)
    for slots in ([0, 1, -1], [1, 1, 1]):
        rows.slots.copy_(torch.tensor(slots))
        sort_rows(rows)
        want = lora_linear(kept.clone(), x, bank, rows)
        y.copy_(kept)
        assert torch.equal(tape.replay(), want)
        bank.ranks[1] = 0


def test_a_slot_is_its_last_adapter():
    bank = LoraBank.allocate(2, 40, 24, (16, 8), torch.float32, CPU, factors=True, shifts=True)
    assert bank.rank == 48
    x, y, rows = torch.randn(3, 24), torch.randn(3, 24), rows_of([1, 1, 0], 2)
    assert torch.equal(lora_linear(y.clone(), x, bank, rows), y)  # no slot has an adapter
    large = [lora_part(torch.randn(40, 24), torch.randn(n, 40), torch.float32) for n in (16, 8)]
    scales = [dict(zip(("factor", "shift"), torch.rand(2, n))) for n in (16, 8)]
    bank.write(1, [one._replace(**scale) for one, scale in zip(large, scales)])
    small = lora_part(torch.randn(3, 24), torch.randn(8, 3), torch.float32)
    bank.write(1, [None, small])
    got = lora_linear(y.clone(), x, bank, rows)
    want = y.clone()
    want[:2, 16:] += x[:2] @ small.a.t() @ small.b
    torch.testing.assert_close(got, want)
    assert torch.equal(got[:, :16], y[:, :16])
    bank.ranks[1] = 0
    assert torch.equal(lora_linear(y.clone(), x, bank, rows), y)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_gone_bad_stays_in_its_row(bad):
    bank = random_bank([[16], [8]], 64, (48,), torch.bfloat16, CPU)
    rows = random_rows(9, 2, CPU)
    x, y = torch.randn(9, 64).bfloat16(), torch.randn(9, 48).bfloat16()
    want = lora_linear(y.clone(), x, bank, rows)
    x[0, 5] = bad
    got = lora_linear(y.clone(), x, bank, rows)
    assert not got[0].isfinite().any()
    assert torch.equal(got[1:], want[1:])


@pytest.mark.parametrize("kind", ["silu", "clamped"])
def test_experts_with_adapters_are_those_of_merged_weights(kind):
    tokens, size, width, experts, top, slots = 12, 24, 16, 5, 2, 3
    first, second = torch.randn(experts, 2 * width, size), torch.randn(experts, size, width)
    lora = ExpertsLora(
        experts_bank(slots, experts, 4, size, (width, width)),
        experts_bank(slots, experts, 3, width, (size,)),
    )
    x, ids = torch.randn(tokens, size), torch.rand(tokens, experts).argsort(-1)[:, :top].int()
    weights, gate, bias = (
        torch.rand(tokens, top),
        ExpertActivation(kind),
        torch.randn(experts, size),
    )
    base = moe_experts(x, ids, weights, first, second, gate, None, bias)
    rows = random_rows(tokens, slots, CPU)
    got = lora_experts(base.clone(), x, ids, weights, first, second, gate, lora, rows, None, bias)
    assert torch.equal(got[rows.slots < 0], base[rows.slots < 0])
    for slot in range(slots):
        at = rows.slots == slot
        merged = [merge(*pair, slot) for pair in zip((first, second), lora)]
        want = moe_experts(x[at], ids[at], weights[at], *merged, gate, None, bias)
        torch.testing.assert_close(got[at], want, atol=1e-3, rtol=1e-3)


def merge(weight, bank, slot):
    out, experts = weight.clone(), len(weight)
    for i in range(experts):
        for p, columns in enumerate(bank.columns()):
            if rank := int(bank.ranks[slot * experts + i, p]):
                a, b = bank.a[slot * experts + i, p, :rank], bank.b[slot * experts + i, :rank]
                out[i, columns] += b[:, columns].t() @ a
    return out

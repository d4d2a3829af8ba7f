"""Adapters of a step's rows: sums against loops in float64, bits of rows that share a step."""

import pytest
import torch

from quire.kernels.formats.lora_bank import LoraBank, LoraRows, lora_part
from quire.kernels.lora import _cases, lora_linear, random_bank, random_rows, sort_rows

CPU = torch.device("cpu")
SHARE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}
pytestmark = pytest.mark.usefixtures("seeded")


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


def test_a_slot_is_its_last_adapter():
    bank = LoraBank.allocate(2, 40, 24, (16, 8), torch.float32, CPU, factors=True, shifts=True)
    assert bank.rank == 48
    x, y, rows = torch.randn(3, 24), torch.randn(3, 24), rows_of([1, 1, 0], 2)
    assert torch.equal(lora_linear(y.clone(), x, bank, rows), y)  # no slot has an adapter
    large = [lora_part(torch.randn(40, 24), torch.randn(n, 40), torch.float32) for n in (16, 8)]
    bank.write(1, large, torch.rand(24), torch.rand(24))
    small = lora_part(torch.randn(3, 24), torch.randn(8, 3), torch.float32)
    bank.write(1, [None, small])
    got = lora_linear(y.clone(), x, bank, rows)
    want = y.clone()
    want[:2, 16:] += x[:2] @ small.a.t() @ small.b
    torch.testing.assert_close(got, want)
    assert torch.equal(got[:, :16], y[:, :16])
    bank.clear(1)
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

"""Low-rank adapters: y += B A x for the rows of a step that have an adapter, each its own.

Sums are in float32. y is the base product, rounded already, so a result is rounded twice. The sum
of a row depends on no other row of the step, and rows without an adapter keep their bits.

Axes: T rows, I inputs, O outputs, S slots of adapters, R the largest rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.formats.lora_bank import LoraBank, LoraRows, lora_part
from quire.kernels.framework.op import op


def _sort_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, s in [(1, 1), (7, 3), (64, 9), (300, 2), (5000, 33)]:
        rows = LoraRows.allocate(t, s, device)
        rows.slots.copy_(torch.randint(-1, s, (t,), dtype=torch.int32))
        yield {"slots": rows.slots, "order": rows.order, "starts": rows.starts}


@op(cases=_sort_cases)
def sort_by_slot(slots: Tensor, order: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Fill order [T] and starts [S + 1] of LoraRows in place, and return them. slots: int32 [T].

    Rows of one slot stay in their order.
    """
    known = slots.clamp(min=-1)
    order.copy_(known.argsort(stable=True))
    bounds = torch.arange(len(starts), dtype=torch.int32, device=slots.device)
    starts.copy_((known < bounds[:, None]).sum(1))
    return order, starts


def sort_rows(rows: LoraRows) -> None:
    """Sort the rows of a step after their slots were written: once, before its layers."""
    sort_by_slot(rows.slots, rows.order, rows.starts)


def random_bank(
    ranks: list[list[int]],
    inputs: int,
    parts: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    dora: bool = False,
) -> LoraBank:
    """A bank with one adapter a slot, for tests. ranks: of each slot and part."""
    most = max(max(some) for some in ranks)
    bank = LoraBank.allocate(
        len(ranks), most, inputs, parts, dtype, device, factors=dora, shifts=dora
    )
    for tensor in (bank.a, bank.b, bank.factor, bank.shift):
        if tensor is not None:
            tensor.fill_(float("nan"))  # what no adapter wrote must not be read
    for slot, some in enumerate(ranks):
        made = []
        for rank, size in zip(some, parts, strict=True):
            a, b = torch.randn(rank, inputs) / inputs**0.5, torch.randn(size, rank)
            part = lora_part(a.to(device), b.to(device) / max(rank, 1) ** 0.5, dtype)
            made.append(part if rank else None)
        outputs = sum(parts)
        row = torch.rand(2, outputs, device=device) + 0.5 if dora and slot % 2 == 0 else None
        bank.write(slot, made, *(row if row is not None else ()))
    return bank


def random_rows(count: int, slots: int, device: torch.device) -> LoraRows:
    """Sorted rows of random slots, for tests; about a quarter has none."""
    rows = LoraRows.allocate(count, slots, device)
    drawn = torch.randint(0, slots, (count,), dtype=torch.int32)
    rows.slots.copy_(torch.where(torch.rand(count) < 0.25, -1, drawn))
    rows.slots[0] = 0
    sort_rows(rows)
    return rows


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for t, i, parts, ranks, dtype, dora in [
        (1, 64, (64,), [[8]], fp32, False),
        (1, 300, (40, 24), [[16, 16]], bf16, False),
        (7, 96, (64, 16, 16), [[16, 16, 16], [4, 0, 1]], bf16, False),
        (20, 129, (33,), [[5], [0], [16]], fp32, True),
        (5, 101, (40,), [[33], [7]], bf16, True),
        (3, 64, (32, 32), [[8, 8], [0, 3]], fp16, False),
        (40, 512, (96,), [[64], [16], [1]], bf16, False),
        (300, 700, (200, 72), [[100, 16], [8, 8]], bf16, False),
        (400, 1024, (512,), [[16]] * 8, bf16, True),
    ]:
        yield {
            "y": torch.randn(t, sum(parts), device=device).to(dtype),
            "x": torch.randn(t, i, device=device).to(dtype),
            "bank": random_bank(ranks, i, parts, dtype, device, dora=dora),
            "rows": random_rows(t, len(ranks), device),
        }


@op(cases=_cases)
def lora_linear(y: Tensor, x: Tensor, bank: LoraBank, rows: LoraRows) -> Tensor:
    """Add the adapters' part of a linear layer to y [T, O] in place, and return it.

    x: [T, I], the input of the layer; rows of x may be strided. Both have the dtype of the bank.
    """
    for slot in rows.slots.unique().tolist():
        if slot >= 0:
            at = (rows.slots == slot).nonzero()[:, 0]
            y[at] = _adapted(y[at], x[at], bank, slot)
    return y


def _adapted(y: Tensor, x: Tensor, bank: LoraBank, slot: int) -> Tensor:
    """Rows of one slot, as LoraBank defines them."""
    out = y.clone()
    for p, columns in enumerate(bank.columns()):
        if rank := int(bank.ranks[slot, p]):
            base = y[:, columns].float()
            if bank.factor is not None:
                base = base * bank.factor[slot, columns]
            if bank.shift is not None:
                base = base + bank.shift[slot, columns]
            v = x.float() @ bank.a[slot, p, :rank].float().t()
            out[:, columns] = (base + v @ bank.b[slot, :rank, columns].float()).to(y.dtype)
    return out

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

from quire.kernels.formats.lora_bank import LoraBank, LoraPart, LoraRows, lora_part
from quire.kernels.framework.op import op
from quire.kernels.native.library import DTYPES, LORA, LORA_ROWS, NativeOp


def _sort_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, s in [(1, 1), (7, 3), (64, 9), (300, 2), (5000, 33)]:
        rows = LoraRows.allocate(t, s, device)
        given = {"slots": rows.slots, "order": rows.order, "starts": rows.starts}
        rows.slots.copy_(torch.randint(-1, s, (t,), dtype=torch.int32))
        yield given
        table = torch.randint(-1, s, (9,), dtype=torch.int32, device=device)
        sequences = torch.randint(-2, 9, (t,), dtype=torch.int32, device=device)
        yield given | {"table": table, "sequences": sequences}


_run_sort = NativeOp(LORA_ROWS, "q" * 7)


def _native_sort(
    slots: Tensor,
    order: Tensor,
    starts: Tensor,
    table: Tensor | None = None,
    sequences: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _run_sort(
        slots.data_ptr(), order.data_ptr(), starts.data_ptr(),
        0 if table is None else table.data_ptr(), 0 if sequences is None else sequences.data_ptr(),
        len(slots), len(starts) - 1,
    )  # fmt: skip
    return slots, order, starts


@op(cases=_sort_cases, native=_native_sort, gpu="lora.sort_rows")
def sort_by_slot(
    slots: Tensor,
    order: Tensor,
    starts: Tensor,
    table: Tensor | None = None,
    sequences: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fill order [T] and starts [S + 1] of LoraRows in place, and slots [T] if there is a table.

    Returns the three. table: int32 [M], the slot of each sequence, sequences: int32 [T], that of
    each row, negative: none. Rows of one slot stay in their order.
    """
    if table is not None and sequences is not None:
        slots.copy_(torch.where(sequences < 0, -1, table[sequences.clamp(min=0).long()]))
    known = slots.clamp(min=-1)
    order.copy_(known.argsort(stable=True))
    bounds = torch.arange(len(starts), dtype=torch.int32, device=slots.device)
    starts.copy_((known < bounds[:, None]).sum(1))
    return slots, order, starts


def sort_rows(rows: LoraRows) -> None:
    """Sort rows after their slots were written."""
    sort_by_slot(rows.slots, rows.order, rows.starts)


def assign_rows(rows: LoraRows, table: Tensor, sequences: Tensor) -> None:
    """Write the slots of rows and sort them: once a step, before its layers. As sort_by_slot()."""
    sort_by_slot(rows.slots, rows.order, rows.starts, table, sequences)


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
        made: list[LoraPart | None] = []
        for rank, size in zip(some, parts, strict=True):
            a, b = torch.randn(rank, inputs) / inputs**0.5, torch.randn(size, rank)
            part = lora_part(a.to(device), b.to(device) / max(rank, 1) ** 0.5, dtype)
            if dora and slot % 2 == 0:
                factor, shift = torch.rand(2, size, device=device) + 0.5
                part = part._replace(factor=factor, shift=shift)
            made.append(part if rank else None)
        bank.write(slot, made)
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


_run = NativeOp(LORA, "q" * 21)


def _run_native(
    y: Tensor, x: Tensor | None, ids: Tensor | None, bank: LoraBank, rows: LoraRows, top: int
) -> Any:
    """Both ops: v is the product of x, or the column of A that an id names."""
    given = [one for one in (y, x) if one is not None]
    if any(one.dtype != bank.a.dtype or one.stride(1) != 1 for one in given):
        return NotImplemented
    if bank.room != bank.rank:  # a narrow view, which the CPU has no use for
        return NotImplemented
    if y.dtype not in DTYPES or (ids is not None and ids.dtype != torch.int32):
        return NotImplemented
    slots, parts, rank, inputs = bank.a.shape
    check_rows(y, bank, rows)
    _run(
        0 if x is None else x.data_ptr(), 0 if x is None else x.stride(0) * x.element_size(),
        0 if ids is None else ids.data_ptr(), y.data_ptr(), y.stride(0) * y.element_size(),
        bank.a.data_ptr(), bank.b.data_ptr(), bank.ranks.data_ptr(), bank.bounds.data_ptr(),
        0 if bank.factor is None else bank.factor.data_ptr(),
        0 if bank.shift is None else bank.shift.data_ptr(),
        rows.order.data_ptr(), rows.starts.data_ptr(), len(y), top,
        slots, parts, rank, inputs, y.shape[1], DTYPES[y.dtype],
    )  # fmt: skip
    return y


def _native(y: Tensor, x: Tensor, bank: LoraBank, rows: LoraRows) -> Any:
    return _run_native(y, x, None, bank, rows, rows_per_input(y, x))


def check_rows(y: Tensor, bank: LoraBank, rows: LoraRows) -> None:
    """Kernels read no further than this allows."""
    slots, found = bank.slots, len(rows.starts) - 1
    assert found == slots, f"rows of {found} slots, a bank of {slots}"
    assert len(rows.order) == len(y), f"{len(rows.order)} sorted rows for {len(y)}"


def rows_per_input(y: Tensor, x: Tensor) -> int:
    """How many rows of y have one row of x: those of a token's experts may share one."""
    return len(y) // max(len(x), 1) or 1


@op(cases=_cases, native=_native, gpu="lora.lora_linear")
def lora_linear(y: Tensor, x: Tensor, bank: LoraBank, rows: LoraRows) -> Tensor:
    """Add the adapters' part of a linear layer to y [T, O] in place, and return it.

    x: [T, I], the input of the layer, or [T / k, I]: each of its rows is that of k rows of y. Rows
    may be strided. Both have the dtype of the bank.
    """
    top = rows_per_input(y, x)
    for slot in rows.slots.unique().tolist():
        if slot >= 0:
            at = (rows.slots == slot).nonzero()[:, 0]
            y[at] = _adapted(y[at], bank, slot, _project(x[at // top], bank, slot))
    return y


def _project(x: Tensor, bank: LoraBank, slot: int) -> Tensor:
    """v of rows of one slot: [P, n, R]."""
    return x.float() @ bank.a[slot].float().mT


def _adapted(y: Tensor, bank: LoraBank, slot: int, v: Tensor) -> Tensor:
    """Rows of one slot, as LoraBank defines them. v: [P, n, R]."""
    out = y.clone()
    for p, columns in enumerate(bank.columns()):
        if rank := int(bank.ranks[slot, p]):
            base = y[:, columns].float()
            if bank.factor is not None:
                base = base * bank.factor[slot, columns]
            if bank.shift is not None:
                base = base + bank.shift[slot, columns]
            delta = v[p, :, :rank] @ bank.b[slot, :rank, columns].float()
            out[:, columns] = (base + delta).to(y.dtype)
    return out


def _embedding_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, v, e, ranks, dtype, dora in [
        (1, 50, 64, [8], torch.float32, True),
        (9, 101, 40, [16, 3, 0], torch.bfloat16, False),
        (70, 64, 33, [5, 20], torch.float16, True),
        (300, 700, 512, [16] * 5, torch.bfloat16, False),
    ]:
        yield {
            "y": torch.randn(t, e, device=device).to(dtype),
            "ids": torch.randint(0, v, (t,), device=device, dtype=torch.int32),
            "bank": random_bank([[rank] for rank in ranks], v, (e,), dtype, device, dora=dora),
            "rows": random_rows(t, len(ranks), device),
        }


def _native_embedding(y: Tensor, ids: Tensor, bank: LoraBank, rows: LoraRows) -> Any:
    return _run_native(y, None, ids, bank, rows, 1)


@op(cases=_embedding_cases, native=_native_embedding, gpu="lora.lora_embedding")
def lora_embedding(y: Tensor, ids: Tensor, bank: LoraBank, rows: LoraRows) -> Tensor:
    """Add the adapters' part of an embedding to y [T, E] in place, and return it.

    ids: [T] int32; where the bank has no such input, the row is NaN. A scale of the embedding is in
    b.
    """
    for slot in rows.slots.unique().tolist():
        if slot >= 0:
            at = (rows.slots == slot).nonzero()[:, 0]
            known = (ids[at] >= 0) & (ids[at] < bank.a.shape[-1])
            columns = bank.a[slot][..., torch.where(known, ids[at], 0).long()].float()
            v = torch.where(known, columns, torch.nan).mT
            y[at] = _adapted(y[at], bank, slot, v)
    return y


def _pair_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, s, x, k in [(1, 2, 4, 2), (9, 3, 8, 4), (300, 2, 16, 1), (64, 8, 128, 8)]:
        rows = random_rows(t, s, device)
        ids = torch.rand(t, x, device=device).argsort(-1)[:, :k].int().contiguous()
        pairs = LoraRows.allocate(t * k, s * x, device)
        yield {"pair_slots": pairs.slots, "order": pairs.order, "starts": pairs.starts,
               "row_order": rows.order, "row_starts": rows.starts, "ids": ids}  # fmt: skip


@op(cases=_pair_cases, gpu="lora.sort_pairs")
def sort_pairs(
    pair_slots: Tensor,
    order: Tensor,
    starts: Tensor,
    row_order: Tensor,
    row_starts: Tensor,
    ids: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fill the first three, the LoraRows of pairs of a token and an expert, and return them.

    row_order: [T], row_starts: [S + 1], of the tokens. ids: int32 [T, k], their experts. Pair p is
    token p // k. The others have the lengths of LoraRows for T * k rows and S * X slots.
    """
    experts = (len(starts) - 1) // (len(row_starts) - 1)
    at = torch.arange(len(row_order), dtype=torch.int32, device=ids.device)
    slots = torch.empty_like(row_order)
    slots[row_order.long()] = torch.searchsorted(row_starts, at, right=True, out_int32=True) - 1
    keys = torch.where(slots[:, None] < 0, -1, slots[:, None] * experts + ids)
    order.copy_(
        (
            row_order.long()[:, None] * ids.shape[1] + torch.arange(ids.shape[1], device=ids.device)
        ).flatten()
    )
    order.copy_(order[keys.flatten()[order.long()].argsort(stable=True)])
    pair_slots.copy_(keys.flatten())
    bounds = torch.arange(len(starts), dtype=torch.int32, device=ids.device)
    starts.copy_((pair_slots < bounds[:, None]).sum(1))
    return pair_slots, order, starts


def lora_pairs(rows: LoraRows, ids: Tensor, experts: int) -> LoraRows:
    """The rows of a step's pairs of a token and an expert, for banks of experts: new tensors."""
    slots, order = rows.slots.new_empty(ids.numel()), rows.slots.new_empty(ids.numel())
    starts = rows.starts.new_empty((len(rows.starts) - 1) * experts + 1)
    return LoraRows(*sort_pairs(slots, order, starts, rows.order, rows.starts, ids))

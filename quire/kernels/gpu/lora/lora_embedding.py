"""Adapters of an embedding: a program adds outputs of one row, whose column of A it gathers."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from quire.kernels.formats.lora_bank import LoraBank, LoraRows
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel
from quire.kernels.lora import check_rows

COLUMNS = 256
RANKS = 16  # multiplied at a time


@kernel()
def _add(
    id_ptr,  # [T]
    slot_ptr,  # [T]
    a_ptr,  # [S, 1, R, V]
    b_ptr,  # [S, R, E]
    rank_ptr,  # [S, 1]
    factor_ptr,  # [S, E] or None
    shift_ptr,  # [S, E] or None
    y_ptr,  # [T, E], in place
    Y_T: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_previous_kernel()
        launch_dependents()
    t = tl.program_id(0)
    slot = tl.load(slot_ptr + t).to(tl.int64)
    if slot < 0:
        return
    rank = tl.load(rank_ptr + slot)
    if rank == 0:
        return
    token = tl.load(id_ptr + t)
    known = (token >= 0) & (token < V)
    e = tl.program_id(1) * BN + tl.arange(0, BN)
    sums = tl.zeros((BN,), tl.float32)
    for first in range(0, rank, BR):
        r = first + tl.arange(0, BR)
        at = slot * R + r
        v = tl.load(a_ptr + at * V + token, (r < rank) & known, float("nan")).to(tl.float32)
        v = tl.where(r < rank, v, 0.0)
        b = tl.load(b_ptr + at[:, None] * E + e[None], (r < rank)[:, None] & (e < E)[None], 0.0)
        sums += tl.sum(v[:, None] * b.to(tl.float32), 0)
    y_at = y_ptr + t.to(tl.int64) * Y_T + e
    y = tl.load(y_at, e < E, 0.0).to(tl.float32)
    if factor_ptr is not None:
        y *= tl.load(factor_ptr + slot * E + e, e < E, 0.0)
    if shift_ptr is not None:
        y += tl.load(shift_ptr + slot * E + e, e < E, 0.0)
    tl.store(y_at, (y + sums).to(y_ptr.dtype.element_ty), e < E)


def outputs(y: Tensor, ids: Tensor, bank: LoraBank, rows: LoraRows) -> Tensor:
    fits = y.dtype == bank.a.dtype and y.stride(1) == 1 and ids.is_contiguous()
    return y if fits else NotImplemented


def launch(out: Tensor, y: Tensor, ids: Tensor, bank: LoraBank, rows: LoraRows) -> None:
    check_rows(y, bank, rows)
    if not len(y):
        return
    _, _, rank, vocab = bank.a.shape
    _add(
        (len(y), cdiv(y.shape[1], COLUMNS), 1),
        (ids, rows.slots, bank.a, bank.b, bank.ranks, bank.factor, bank.shift, y),
        (),
        (y.stride(0), vocab, y.shape[1], rank, RANKS, COLUMNS, PDL_ENABLED),
        warps=4,
        pdl=PDL_ENABLED,
    )

"""Gathers few rows with their chosen experts, through the peers' memory: see peer_flagged_sum.py.

A program has a row of this rank, and then takes the next one. It stores the row, in words with
flags, into the area of every other rank, and waits for the row of the same number of each.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.peer_memory import (
    LINE_WORDS,
    MAX_FLAGGED_RANKS,
    SLOT_BYTES,
    PeerMemory,
    flagged_start,
)
from quire.kernels.gpu.peer_flagged_sum import _slot, _wait_for_terms
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel

_LINE = tl.constexpr(LINE_WORDS)
MOST_ROWS = 4
"""Of a program, one after the other. For more a collective of NCCL is faster."""


@kernel("rows", "rank")
def _gather_flagged(
    x_ptr,  # [T, W words]
    id_ptr,  # int32 [T, TOP]
    weight_ptr,  # float32 [T, TOP]
    slot_ptr,  # int32 [T], or None
    areas_ptr,  # int64 [RANKS]
    abort_ptr,  # int32 [1]
    x_out_ptr,  # [RANKS * T, W words]
    id_out_ptr,  # int32 [RANKS * T, TOP]
    weight_out_ptr,  # float32 [RANKS * T, TOP]
    rows,
    rank,  # a number: all ranks run the same kernels
    W: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= W
    TOP: tl.constexpr,
    TOP_BLOCK: tl.constexpr,  # power of two >= TOP
    START: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    i, t = tl.arange(0, BLOCK), tl.arange(0, TOP_BLOCK)
    live, some = i < W, t < TOP
    word = tl.pointer_type(tl.int32)
    line = tl.load(areas_ptr + rank).to(word) + program * _LINE
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    number = tl.load(line + _LINE - 2)
    for row in range(program, rows, tl.num_programs(0)):
        number += 1
        half = number & 1
        own = tl.load(x_ptr.to(word) + row * W + i, live, 0)
        own_ids = tl.load(id_ptr + row * TOP + t, some, -1)
        if slot_ptr is not None:
            own_ids = tl.where(tl.load(slot_ptr + row) < 0, -1, own_ids)
        own_weights = tl.load(weight_ptr.to(word) + row * TOP + t, some, 0)
        flag = number.to(tl.int64) << 32
        for k in tl.static_range(RANKS):
            if k != rank:
                slot = _slot(areas_ptr, k, program, half, rank, START, RANKS)
                tl.store(slot + i, (own.to(tl.int64) & 0xFFFFFFFF) | flag, live)
                tl.store(slot + W + t, (own_ids.to(tl.int64) & 0xFFFFFFFF) | flag, some)
                tl.store(slot + W + TOP + t, (own_weights.to(tl.int64) & 0xFFFFFFFF) | flag, some)
        for k in tl.static_range(RANKS):
            x, ids, weights = own, own_ids, own_weights
            if k != rank:
                slot = _slot(areas_ptr, rank, program, half, k, START, RANKS)
                x = _wait_for_terms(slot + i, live, number, abort_ptr)
                ids = _wait_for_terms(slot + W + t, some, number, abort_ptr)
                weights = _wait_for_terms(slot + W + TOP + t, some, number, abort_ptr)
            at = k * rows + row
            tl.store(x_out_ptr.to(word) + at * W + i, x, live)
            tl.store(id_out_ptr + at * TOP + t, ids, some)
            tl.store(weight_out_ptr.to(word) + at * TOP + t, weights, some)
    tl.store(line + _LINE - 2, number)


def words_of(x: Tensor) -> int:
    """Words of 4 bytes of a row of x [T, E]."""
    return x.shape[1] * x.element_size() // 4


def fits(x: Tensor, words: int, rows: int, peers: PeerMemory | None) -> bool:
    """Whether rows of so many words go through the peers' memory. rows: of each rank."""
    whole = x.is_contiguous() and x.shape[1] * x.element_size() % 4 == 0
    return (
        peers is not None
        and whole
        and 8 * words <= SLOT_BYTES
        and rows <= MOST_ROWS * peers.programs
        and peers.ranks <= MAX_FLAGGED_RANKS
    )


def outputs(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    slots: Tensor | None,
    group: Any,
    peers: PeerMemory | None = None,
) -> Any:
    rows, top = ids.shape
    plain = ids.is_contiguous() and weights.is_contiguous()
    if not plain or not fits(x, words_of(x) + 2 * top, rows, peers):
        return NotImplemented
    assert peers is not None
    total = peers.ranks * rows
    return (
        torch.empty((total, x.shape[1]), dtype=x.dtype, device=x.device),
        torch.empty((total, top), dtype=ids.dtype, device=x.device),
        torch.empty((total, top), dtype=weights.dtype, device=x.device),
    )


def launch(
    out: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    slots: Tensor | None,
    group: Any,
    peers: PeerMemory,
) -> None:
    rows, top = ids.shape
    words = words_of(x)
    block = next_power_of_2(words)
    _gather_flagged(
        (min(rows, peers.programs), 1, 1),
        (x, ids, weights, slots, peers.areas, peers.abort, *out),
        (rows, peers.rank),
        (
            words,
            block,
            top,
            next_power_of_2(top),
            flagged_start(peers.programs),
            peers.ranks,
            PDL_ENABLED,
        ),
        warps=max(1, min(16, block // 128)),
        pdl=PDL_ENABLED,
    )

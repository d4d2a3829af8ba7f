"""Sums what all ranks add to the rows of each, through the peers' memory: see peer_flagged_sum.py.

A program has a row of this rank, and then takes the next one. It stores its terms of the row of the
same number of each other rank, in words with flags, into that rank's area, and sums what the others
store for its own row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.peer_memory import LINE_WORDS, PeerMemory, flagged_start
from quire.kernels.gpu.peer_flagged_sum import _halves, _slot, _wait_for_terms, _words
from quire.kernels.gpu.peer_gather_rows import fits, words_of
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel

_LINE = tl.constexpr(LINE_WORDS)


@kernel("rows", "rank")
def _scatter_sums_flagged(
    x_ptr,  # [RANKS * T, W words], terms of this rank
    areas_ptr,  # int64 [RANKS]
    abort_ptr,  # int32 [1]
    sum_ptr,  # [T, W words] out
    rows,  # T
    rank,  # a number: all ranks run the same kernels
    W: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= W
    START: tl.constexpr,
    RANKS: tl.constexpr,
    WIDE: tl.constexpr,  # float32: a word is one element, else two
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    live = i < W
    dtype = x_ptr.dtype.element_ty
    word = tl.pointer_type(tl.int32)
    line = tl.load(areas_ptr + rank).to(word) + program * _LINE
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    number = tl.load(line + _LINE - 2)
    for row in range(program, rows, tl.num_programs(0)):
        number += 1
        half = number & 1
        flag = number.to(tl.int64) << 32
        own = tl.load(x_ptr.to(word) + (rank * rows + row) * W + i, live, 0)
        for k in tl.static_range(RANKS):
            if k != rank:
                at = k * rows + row
                given = tl.load(x_ptr.to(word) + at * W + i, live, 0)
                slot = _slot(areas_ptr, k, program, half, rank, START, RANKS)
                tl.store(slot + i, (given.to(tl.int64) & 0xFFFFFFFF) | flag, live)
        low, high = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        for k in tl.static_range(RANKS):
            terms = own
            if k != rank:
                slot = _slot(areas_ptr, rank, program, half, k, START, RANKS)
                terms = _wait_for_terms(slot + i, live, number, abort_ptr)
            if WIDE:
                low += terms.to(tl.float32, bitcast=True)
            else:
                term_low, term_high = _halves(terms, dtype)
                low += term_low
                high += term_high
        if WIDE:
            total = low.to(tl.int32, bitcast=True)
        else:
            total = _words(low, high, dtype)
        tl.store(sum_ptr.to(word) + row * W + i, total, live)
    tl.store(line + _LINE - 2, number)


def outputs(x: Tensor, ranks: int, group: Any, peers: PeerMemory | None = None) -> Any:
    if not fits(x, words_of(x), len(x) // ranks, peers):
        return NotImplemented
    return torch.empty((len(x) // ranks, x.shape[1]), dtype=x.dtype, device=x.device)


def launch(out: Tensor, x: Tensor, ranks: int, group: Any, peers: PeerMemory) -> None:
    words = words_of(x)
    block = next_power_of_2(words)
    _scatter_sums_flagged(
        (min(len(out), peers.programs), 1, 1),
        (x, peers.areas, peers.abort, out),
        (len(out), peers.rank),
        (
            words,
            block,
            flagged_start(peers.programs),
            peers.ranks,
            x.element_size() == 4,
            PDL_ENABLED,
        ),
        warps=max(1, min(16, block // 128)),
        pdl=PDL_ENABLED,
    )

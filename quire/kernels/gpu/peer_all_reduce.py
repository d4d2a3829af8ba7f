"""All-reduce through the peers' memory, alone or with the residual add and RMSNorm behind it.

    terms -> own area -> meeting -> sum of all areas, in rank order -> [+ residual] -> [norm]

A sum is of float32, in rank order, and is rounded once, so it has the same bits on every rank and
does not depend on the rows beside it. With many ranks each sums a share of the columns and writes
it to all (two shots); the bits are the same.

A program has a row of the step or a few, and then takes the next ones: all programs run at the same
time, so none waits for one that has not started. One meeting for each group of rows is enough,
because the slots alternate (quire.kernels.formats.peer_memory). Few rows have no meetings:
peer_flagged_sum.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.peer_memory import LINE_WORDS, SLOT_BYTES, PeerMemory
from quire.kernels.gpu import peer_flagged_sum
from quire.kernels.gpu.peer_flagged_sum import SumNorm
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel

_LINE = tl.constexpr(LINE_WORDS)
_SLOT = tl.constexpr(SLOT_BYTES)
_POLL = tl.constexpr(4096)
"""Tries between two looks at the abort word, which is in host memory."""

MAX_ROWS = 4
"""Of a program at a time."""
ONE_SHOT_BYTES = 256 * 1024
"""Of the terms of a step. Up to so many, one shot is faster on more than two ranks."""


@triton.jit
def _meet(areas_ptr, abort_ptr, program, meeting, rank, RANKS: tl.constexpr):
    """Come to a meeting, and wait for this program of every other rank."""
    tl.debug_barrier()  # the stores of all threads come before the signal
    for k in tl.static_range(RANKS):
        if k != rank:
            theirs = tl.load(areas_ptr + k).to(tl.pointer_type(tl.int32))
            tl.atomic_add(theirs + program * _LINE + rank, 1, sem="release", scope="sys")
    mine = tl.load(areas_ptr + rank).to(tl.pointer_type(tl.int32)) + program * _LINE
    for k in tl.static_range(RANKS):
        if k != rank:
            missing = meeting - tl.atomic_add(mine + k, 0, sem="acquire", scope="sys")
            tries = 0
            while missing > 0:
                missing = meeting - tl.atomic_add(mine + k, 0, sem="acquire", scope="sys")
                tries += 1
                if tries % _POLL == 0:
                    if tl.load(abort_ptr, volatile=True) != 0:
                        missing = 0
    tl.debug_barrier()


@triton.jit
def _slot(areas_ptr, rank, program, place, dtype: tl.constexpr, PROGRAMS: tl.constexpr):
    """Address of a program's slot in a rank's area. place: 0, 1 of terms, 2, 3 of sums."""
    at = PROGRAMS * _LINE * 4 + (program * 4 + place) * _SLOT
    slot = (tl.load(areas_ptr + rank) + at).to(tl.pointer_type(dtype))
    return tl.multiple_of(slot, 16)  # a load of it all is one instruction for each 16 bytes


@kernel("rows", "eps", "offset", "rank")
def _sum_rows(
    x_ptr,  # [T, E], terms of this rank
    areas_ptr,  # int64 [N]
    abort_ptr,  # int32 [1]
    sum_ptr,  # [T, E] out, may be x; read only if STORE
    res_ptr,  # [T, E], read only if ADD
    w_ptr,  # [E], read only if NORM
    y_ptr,  # [T, E] out, if NORM
    r_ptr,  # [T, E] out, if ADD
    rows,
    eps,
    offset,
    rank,  # a number: all ranks run the same kernels
    E: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= E
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,  # of an area
    RANKS: tl.constexpr,
    SHARE: tl.constexpr,  # columns that each rank sums for all; 0: all ranks sum all
    SHARE_BLOCK: tl.constexpr,
    STORE: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    e = tl.arange(0, BLOCK)[None, :]
    dtype = x_ptr.dtype.element_ty
    line = tl.load(areas_ptr + rank).to(tl.pointer_type(tl.int32)) + program * _LINE
    w = tl.zeros((1, BLOCK), tl.float32)
    if NORM:
        w = offset + tl.load(w_ptr + e, e < E, 0.0).to(tl.float32)
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    meetings = tl.load(line + _LINE - 1)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        live = (row < rows) & (e < E)
        at, place = row * E + e, tl.arange(0, ROWS)[:, None] * E + e
        half = meetings & 1
        own = tl.load(x_ptr + at, live, 0.0)
        tl.store(_slot(areas_ptr, rank, program, half, dtype, PROGRAMS) + place, own, live)
        residual = tl.zeros((ROWS, BLOCK), tl.float32)
        if ADD:  # on its way while the others come
            residual = tl.load(res_ptr + at, live, 0.0).to(tl.float32)
        meetings += 1
        _meet(areas_ptr, abort_ptr, program, meetings, rank, RANKS)
        if SHARE:
            c = rank * SHARE + tl.arange(0, SHARE_BLOCK)[None, :]
            mine = (row < rows) & (c < min(E, (rank + 1) * SHARE))
            spot = tl.arange(0, ROWS)[:, None] * E + c
            share = tl.zeros((ROWS, SHARE_BLOCK), tl.float32)
            for k in tl.static_range(RANKS):
                terms = _slot(areas_ptr, k, program, half, dtype, PROGRAMS)
                share += tl.load(terms + spot, mine, 0.0).to(tl.float32)
            for k in tl.static_range(RANKS):
                sums = _slot(areas_ptr, k, program, 2 + half, dtype, PROGRAMS)
                tl.store(sums + spot, share.to(dtype), mine)
            meetings += 1
            _meet(areas_ptr, abort_ptr, program, meetings, rank, RANKS)
            total = tl.load(
                _slot(areas_ptr, rank, program, 2 + half, dtype, PROGRAMS) + place, live, 0.0
            )
        else:
            wide = tl.zeros((ROWS, BLOCK), tl.float32)
            for k in tl.static_range(RANKS):
                if k == rank:
                    wide += own.to(tl.float32)
                else:
                    terms = _slot(areas_ptr, k, program, half, dtype, PROGRAMS)
                    wide += tl.load(terms + place, live, 0.0).to(tl.float32)
            total = wide.to(dtype)
        if STORE:
            tl.store(sum_ptr + at, total, live)
        if NORM:
            x = total.to(tl.float32)
            if ADD:
                rounded = (x + residual).to(dtype)
                tl.store(r_ptr + at, rounded, live)
                x = rounded.to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x, 1) / E + eps)
            tl.store(y_ptr + at, (x * scale[:, None] * w).to(dtype), live)
    tl.store(line + _LINE - 1, meetings)


def takes_two_shots(x: Tensor, peers: PeerMemory) -> bool:
    """Whether each rank sums a share of the columns for all. Two ranks move as much either way."""
    return peers.ranks > 2 and x.nbytes > ONE_SHOT_BYTES


def launch(out: Tensor, x: Tensor, peers: PeerMemory, norm: SumNorm | None, store: bool) -> None:
    """Sum x [T, E] over the ranks into out. store: something else than the norm reads the sum."""
    if peer_flagged_sum.supports(x, peers):
        peer_flagged_sum.launch(out, x, peers, norm, store)
        return
    rows, size = x.shape
    block = next_power_of_2(size)
    most = max(1, min(MAX_ROWS, SLOT_BYTES // (size * x.element_size())))
    each = min(most, next_power_of_2(cdiv(rows, peers.programs)))
    each = 1 << (each.bit_length() - 1)
    programs = min(peers.programs, cdiv(rows, each))
    share = 0
    if takes_two_shots(x, peers):
        share = cdiv(cdiv(size, peers.ranks), 16) * 16
    residual = None if norm is None else norm.residual
    _sum_rows(
        (programs, 1, 1),
        (
            x,
            peers.areas,
            peers.abort,
            out if store else None,
            residual,
            None if norm is None else norm.weight,
            None if norm is None else norm.y,
            None if norm is None or residual is None else norm.r,
        ),
        (
            rows,
            0.0 if norm is None else norm.eps,
            0.0 if norm is None else norm.offset,
            peers.rank,
        ),
        (
            size,
            block,
            each,
            peers.programs,
            peers.ranks,
            share,
            next_power_of_2(share),
            store,
            norm is not None,
            residual is not None,
            PDL_ENABLED,
        ),
        warps=max(1, min(16, each * block // 256)),
        pdl=PDL_ENABLED,
    )

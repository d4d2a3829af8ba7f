"""All-reduce of few rows: terms travel with flags, and no rank waits for a meeting.

    terms and flag -> every other rank's area;  wait for theirs -> sum -> [+ residual] -> [norm]

A store of 8 bytes arrives whole. It has 4 bytes of terms, and the number of the sum: a rank that
finds that number has the terms. So a sum takes one way over the link, where a meeting and the reads
behind it take three. Twice the bytes travel, which matters for many rows: those are for
peer_all_reduce.py, whose sums have the same bits.

A slot is written again two sums later. A rank begins the next sum when it has read its slots of the
one before, and a rank's terms of the next are what another waits for: so none writes what is still
read.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.peer_memory import (
    LINE_WORDS,
    MAX_FLAGGED_RANKS,
    SLOT_BYTES,
    PeerMemory,
    flagged_start,
)
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel

_LINE = tl.constexpr(LINE_WORDS)
_SLOT = tl.constexpr(SLOT_BYTES)
_POLL = tl.constexpr(4096)
"""Tries between two looks at the abort word, which is in host memory."""
MAX_ROWS = 64
"""More rows of 8 KiB are summed faster with half the bytes, as measured on two H200."""


@triton.jit
def _slot(areas_ptr, area, program, half, source, START: tl.constexpr, RANKS: tl.constexpr):
    """Address of the terms of rank `source` in an area."""
    at = START + ((program * 2 + half) * RANKS + source) * _SLOT
    slot = (tl.load(areas_ptr + area) + at).to(tl.pointer_type(tl.int64))
    return tl.multiple_of(slot, 16)


@triton.jit
def _missing(found, live, number):
    return tl.sum(tl.where(live & ((found >> 32).to(tl.int32) != number), 1, 0))


@triton.jit
def _wait_for_terms(slot_ptr, live, number, abort_ptr):
    """Return the terms of a slot, int32, when all have this number."""
    found = tl.load(slot_ptr, live, 0, volatile=True)
    missing = _missing(found, live, number)
    tries = 0
    while missing > 0:
        found = tl.load(slot_ptr, live, 0, volatile=True)
        missing = _missing(found, live, number)
        tries += 1
        if tries % _POLL == 0:
            if tl.load(abort_ptr, volatile=True) != 0:
                missing = 0
    return found.to(tl.int32)


@triton.jit
def _halves(words, dtype: tl.constexpr):
    """The two elements of each word, in float32."""
    low = (words & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    high = (words >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _words(low, high, dtype: tl.constexpr):
    """The elements rounded, two in a word."""
    low = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32)
    high = high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32)
    return (low & 0xFFFF) | (high << 16)


@kernel("eps", "offset", "rank")
def _sum_flagged(
    x_ptr,  # [T, 2W], terms of this rank; a program has a row
    areas_ptr,  # int64 [N]
    abort_ptr,  # int32 [1]
    sum_ptr,  # [T, 2W] out, may be x; read only if STORE
    res_ptr,  # [T, 2W], read only if ADD
    w_ptr,  # [2W], read only if NORM
    y_ptr,  # [T, 2W] out, if NORM
    r_ptr,  # [T, 2W] out, if ADD
    eps,
    offset,
    rank,  # a number: all ranks run the same kernels
    W: tl.constexpr,  # words of a row
    BLOCK: tl.constexpr,  # power of two >= W
    START: tl.constexpr,
    RANKS: tl.constexpr,
    STORE: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    live = i < W
    at = program.to(tl.int64) * W + i
    dtype = x_ptr.dtype.element_ty
    word = tl.pointer_type(tl.int32)
    line = tl.load(areas_ptr + rank).to(word) + program * _LINE
    w_low, w_high = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    if NORM:
        w_low = offset + tl.load(w_ptr + 2 * i, live, 0.0).to(tl.float32)
        w_high = offset + tl.load(w_ptr + 2 * i + 1, live, 0.0).to(tl.float32)
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    number = tl.load(line + _LINE - 2) + 1
    half = number & 1
    own = tl.load(x_ptr.to(word) + at, live, 0)
    flagged = (own.to(tl.int64) & 0xFFFFFFFF) | (number.to(tl.int64) << 32)
    for k in tl.static_range(RANKS):
        if k != rank:
            tl.store(_slot(areas_ptr, k, program, half, rank, START, RANKS) + i, flagged, live)
    residual = tl.zeros((BLOCK,), tl.int32)
    if ADD:  # on its way while the terms come
        residual = tl.load(res_ptr.to(word) + at, live, 0)
    low, high = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(RANKS):
        terms = own
        if k != rank:
            slot = _slot(areas_ptr, rank, program, half, k, START, RANKS)
            terms = _wait_for_terms(slot + i, live, number, abort_ptr)
        term_low, term_high = _halves(terms, dtype)
        low += term_low
        high += term_high
    total = _words(low, high, dtype)
    if STORE:
        tl.store(sum_ptr.to(word) + at, total, live)
    if NORM:
        if ADD:
            low, high = _halves(total, dtype)
            res_low, res_high = _halves(residual, dtype)
            total = _words(low + res_low, high + res_high, dtype)
            tl.store(r_ptr.to(word) + at, total, live)
        low, high = _halves(total, dtype)
        scale = tl.rsqrt(tl.sum(low * low + high * high, 0) / (2 * W) + eps)
        tl.store(
            y_ptr.to(word) + at, _words(low * scale * w_low, high * scale * w_high, dtype), live
        )
    tl.store(line + _LINE - 2, number)


class SumNorm(NamedTuple):
    """The norm behind a sum, with its outputs."""

    weight: Tensor
    eps: float
    residual: Tensor | None
    offset: float
    y: Tensor
    r: Tensor


def supports(x: Tensor, peers: PeerMemory) -> bool:
    """Whether each row of x [T, E], which fits the memory of the peers, can have a program."""
    rows, size = x.shape
    fits = size % 2 == 0 and 4 * size <= SLOT_BYTES and x.element_size() == 2
    return fits and rows <= min(MAX_ROWS, peers.programs) and peers.ranks <= MAX_FLAGGED_RANKS


def launch(out: Tensor, x: Tensor, peers: PeerMemory, norm: SumNorm | None, store: bool) -> None:
    """Sum x [T, E] over the ranks into out. store: something else than the norm reads the sum."""
    rows, size = x.shape
    block = next_power_of_2(size // 2)
    residual = None if norm is None else norm.residual
    _sum_flagged(
        (rows, 1, 1),
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
            0.0 if norm is None else norm.eps,
            0.0 if norm is None else norm.offset,
            peers.rank,
        ),
        (
            size // 2,
            block,
            flagged_start(peers.programs),
            peers.ranks,
            store,
            norm is not None,
            residual is not None,
            PDL_ENABLED,
        ),
        warps=max(1, min(16, block // 128)),
        pdl=PDL_ENABLED,
    )

"""Small-M product by bands: two to eight rows times a weight, with the ops around it inside.

    y = r * scale * norm                  scale from partial sums of squares that r came with
    z = y W^T + bias                      [T, O]
    a = act(gate) * up                    or, of a product without an activation,
    r = z + residual; squares of r        one partial sum of each band

Time is the bytes of the weights. There is a program or two for a multiprocessor; each goes from
band to band of 16 rows of W (8 of each half, if there are halves). Its warps share the inputs: a
slice is 32 inputs of each warp. A warp loads slices straight to the registers from which the tensor
cores take them, AHEAD slices ahead and into the next band, so loads never pause; the first ones are
under way before it waits for the previous kernel. If a warp's share of the inputs is AHEAD slices,
it holds its part of all rows of y in registers from the first band to the last.

The norm is split so that no kernel is between two products: the one that computes r adds up its
squares while it has them, band by band, and the next needs these few sums only. Rounded where the
separate ops round. A row of the result depends on its row of x and on the plan alone.

Axes: T rows, I inputs, O outputs (of one half, if there are halves).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gpu.elementwise.activations import activate
from quire.kernels.gpu.linear.gemv import AddedResidual, FusedActivation, FusedNorm
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2
from quire.kernels.gpu.runtime.pdl import (
    PDL_ENABLED,
    launch_dependents,
    prefetch_l2,
    wait_for_previous_kernel,
)

MAX_ROWS = 8
"""Rows of x: the narrow side of the tensor cores' instruction."""
SLICE = 32
"""Inputs that a warp multiplies at once: eight of each of four threads."""
BAND = 16
"""Rows of W of a band."""


@gluon.jit
def _row_of_band(band, j, O: gl.constexpr, ACT: gl.constexpr):
    """The row of W that is row j of a band."""
    if ACT is None:
        row = band * 16 + j
    else:
        row = band * 8 + j + gl.where(j < 8, 0, O - 8)
    return row


@gluon.jit
def _normed(x, norm_ptr, at, scale, offset):
    """A slice of x, normalised if there is a norm."""
    if norm_ptr is None:
        y = x
    else:
        w = offset + gl.load(norm_ptr + at).to(gl.float32)
        y = (x.to(gl.float32) * scale * w).to(x.dtype)
    return y


@gluon.jit
def _finish_band(acc, residual, band, o, t, bias_ptr, z_ptr, a_ptr, r_ptr, squares_ptr, T,
                 O: gl.constexpr, ACT: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Add up what the warps have of a band, and store what the separate ops store."""
    out: gl.constexpr = z_ptr.dtype.element_ty
    z = gl.sum(acc, 0)
    if ACT is None:
        if bias_ptr is not None:
            z += gl.load(bias_ptr + o).to(gl.float32)
        z = z.to(out)
        live = (t < T) & (o < O)
        gl.store(z_ptr + t * O + o, z, live)
        if r_ptr is not None:
            r = (z.to(gl.float32) + residual.to(gl.float32)).to(out)
            gl.store(r_ptr + t * O + o, r, live)
            r = r.to(gl.float32)
            squares = gl.sum(r * r, 0)
            SUMS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
            squares = gl.convert_layout(squares, SUMS)
            at = gl.arange(0, 8, SUMS)
            gl.store(squares_ptr + band * 8 + at, squares, at < 8)
    else:
        HALF: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, WARPS], [0, 1])
        gate, up = gl.split(gl.permute(gl.reshape(z, (2, 8, 8)), (1, 2, 0)))
        gate = gl.convert_layout(gate, HALF)
        up = gl.convert_layout(up, HALF)
        o = (band * 8 + gl.arange(0, 8, gl.SliceLayout(1, HALF)))[:, None]
        t = gl.arange(0, 8, gl.SliceLayout(0, HALF))[None, :]
        live = (t < T) & (o < O)
        if bias_ptr is not None:
            gate += gl.load(bias_ptr + o).to(gl.float32)
            up += gl.load(bias_ptr + O + o).to(gl.float32)
        gate = gate.to(out)
        up = up.to(out)
        gl.store(z_ptr + t * (2 * O) + o, gate, live)
        gl.store(z_ptr + t * (2 * O) + O + o, up, live)
        a = activate(gate.to(gl.float32), ACT) * up.to(gl.float32)
        gl.store(a_ptr + t * O + o, a.to(out), live)


@kernel("T", "eps", "offset", jit=gluon.jit)
def _bands_regs(
    x_ptr,  # [T, I]
    norm_ptr,  # [I], or None
    sums_ptr,  # [PARTS, 8], partial sums of the squares of x, if there is a norm
    w_ptr,  # [O, I], or [2 * O, I] if ACT
    bias_ptr,  # [O] or [2 * O], or None
    residual_ptr,  # [T, O], or None
    z_ptr,  # [T, O] or [T, 2 * O] out
    a_ptr,  # [T, O] out if ACT
    y_ptr,
    r_ptr,  # [T, O] out if there is a residual
    squares_ptr,  # [bands, 8] out if there is a residual
    T,
    eps,
    offset,
    O: gl.constexpr,
    I: gl.constexpr,
    X_T: gl.constexpr,
    PARTS: gl.constexpr,
    PADDED: gl.constexpr,  # power of two >= PARTS
    ACT: gl.constexpr,  # None, or a kind
    WK: gl.constexpr,  # warps
    AHEAD: gl.constexpr,  # slices that a warp loads ahead
    PROGRAMS: gl.constexpr,
    IDLE: gl.constexpr,  # the previous kernel leaves memory idle
    PDL: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WK, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    SUM: gl.constexpr = gl.SliceLayout(0, MMA)
    STEP: gl.constexpr = 32 * WK  # inputs from slice to slice of a warp
    TURNS: gl.constexpr = I // (STEP * AHEAD)
    BANDS: gl.constexpr = O // 16 if ACT is None else O // 8
    TIMES: gl.constexpr = (BANDS + PROGRAMS - 1) // PROGRAMS
    first = gl.program_id(0)
    warp = gl.arange(0, WK, gl.SliceLayout(1, gl.SliceLayout(2, A)))[:, None][:, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :][:, :, None]
    i = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, :][:, None, :]
    columns = warp * 32 + i
    w_at = w_ptr + _row_of_band(first, j, O, ACT).to(gl.int64) * I + columns
    held = ()
    for d in gl.static_range(AHEAD):
        held = held + (gl.load(w_at + d * STEP, eviction_policy="evict_first"),)
    t = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, :][:, None, :]
    k = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :][:, :, None]
    x_warp = gl.arange(0, WK, gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None][:, :, None]
    k_at = x_warp * 32 + k
    x_at = x_ptr + gl.minimum(t, T - 1).to(gl.int64) * X_T + k_at
    if PDL:
        if IDLE:
            SIZE: gl.constexpr = (16 if ACT is None else 8) * I * 2
            for again in gl.static_range(TIMES):
                band = first + again * PROGRAMS
                if band < BANDS:
                    rows_at = w_ptr + _row_of_band(band, 0, O, ACT).to(gl.int64) * I
                    prefetch_l2(rows_at, SIZE)
                    if ACT is not None:
                        prefetch_l2(rows_at + O * I, SIZE)
        launch_dependents()
        wait_for_previous_kernel()
    scale = 1.0
    if norm_ptr is not None:
        SUMS: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [WK, 1], [1, 0])
        part = gl.arange(0, PADDED, gl.SliceLayout(1, SUMS))[:, None]
        its = gl.arange(0, 8, gl.SliceLayout(0, SUMS))[None, :]
        total = gl.sum(gl.load(sums_ptr + part * 8 + its, (part < PARTS) & (its < T), 0.0), 0)
        total = gl.convert_layout(total, gl.SliceLayout(0, gl.SliceLayout(1, B)))
        scale = gl.rsqrt(total / I + eps)[None, :][:, None, :]
    xs = ()
    for d in gl.static_range(AHEAD):
        xs = xs + (gl.load(x_at + d * STEP),)
    if TURNS == 1:
        ys = ()
        for d in gl.static_range(AHEAD):
            y = _normed(xs[d], norm_ptr, k_at + d * STEP, scale, offset)
            if norm_ptr is not None:
                if first == d:
                    gl.store(y_ptr + t * I + (k_at + d * STEP), y, t < T + k_at * 0)
            ys = ys + (y,)
        xs = ys
    o = gl.arange(0, 16, gl.SliceLayout(1, SUM))[:, None]
    row = gl.arange(0, 8, gl.SliceLayout(0, SUM))[None, :]
    for band in range(first, BANDS, PROGRAMS):
        residual = 0.0
        if residual_ptr is not None:
            residual = gl.load(
                residual_ptr + gl.minimum(row, T - 1) * O + band * 16 + o, row < T, 0.0
            )
        acc = gl.zeros([WK, 16, 8], gl.float32, MMA)
        for turn in range(TURNS):
            ends = turn == TURNS - 1
            at = gl.where(ends, 0, (turn + 1) * (AHEAD * STEP))
            next_band = gl.where(ends, band + PROGRAMS, band)
            live = _row_of_band(next_band, j, O, ACT) * 0 + next_band < BANDS
            w_at = w_ptr + _row_of_band(next_band, j, O, ACT).to(gl.int64) * I + (columns + at)
            for d in gl.static_range(AHEAD):
                if TURNS == 1:
                    acc = gl.nvidia.ampere.mma_v2(held[0], xs[d], acc)
                else:
                    here = k_at + (turn * AHEAD + d) * STEP
                    y = _normed(xs[0], norm_ptr, here, scale, offset)
                    if norm_ptr is not None:
                        if (first == turn * AHEAD + d) & (band == first):
                            gl.store(y_ptr + t * I + here, y, t < T + here * 0)
                    acc = gl.nvidia.ampere.mma_v2(held[0], y, acc)
                    xs = xs[1:] + (gl.load(x_at + (at + d * STEP)),)
                held = held[1:] + (
                    gl.load(w_at + d * STEP, live & (columns >= 0), 0.0, eviction_policy="evict_first"),
                )
        _finish_band(acc, residual, band, band * 16 + o, row, bias_ptr, z_ptr, a_ptr, r_ptr,
                     squares_ptr, T, O, ACT, WK)  # fmt: skip


class RegsPlan(NamedTuple):
    warps: int
    ahead: int
    programs: int


def fits(plan, outputs, inputs, pair):
    band = BAND // 2 if pair else BAND
    return not inputs % (SLICE * plan.warps * plan.ahead) and not outputs % band


def launch(z, x, weight, bias, plan, norm=None, act=None, added=None, memory_idle=False):
    total, inputs = weight.shape
    outputs = total if act is None else total // 2
    programs = min(plan.programs, total // BAND)
    tensors = (x, None, None)
    numbers, parts, y = (0.0, 0.0), 1, None
    if norm is not None and norm.squares is not None:
        tensors = (norm.x, norm.weight, norm.squares)
        numbers, parts, y = (norm.eps, norm.offset), norm.squares.shape[0], norm.y
    after = (None, None, None) if added is None else added
    _bands_regs(
        (programs, 1, 1),
        (*tensors, weight, bias, after[0], z, None if act is None else act.out, y, *after[1:]),
        (x.shape[0], *numbers),
        (
            outputs, inputs, tensors[0].stride(0), parts, next_power_of_2(parts),
            None if act is None else act.kind, plan.warps, plan.ahead, programs, memory_idle,
            PDL_ENABLED,
        ),
        warps=plan.warps,
        pdl=PDL_ENABLED,
    )  # fmt: skip

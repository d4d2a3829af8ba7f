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

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from quire.kernels.gpu.elementwise.activations import activate
from quire.kernels.gpu.linear.gemv import AddedResidual, FusedActivation, FusedNorm
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2
from quire.kernels.gpu.runtime.pdl import (
    PDL_ENABLED,
    launch_dependents,
    wait_for_previous_kernel,
)

MAX_ROWS = 8
"""Rows of x: the narrow side of the tensor cores' instruction."""
BAND = 16
"""Rows of W of a band."""
_SHARED_BYTES = 227 * 1024


@gluon.jit
def _row_of_band(band, j, O: gl.constexpr, ACT: gl.constexpr):
    """The row of W that is row j of a band."""
    if ACT is None:
        row = band * 16 + j
    else:
        row = band * 8 + j + gl.where(j < 8, 0, O - 8)
    return row


@gluon.jit
def _scale_of_norm(sums_ptr, T, eps, I: gl.constexpr, PARTS: gl.constexpr, PADDED: gl.constexpr,
                   TN: gl.constexpr, WARPS: gl.constexpr, OUT: gl.constexpr):  # fmt: skip
    """What the norm multiplies each row by, [TN], from partial sums of the row's squares."""
    SUMS: gl.constexpr = gl.BlockedLayout([1, 1], [32 // TN, TN], [WARPS, 1], [1, 0])
    part = gl.arange(0, PADDED, gl.SliceLayout(1, SUMS))[:, None]
    t = gl.arange(0, TN, gl.SliceLayout(0, SUMS))[None, :]
    sums = gl.load(sums_ptr + part * 8 + t, (part < PARTS) & (t < T), 0.0)
    return gl.convert_layout(gl.rsqrt(gl.sum(sums, 0) / I + eps), OUT)


@gluon.jit
def _store_normed(y_smem, x_ptr, ws, sums_ptr, y_ptr, columns, T, eps, offset, I: gl.constexpr,
                  X_T: gl.constexpr, PARTS: gl.constexpr, PADDED: gl.constexpr, TN: gl.constexpr,
                  WK: gl.constexpr, BK: gl.constexpr, PROGRAMS: gl.constexpr,
                  COPY: gl.constexpr):  # fmt: skip
    """Norm TN rows of x, four or eight, into shared memory; programs in turn store them for others
    too. ws: the norm's weights, in the steps in which x is loaded."""
    OF_ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, COPY))
    t = gl.arange(0, TN, OF_ROW)[None, :][:, :, None]
    live = (t < T) & (columns >= 0)
    xs = ()
    for s in gl.static_range(I // (BK * WK)):  # all on their way before the sums are waited for
        xs = xs + (gl.load(x_ptr + t * X_T + (columns + s * (BK * WK)), live, 0.0),)  # type: ignore[assignment]
    scale = _scale_of_norm(sums_ptr, T, eps, I, PARTS, PADDED, TN, WK, OF_ROW)
    scale = scale[None, :][:, :, None]
    for s in gl.static_range(I // (BK * WK)):
        w = offset + ws[s].to(gl.float32)
        y = (xs[s].to(gl.float32) * scale * w).to(xs[s].dtype)
        if gl.program_id(0) == s % PROGRAMS:
            gl.store(y_ptr + t * I + (columns + s * (BK * WK)), y, live)
        if TN < 8:
            y = gl.reshape(gl.permute(gl.join(y, y), (0, 3, 1, 2)), (WK, 8, BK))
        y_smem.index(s).store(y)


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
def _small_m_bands(
    x_ptr,  # [T, I]
    norm_ptr,  # [I], or None
    sums_ptr,  # [PARTS, 8], partial sums of the squares of x, if there is a norm
    w_ptr,  # [O, I], or [2 * O, I] if ACT
    bias_ptr,  # [O] or [2 * O], or None
    residual_ptr,  # [T, O], or None
    z_ptr,  # [T, O] or [T, 2 * O] out
    a_ptr,  # [T, O] out if ACT
    y_ptr,  # [T, I] out if there is a norm
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
    BK: gl.constexpr,  # inputs of a warp in a stage
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
    PDL: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WK, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    SUM: gl.constexpr = gl.SliceLayout(0, MMA)
    WIDE: gl.constexpr = 32 if BK >= 256 else BK // 8  # threads of a row
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // WIDE, WIDE], [WK, 1, 1], [2, 1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    dtype: gl.constexpr = w_ptr.dtype.element_ty
    STEPS: gl.constexpr = I // (BK * WK)
    BANDS: gl.constexpr = O // 16 if ACT is None else O // 8
    XS: gl.constexpr = STAGES if norm_ptr is None else STEPS
    ring = gl.allocate_shared_memory(dtype, [STAGES, WK, 16, BK], SHARED)
    x_ring = gl.allocate_shared_memory(dtype, [XS, WK, 8, BK], SHARED)
    first = gl.program_id(0)
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :][:, :, None]
    warp = gl.arange(0, WK, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None][:, :, None]
    i = gl.arange(0, BK, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, :][:, None, :]
    columns = warp * BK + i
    total = (BANDS - first + PROGRAMS - 1) // PROGRAMS * STEPS
    for s in gl.static_range(STAGES):
        if s < total:
            w_at = w_ptr + _row_of_band(first + s // STEPS * PROGRAMS, j, O, ACT).to(gl.int64) * I
            async_copy.async_copy_global_to_shared(
                ring.index(s), w_at + (columns + s % STEPS * (BK * WK)),
                eviction_policy="evict_first",
            )  # fmt: skip
        async_copy.commit_group()
    ws = ()
    if norm_ptr is not None:
        for s in gl.static_range(STEPS):
            ws = ws + (gl.load(norm_ptr + (columns + s * (BK * WK))),)  # type: ignore[assignment]
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    OF_ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, COPY))
    t = gl.arange(0, 8, OF_ROW)[None, :][:, :, None]
    live = (t < T) & (columns >= 0)
    x_at = x_ptr + t * X_T + columns
    # the first stages of x pass through registers: a copy would arrive after all of W's before it
    if norm_ptr is None:
        for s in gl.static_range(STAGES):
            if s < total:
                x_ring.index(s).store(gl.load(x_at + s % STEPS * (BK * WK), live, 0.0))
    else:
        if T <= 4:  # half of the work; rows 4 to 7 are the same again, and unused
            _store_normed(x_ring, x_ptr, ws, sums_ptr, y_ptr, columns, T, eps, offset, I,
                          X_T, PARTS, PADDED, 4, WK, BK, PROGRAMS, COPY)  # fmt: skip
        else:
            _store_normed(x_ring, x_ptr, ws, sums_ptr, y_ptr, columns, T, eps, offset, I,
                          X_T, PARTS, PADDED, 8, WK, BK, PROGRAMS, COPY)  # fmt: skip
    o = gl.arange(0, 16, gl.SliceLayout(1, SUM))[:, None]
    row = gl.arange(0, 8, gl.SliceLayout(0, SUM))[None, :]
    step = 0
    for band in range(first, BANDS, PROGRAMS):
        residual = 0.0
        if residual_ptr is not None:
            residual = gl.load(residual_ptr + row * O + band * 16 + o, (row < T) & (o >= 0), 0.0)
        acc = gl.zeros([WK, 16, 8], gl.float32, MMA)
        for n in range(STEPS):
            stage = step % STAGES
            async_copy.wait_group(STAGES - 1)  # each step commits a group: this one's has arrived
            x_stage = stage if norm_ptr is None else n
            right = x_ring.index(x_stage).permute((0, 2, 1)).load(B)
            acc = mma_v2(ring.index(stage).load(A), right, acc)
            gl.thread_barrier()  # every warp has read the stage
            ahead = step + STAGES
            if ahead < total:
                its_band = first + ahead // STEPS * PROGRAMS
                at = columns + ahead % STEPS * (BK * WK)
                w_at = w_ptr + _row_of_band(its_band, j, O, ACT).to(gl.int64) * I
                async_copy.async_copy_global_to_shared(
                    ring.index(stage), w_at + at, eviction_policy="evict_first"
                )
                if norm_ptr is None:
                    async_copy.async_copy_global_to_shared(
                        x_ring.index(stage), x_at + ahead % STEPS * (BK * WK), mask=live
                    )
            async_copy.commit_group()
            step += 1
        _finish_band(acc, residual, band, band * 16 + o, row, bias_ptr, z_ptr, a_ptr, r_ptr,
                     squares_ptr, T, O, ACT, WK)  # fmt: skip


class BandsPlan(NamedTuple):
    """Split of a product.

    warps: that share the inputs; columns: inputs of a warp in a stage; stages; programs: at most.
    """

    warps: int
    columns: int
    stages: int
    programs: int


def fits(plan: BandsPlan, outputs: int, inputs: int, pair: bool, normed: bool) -> bool:
    """Whether the plan divides the weight evenly, and its stages fit a multiprocessor."""
    stage = plan.warps * plan.columns
    x_stages = inputs // stage if normed else plan.stages
    sums = 4 * plan.warps * BAND * MAX_ROWS
    return (
        not inputs % stage
        and not outputs % (BAND // 2 if pair else BAND)
        and 2 * stage * (BAND * plan.stages + MAX_ROWS * x_stages) + 2 * sums <= _SHARED_BYTES
    )


def launch(
    z: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: BandsPlan,
    norm: FusedNorm | None = None,
    act: FusedActivation | None = None,
    added: AddedResidual | None = None,
) -> None:
    """z [T, O] = norm(x) @ weight.T + bias; fills the results of act or added too. The plan must
    fit; not both of act and added.
    """
    total, inputs = weight.shape
    outputs = total if act is None else total // 2
    programs = min(plan.programs, total // BAND)
    before: tuple[Tensor | None, ...] = (None, None)
    numbers, parts, y = (0.0, 0.0), 1, None
    if norm is not None and norm.squares is not None:
        x, before = norm.x, (norm.weight, norm.squares)
        numbers, parts, y = (norm.eps, norm.offset), norm.squares.shape[0], norm.y
    after = (None, None, None) if added is None else added
    _small_m_bands(
        (programs, 1, 1),
        (
            x, *before, weight, bias, after[0], z, None if act is None else act.out, y, *after[1:],
        ),
        (x.shape[0], *numbers),
        (
            outputs, inputs, x.stride(0), parts, next_power_of_2(parts),
            None if act is None else act.kind, *plan[:3], programs, PDL_ENABLED,
        ),
        warps=plan.warps,
        pdl=PDL_ENABLED,
    )  # fmt: skip

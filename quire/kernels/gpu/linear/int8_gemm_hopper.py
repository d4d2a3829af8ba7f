"""W8A8 product on Hopper for many rows: a loader warp, and two warpgroups that multiply.

A persistent program takes tiles of 128 rows by 256 or 128 outputs in turn. Its loader is ahead by
some steps, across tiles too; both operands come through the bulk copy engine, which fills what is
past an end with zeros. Each warpgroup multiplies 64 rows and scales its own sums, so that one
writes its results while the other still multiplies.

Sums are of integers, and exact. See int8_linear.py. Axes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.formats.int8_weight import Int8Weight
from quire.kernels.gpu.moe.grouped_gemm_hopper import multiply, split_columns
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.target import gpu_target, sm_count

HALF = gl.constexpr(64)  # rows of one warpgroup
INNER = gl.constexpr(128)  # inputs of a step: a line of 128 bytes, as the matrix units swizzle it
GROUP = gl.constexpr(16)  # row tiles that take turns over one column tile
_STAGES = {256: 4, 128: 6}
"""Outputs of a tile -> steps the loader is ahead: what shared memory holds."""


@gluon.jit
def _find_tile(turn, ROW_TILES, O: gl.constexpr, COLUMNS: gl.constexpr):
    """(first row, first output) of a turn."""
    N_TILES: gl.constexpr = (O + COLUMNS - 1) // COLUMNS
    first = turn // (GROUP * N_TILES) * GROUP
    size = gl.minimum(ROW_TILES - first, GROUP)
    inside = turn % (GROUP * N_TILES)
    return (first + inside % size) * (2 * HALF), inside // size * COLUMNS


@gluon.jit
def _load(q_tiles, w_tiles, a, b, full, empty, ROW_TILES, I: gl.constexpr, O: gl.constexpr,
          COLUMNS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    N_TILES: gl.constexpr = (O + COLUMNS - 1) // COLUMNS
    count = 0
    for turn in range(gl.program_id(0), ROW_TILES * N_TILES, gl.num_programs(0)):
        row, column = _find_tile(turn, ROW_TILES, O, COLUMNS)
        for step in range((I + INNER - 1) // INNER):
            stage, start = count % STAGES, step * INNER
            mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, (2 * HALF + COLUMNS) * INNER)
            tma.async_copy_global_to_shared(q_tiles, [row, start], bar, a.index(2 * stage))
            tma.async_copy_global_to_shared(
                q_tiles, [row + HALF, start], bar, a.index(2 * stage + 1)
            )
            tma.async_copy_global_to_shared(w_tiles, [column, start], bar, b.index(stage))
            count += 1


@gluon.jit
def _multiply_and_store(xs_ptr, zero_ptr, ws_ptr, sums_ptr, bias_ptr, y_ptr, a, b, full, empty,
                        ROW_TILES, T, WHICH: gl.constexpr, I: gl.constexpr, O: gl.constexpr,
                        COLUMNS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """One warpgroup."""
    N: gl.constexpr = COLUMNS // 2
    N_TILES: gl.constexpr = (O + COLUMNS - 1) // COLUMNS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    r = WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, LINES))
    c = gl.arange(0, N, gl.SliceLayout(0, LINES))
    mine = WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, ACC))
    every = gl.arange(0, COLUMNS, gl.SliceLayout(0, ACC))
    count = 0
    for turn in range(gl.program_id(0), ROW_TILES * N_TILES, gl.num_programs(0)):
        row, column = _find_tile(turn, ROW_TILES, O, COLUMNS)
        t, o = gl.minimum(row + mine, T - 1), gl.minimum(column + every, O - 1)
        acc = gl.zeros([HALF, COLUMNS], gl.int32, ACC)
        acc, count = multiply(
            a, b, full, empty, acc, count, WHICH, (I + INNER - 1) // INNER, STAGES, False
        )
        if sums_ptr is not None:
            acc -= gl.load(zero_ptr + t)[:, None] * gl.load(sums_ptr + o)[None, :]
        y = acc.to(gl.float32) * gl.load(xs_ptr + t)[:, None] * gl.load(ws_ptr + o)[None, :]
        if bias_ptr is not None:
            y += gl.load(bias_ptr + o).to(gl.float32)[None, :]
        left, right = split_columns(y.to(y_ptr.dtype.element_ty), COLUMNS)
        live, o = (row + r < T)[:, None], column + c
        at = y_ptr + (row + r).to(gl.int64)[:, None] * O + o[None, :]  # T * O can pass 2**31
        gl.store(at, gl.convert_layout(left, LINES), mask=live & (o < O)[None, :])
        gl.store(at + N, gl.convert_layout(right, LINES), mask=live & (o + N < O)[None, :])


@kernel("ROW_TILES", "T", jit=gluon.jit)
def _int8_gemm(
    xs_ptr,  # [T]
    zero_ptr,  # [T] int32, read if there are sums
    ws_ptr,  # [O]
    sums_ptr,  # [O] int32, or None: rows are symmetric
    bias_ptr,  # [O] or None
    y_ptr,  # [T, O] out
    q_tiles,  # descriptor of [T, I], tiles [64, 128]
    w_tiles,  # descriptor of [O, I], tiles [COLUMNS, 128]
    ROW_TILES,
    T,
    I: gl.constexpr,
    O: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    lines: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    a = gl.allocate_shared_memory(gl.int8, [2 * STAGES, HALF, INNER], lines)
    b = gl.allocate_shared_memory(gl.int8, [STAGES, COLUMNS, INNER], lines)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)  # each warpgroup
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply_and_store,
                (xs_ptr, zero_ptr, ws_ptr, sums_ptr, bias_ptr, y_ptr, a, b, full, empty,
                 ROW_TILES, T, 0, I, O, COLUMNS, STAGES),
            ),
            (
                _multiply_and_store,
                (xs_ptr, zero_ptr, ws_ptr, sums_ptr, bias_ptr, y_ptr, a, b, full, empty,
                 ROW_TILES, T, 1, I, O, COLUMNS, STAGES),
            ),
            (_load, (q_tiles, w_tiles, a, b, full, empty, ROW_TILES, I, O, COLUMNS, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def supports(q: Tensor, weight: Int8Weight, y: Tensor) -> bool:
    """Whether the copy engine reads these operands and the results are in 16 bits."""
    lines = weight.shape[1] % 16 == 0 and q.data_ptr() % 16 == 0
    return lines and y.itemsize == 2 and gpu_target(q.device).capability == (9, 0)


def columns_of(rows: int, outputs: int, multiprocessors: int) -> int:
    """Outputs of a tile: half of them where whole tiles would leave multiprocessors idle.

    A half tile takes 0.55 of the time, as measured.
    """
    tiles = cdiv(rows, 2 * HALF.value)
    whole, half = (cdiv(tiles * cdiv(outputs, n), multiprocessors) for n in (256, 128))
    return 128 if 0.55 * half < whole else 256


def launch(
    y: Tensor, q: Tensor, scale: Tensor, zero: Tensor | None, weight: Int8Weight,
    bias: Tensor | None, columns: int | None = None,
) -> None:  # fmt: skip
    """y [T, O] = the product of quantized rows q [T, I] and a weight [O, I].

    columns: outputs of a tile, in place of the number for these sizes.
    """
    (rows, inputs), outputs = q.shape, weight.shape[0]
    tiles = cdiv(rows, 2 * HALF.value)
    wide = columns or columns_of(rows, outputs, sm_count(y.device))
    programs = min(sm_count(y.device), tiles * cdiv(outputs, wide))
    _int8_gemm(
        (programs, 1, 1),
        (scale, zero, weight.scale, weight.sums, bias, y),
        (tiles, rows),
        (inputs, outputs, wide, _STAGES[wide]),
        tiles=(_descriptor(q, HALF.value), _descriptor(weight.data, wide)),
    )


def _descriptor(matrix: Tensor, rows: int) -> TensorDescriptor:
    lines = gl.NVMMASharedLayout(128, 8)
    shape = list(matrix.shape)
    return TensorDescriptor(matrix, shape, [shape[1], 1], [rows, INNER.value], lines)

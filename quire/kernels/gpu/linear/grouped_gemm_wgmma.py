"""Grouped GEMM of 4 bits on Hopper: weights are decoded in the registers that multiply.

    y = x W^T + bias

The copy engine brings codes and rows of x to shared memory, some blocks ahead. A warpgroup takes
codes of 64 outputs as the matrix instruction wants its left operand, decodes them in registers and
multiplies them by all rows of x. So decoded weights are never written to shared memory. Codes of a
group are multiplied as integers; the group's scale multiplies its sum.

Where there are too few tiles, each is split along the inputs: see grouped_sums.py.

Axes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.formats.tiled_weight import TILE, TiledWeight
from quire.kernels.gpu.linear.grouped_decode import decode_slice, factor_form, float_of, magic_of
from quire.kernels.gpu.linear.grouped_sums import (
    BLOCK,
    decodes_in_registers,
    describe_codes,
    describe_rows,
    load_factors,
    store_sums,
)
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel
from quire.kernels.gpu.runtime.target import gpu_target, sm_count

AHEAD = gl.constexpr(2)  # blocks whose scales are loaded ahead


@gluon.jit
def _decode_half(words, minus, H: gl.constexpr, A: gl.constexpr):
    """Slices 2 H and 2 H + 1 of a block: [64, 64]."""
    a = decode_slice((words,), (), minus, 2 * H, 4, 0, False, True)
    b = decode_slice((words,), (), minus, 2 * H + 1, 4, 0, False, True)
    both = gl.permute(gl.join(a, b), [0, 2, 1])
    return gl.convert_layout(gl.reshape(both, [64, 64]), A, assert_trivial=True)


@gluon.jit
def _load(x_tiles, w_tiles, x, w, full, empty, BLOCKS: gl.constexpr, EACH: gl.constexpr,
          TP: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The warp that starts the copies."""
    first = gl.program_id(0) * EACH
    BYTES: gl.constexpr = TP * BLOCK * 2 + 2 * 4096
    for s in gl.static_range(STAGES):  # codes are not written by the previous kernel
        mbarrier.expect(full.index(s), BYTES)
        for i in gl.static_range(2):
            at = ((gl.program_id(1) * 2 + i) * BLOCKS + first + s) * 64
            tma.async_copy_global_to_shared(w_tiles, [at, 0], full.index(s), w.index(s * 2 + i))
    if PDL:
        wait_for_previous_kernel()
    for step in range(EACH):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        more = step >= STAGES
        mbarrier.expect(full.index(stage), BYTES, pred=more)
        for i in gl.static_range(2):
            at = ((gl.program_id(1) * 2 + i) * BLOCKS + first + step) * 64
            tma.async_copy_global_to_shared(w_tiles, [at, 0], full.index(stage),
                                            w.index(stage * 2 + i), pred=more)  # fmt: skip
        for h in gl.static_range(2):
            tma.async_copy_global_to_shared(x_tiles, [0, (first + step) * BLOCK + h * 64],
                                            full.index(stage), x.index(stage * 2 + h))  # fmt: skip


@gluon.jit
def _multiply(scale_ptr, zero_ptr, bias_ptr, y_ptr, part_ptr, ticket_ptr, x, w, full, empty, T,
              WHICH: gl.constexpr, O: gl.constexpr, EACH: gl.constexpr, G: gl.constexpr,
              ZERO: gl.constexpr, SHARE: gl.constexpr, FORM: gl.constexpr, TP: gl.constexpr,
              PARTS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """A warpgroup that multiplies 64 outputs by all rows of x."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TP, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    # outputs of a warp stay in it: only its threads exchange numbers
    LINES: gl.constexpr = gl.BlockedLayout([8, 1], [2, 16], [4, 1], [0, 1])
    MAGIC: gl.constexpr = magic_of(4, x.dtype == gl.bfloat16)
    tile = gl.program_id(1) * 2 + WHICH
    row = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, A))
    first = gl.program_id(0) * EACH
    held = ()
    for d in gl.static_range(AHEAD):
        held = held + (load_factors(scale_ptr, zero_ptr, row, first + d, G, SHARE),)
    acc = gl.zeros([64, TP], gl.float32, ACC)
    for step in range(EACH):
        stage = step % STAGES
        numbers = held[0]
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        words = w.index(stage * 2 + WHICH).load(A)
        following = load_factors(scale_ptr, zero_ptr, row, first + step + AHEAD, G, SHARE)
        if zero_ptr is not None:
            zero = numbers[1].to(gl.float32)
        else:
            zero = gl.full([64], ZERO, gl.float32, gl.SliceLayout(1, A))
        minus = (-MAGIC - zero).to(x.dtype)[:, None]
        part = acc
        for h in gl.static_range(2):
            part = warpgroup_mma(_decode_half(words, minus, h, A),
                                 x.index(stage * 2 + h).permute((1, 0)), part, use_acc=h == 1,
                                 is_async=True)  # fmt: skip
        part = warpgroup_mma_wait(0, deps=[part])
        scale = gl.convert_layout(float_of(numbers[0], FORM), gl.SliceLayout(1, ACC))
        acc += part * scale[:, None]
        mbarrier.arrive(empty.index(stage), count=1)
        held = held[1:] + (following,)
    store_sums(y_ptr, bias_ptr, part_ptr, ticket_ptr, acc, tile, gl.program_id(0), 0, T, O, TP,
               PARTS, ACC, LINES)  # fmt: skip


@kernel("T", jit=gluon.jit)
def _grouped_gemm_wgmma(
    scale_ptr,  # factors of groups: see TiledFactors
    zero_ptr,
    bias_ptr,  # [O] or None
    y_ptr,  # [T, O] out
    part_ptr,  # [tiles, PARTS, 64, TP] float32, written and read if PARTS > 1
    ticket_ptr,  # [tiles] int32, zero before and after
    x_tiles,  # descriptor of [T, I], tiles [TP, 64]
    w_tiles,  # descriptor of the codes as [., 32], tiles [64, 32]
    T,
    O: gl.constexpr,
    BLOCKS: gl.constexpr,
    G: gl.constexpr,
    ZERO: gl.constexpr,
    SHARE: gl.constexpr,
    FORM: gl.constexpr,
    TP: gl.constexpr,  # rows of x, rounded up
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a thread that multiplies
    PDL: gl.constexpr,
):
    EACH: gl.constexpr = BLOCKS // PARTS
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    x = gl.allocate_shared_memory(dtype, [STAGES * 2, TP, 64], gl.NVMMASharedLayout(128, 16))
    w = gl.allocate_shared_memory(gl.int16, [STAGES * 2, 64, 32], gl.NVMMASharedLayout(64, 16))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    if PDL:
        launch_dependents()
    gl.warp_specialize(
        [
            (_multiply, (scale_ptr, zero_ptr, bias_ptr, y_ptr, part_ptr, ticket_ptr, x, w, full,
                         empty, T, 0, O, EACH, G, ZERO, SHARE, FORM, TP, PARTS, STAGES)),
            (_multiply, (scale_ptr, zero_ptr, bias_ptr, y_ptr, part_ptr, ticket_ptr, x, w, full,
                         empty, T, 1, O, EACH, G, ZERO, SHARE, FORM, TP, PARTS, STAGES)),
            (_load, (x_tiles, w_tiles, x, w, full, empty, BLOCKS, EACH, TP, STAGES, PDL)),
        ],
        [4, 1],
        [REGISTERS, 32],
    )  # fmt: skip


_MIN_WEIGHTS = 1 << 24
"""Numbers of the smallest matrix for which this kernel was measured to be faster."""
_MIN_WEIGHTS_FEW_ROWS = 1 << 25
_WIDE = 256 * TILE
"""Outputs from which grouped_gemm.py is faster at more than 32 rows."""


def supports(x: Tensor, weight: TiledWeight) -> bool:
    """Whether this kernel multiplies these rows: 9 to 64, 4 bits, large groups, no table."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    if not 8 < rows <= 64 or x.dtype != weight.dtype or gpu_target(x.device).capability != (9, 0):
        return False
    least = _MIN_WEIGHTS_FEW_ROWS if rows <= 16 else _MIN_WEIGHTS
    large = outputs * inputs >= least and (rows <= 32 or outputs < _WIDE)
    return large and decodes_in_registers(x, weight)


class GroupedWgmmaPlan(NamedTuple):
    """Split of a product.

    rows: of x, rounded up; parts: of the inputs; stages; registers: of a thread that multiplies,
    and of each thread at the start.
    """

    rows: int
    parts: int
    stages: int
    registers: int
    registers_at_start: int


def plan_grouped_wgmma(rows: int, weight: TiledWeight, sms: int) -> GroupedWgmmaPlan:
    """Equal parts, of 8 blocks at least. Few rows: two programs of a multiprocessor."""
    tall = max(16, next_power_of_2(rows))
    bands, blocks = weight.shape[0] // (2 * TILE), weight.blocks
    most = 2 * sms if tall <= 32 else sms
    fits = (n for n in range(1, blocks // 8 + 1) if blocks % n == 0 and bands * n <= most)
    parts = max(fits, default=1)
    two = tall <= 32 and bands * parts > sms
    stages = min(12, blocks // parts, (106000 if two else 224000) // (tall * 256 + 2 * 4096))
    return GroupedWgmmaPlan(tall, parts, stages, *((104, 80) if two else (232, 168)))


def launch(
    y: Tensor,
    x: Tensor,
    weight: TiledWeight,
    bias: Tensor | None = None,
    plan: GroupedWgmmaPlan | None = None,
) -> None:
    """y [T, O] = x @ weight.T + bias; the columns of x are in the order of the codes."""
    rows, outputs = x.shape[0], weight.shape[0]
    plan = plan or plan_grouped_wgmma(rows, weight, sm_count(x.device))
    tall, parts, stages, registers, registers_at_start = plan
    sums = None
    if parts > 1:
        sums = torch.empty(outputs * parts * tall, dtype=torch.float32, device=y.device)
    assert weight.scale is not None, "see supports"
    zero, form = weight.zero, factor_form(weight.scale)
    _grouped_gemm_wgmma(
        (parts, outputs // (2 * TILE), 1),
        (
            weight.scale.values, zero if isinstance(zero, Tensor) else None, bias, y, sums,
            weight.counters,
        ),
        (rows,),
        (
            outputs, weight.blocks, weight.groups, 0 if isinstance(zero, Tensor) else zero,
            form // 16, form // 4 % 4, tall, parts, stages, registers, PDL_ENABLED,
        ),
        pdl=PDL_ENABLED,
        tiles=(describe_rows(x, tall), describe_codes(weight)),
        maxnreg=registers_at_start,
    )  # fmt: skip

"""Grouped GEMM on Hopper: rows times a weight of two to eight bits, widened in shared memory.

    y = x W^T + bias

Warps that decode are some steps ahead of those that multiply. They take codes from memory, several
blocks ahead, and write weights of 16 bits to shared memory, each rounded once from float32: the
numbers are those that grouped_widen.py writes. Rows of x come through the bulk copy engine. Each
warpgroup multiplies 64 outputs by all rows of the tile, whose sums stay in its registers.

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
from quire.kernels.gpu.linear.grouped_gemm import weight_constants, weight_tensors
from quire.kernels.gpu.linear.grouped_small_m import load_block
from quire.kernels.gpu.linear.grouped_sums import describe_rows, is_aligned, store_sums
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel
from quire.kernels.gpu.runtime.target import gpu_target

INNER = gl.constexpr(64)  # inputs of a step: a line of 128 bytes, as the matrix units swizzle it


@gluon.jit
def _moved(words, AT: gl.constexpr, PLACE: gl.constexpr):
    """Words of 32 bits whose bit AT is at PLACE."""
    if PLACE >= AT:
        return words << (PLACE - AT)
    else:
        return words >> (AT - PLACE)


@gluon.jit
def _decode_half(block, table_ptr, o, S: gl.constexpr, HALF: gl.constexpr, LOW: gl.constexpr,
                 HIGH: gl.constexpr, NS: gl.constexpr, PER: gl.constexpr, ZERO: gl.constexpr,
                 SCALED: gl.constexpr, FACTORED: gl.constexpr, OFFSET: gl.constexpr,
                 ZEROS: gl.constexpr, TABLE: gl.constexpr,
                 OWN_TABLE: gl.constexpr):  # fmt: skip
    """Every other input, from the first (HALF 0) or the second, of slice S: float32 [BN, SK / 2].

    block: of load_block, in words of 32 bits. o: [BN, 1]. ZERO None: codes are e4m3 floats.
    """
    if ZERO is None:
        return _decode_floats(block, S, HALF, NS, PER, SCALED)
    else:
        return _decode_integers(block, table_ptr, o, S, HALF, LOW, HIGH, NS, PER, ZERO, SCALED,
                                FACTORED, OFFSET, ZEROS, TABLE, OWN_TABLE)  # fmt: skip


@gluon.jit
def _decode_floats(block, S: gl.constexpr, HALF: gl.constexpr, NS: gl.constexpr,
                   PER: gl.constexpr, SCALED: gl.constexpr):  # fmt: skip
    """See _decode_half. Bits of a float are put where those of a larger exponent are."""
    WORDS: gl.constexpr = NS // 4
    AT: gl.constexpr = S % 4 * 4 + HALF * 16
    high = block[WORDS + S // 4]
    bits = _moved(block[S // 4], AT, 20) & (15 << 20)
    bits = bits | _moved(high, AT, 24) & (7 << 24) | _moved(high, AT + 3, 31) & -(1 << 31)
    value = bits.to(gl.float32, bitcast=True) * 2.0**120
    if SCALED:
        value *= block[2 * WORDS + S // PER][:, None]
    return value


@gluon.jit
def _decode_integers(block, table_ptr, o, S: gl.constexpr, HALF: gl.constexpr, LOW: gl.constexpr,
                     HIGH: gl.constexpr, NS: gl.constexpr, PER: gl.constexpr, ZERO: gl.constexpr,
                     SCALED: gl.constexpr, FACTORED: gl.constexpr, OFFSET: gl.constexpr,
                     ZEROS: gl.constexpr, TABLE: gl.constexpr,
                     OWN_TABLE: gl.constexpr):  # fmt: skip
    """See _decode_half."""
    WORDS: gl.constexpr = NS * LOW // 16
    EACH: gl.constexpr = (1 if SCALED else 0) + (1 if OFFSET else 0) + (1 if ZEROS else 0)
    FIRST: gl.constexpr = WORDS + NS * HIGH // 16 + S // PER * EACH
    PLACE: gl.constexpr = 15 if LOW + HIGH == 8 else 16
    ONE: gl.constexpr = 1 << (23 - PLACE)
    AT: gl.constexpr = S % (16 // LOW) * LOW + HALF * 16
    code = _moved(block[S // (16 // LOW)], AT, PLACE)
    MASK: gl.constexpr = ((1 << LOW) - 1) << PLACE
    if HIGH:
        HIGH_AT: gl.constexpr = S % (16 // HIGH) * HIGH + HALF * 16
        high = _moved(block[WORDS + S // (16 // HIGH)], HIGH_AT, PLACE + LOW)
        high = high & (((1 << HIGH) - 1) << (PLACE + LOW)) | 0x3F800000
    else:
        high = 0x3F800000
    value = gl.inline_asm_elementwise(  # of the plain form ptxas makes two instructions
        "lop3.b32 $0, $1, $2, $3, 0xea;", "=r,r,n,r", [code, MASK, high],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    if TABLE:
        q = (value.to(gl.int32, bitcast=True) >> PLACE) & 15
        value = gl.load(table_ptr + q + (o * 16 if OWN_TABLE else 0))
        if SCALED:
            value *= block[FIRST][:, None]
        return value
    if ZEROS:
        zero = block[FIRST + EACH - 1].to(gl.float32)[:, None]
    else:
        zero = ZERO
    if SCALED and not FACTORED and not OFFSET:  # all of it is exact
        scale = block[FIRST][:, None]
        return value * (scale * ONE) - scale * (ONE + zero)
    value = (value - (1.0 + zero / ONE)) * ONE
    if SCALED:
        value *= block[FIRST][:, None]
    if OFFSET:
        value += block[FIRST + (1 if SCALED else 0)][:, None]
    return value


@gluon.jit
def _join(a, b):
    """Columns of a, then those of b, both in the thread that has them."""
    both = gl.permute(gl.join(a, b), [0, 2, 1])
    return gl.reshape(both, [a.shape[0], 2 * a.shape[1]])


@gluon.jit
def _load_rows(x_tiles, x, full_x, step, stage, live, STEPS: gl.constexpr, TP: gl.constexpr):
    """Start the copy of a step's rows of x."""
    at = [gl.program_id(0) * TP, (gl.program_id(2) * STEPS + step) * INNER]
    mbarrier.expect(full_x.index(stage), TP * INNER * 2, pred=live)
    tma.async_copy_global_to_shared(x_tiles, at, full_x.index(stage), x.index(stage), pred=live)


@gluon.jit
def _decode(low_ptr, high_ptr, scale_ptr, scale_code_ptr, offset_ptr, offset_code_ptr, zero_ptr,
            table_ptr, w, full_w, empty, WHICH: gl.constexpr, O: gl.constexpr,
            BLOCKS: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, NS: gl.constexpr,
            SK: gl.constexpr, PER: gl.constexpr, COUNT: gl.constexpr, G: gl.constexpr,
            ZERO: gl.constexpr, S_FORM: gl.constexpr, O_FORM: gl.constexpr,
            OWN_TABLE: gl.constexpr, STAGES: gl.constexpr, DECODERS: gl.constexpr,
            AHEAD: gl.constexpr, PARTS: gl.constexpr):  # fmt: skip
    """A warpgroup that decodes every DECODERS-th block of weights to shared memory."""
    HALF: gl.constexpr = SK // 2
    CODES: gl.constexpr = gl.BlockedLayout([1, 4], [256 // SK, SK // 8], [4, 1], [1, 0])
    SPS: gl.constexpr = INNER // SK
    SPB: gl.constexpr = NS // SPS
    EACH: gl.constexpr = BLOCKS // PARTS
    TOP: gl.constexpr = (O + 63) // 64 * 64 - 1
    row = gl.program_id(1) * 64 + gl.arange(0, 64, gl.SliceLayout(1, CODES))
    o = gl.minimum(row, TOP)[:, None]
    j = gl.arange(0, HALF, gl.SliceLayout(0, CODES))[None, :]
    start = gl.program_id(2) * EACH
    held = ()
    for d in gl.static_range(AHEAD):
        block = start + d * DECODERS + WHICH
        held = held + (
            load_block(low_ptr, high_ptr, scale_ptr, scale_code_ptr, offset_ptr, offset_code_ptr,
                       zero_ptr, o, j, block, row, block, True, BLOCKS, LOW, HIGH, NS, HALF, COUNT,
                       G, S_FORM, O_FORM),
        )  # fmt: skip
    for turn in range(EACH // (AHEAD * DECODERS)):
        for d in gl.static_range(AHEAD):
            number = (turn * AHEAD + d) * DECODERS + WHICH
            for h in gl.static_range(SPB):
                parts = ()
                for i in gl.static_range(SPS):
                    halves = ()
                    for f in gl.static_range(2):
                        value = _decode_half(
                            held[0], table_ptr, o, h * SPS + i, f, LOW, HIGH, NS, PER, ZERO,
                            scale_ptr is not None, scale_code_ptr is not None,
                            offset_ptr is not None, zero_ptr is not None, table_ptr is not None,
                            OWN_TABLE,
                        )  # fmt: skip
                        halves = halves + (value.to(w.dtype),)
                    parts = parts + (gl.reshape(gl.join(halves[0], halves[1]), [64, SK]),)
                if SPS == 2:
                    line = _join(parts[0], parts[1])
                else:
                    line = _join(_join(parts[0], parts[1]), _join(parts[2], parts[3]))
                step = number * SPB + h
                stage = step % STAGES
                mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
                w.index(stage).store(line)
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(full_w.index(stage), count=1)
            more = number + AHEAD * DECODERS < EACH
            block = gl.minimum(start + number + AHEAD * DECODERS, BLOCKS - 1)
            held = held[1:] + (
                load_block(low_ptr, high_ptr, scale_ptr, scale_code_ptr, offset_ptr,
                           offset_code_ptr, zero_ptr, o, j, block, row, block, more, BLOCKS, LOW,
                           HIGH, NS, HALF, COUNT, G, S_FORM, O_FORM),
            )  # fmt: skip


@gluon.jit
def _multiply(x_tiles, bias_ptr, y_ptr, part_ptr, ticket_ptr, w, x, full_w, full_x, empty, T,
              O: gl.constexpr, STEPS: gl.constexpr, TP: gl.constexpr, STAGES: gl.constexpr,
              PARTS: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The warpgroup that multiplies 64 outputs by all rows of the tile."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TP, 16])
    acc = gl.zeros([64, TP], gl.float32, ACC)
    if PDL:
        wait_for_previous_kernel()
    for step in gl.static_range(STAGES - 1):
        _load_rows(x_tiles, x, full_x, step, step, step < STEPS, STEPS, TP)
    for step in range(STEPS):
        stage = step % STAGES
        mbarrier.wait(full_x.index(stage), step // STAGES & 1)
        mbarrier.wait(full_w.index(stage), step // STAGES & 1)
        rows = x.index(stage).permute((1, 0))
        acc = warpgroup_mma(w.index(stage), rows, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        before = (step + STAGES - 1) % STAGES
        mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
        later = step + STAGES - 1
        _load_rows(x_tiles, x, full_x, later, before, later < STEPS, STEPS, TP)
    acc = warpgroup_mma_wait(0, deps=[acc])
    LINES: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    store_sums(y_ptr, bias_ptr, part_ptr, ticket_ptr, acc, gl.program_id(1), gl.program_id(2),
               gl.program_id(0) * TP, T, O, TP, PARTS, ACC, LINES)  # fmt: skip


@kernel("T", jit=gluon.jit)
def _grouped_gemm_hopper(
    low_ptr,  # planes: see TiledWeight
    high_ptr,
    scale_ptr,
    scale_code_ptr,
    offset_ptr,
    offset_code_ptr,
    zero_ptr,
    table_ptr,  # [16] or [O, 16] float32
    bias_ptr,  # [O] or None
    y_ptr,  # [T, O] out
    part_ptr,  # [bands, PARTS, 64, TP] float32, written and read if PARTS > 1
    ticket_ptr,  # [bands] int32, zero before and after
    x_tiles,  # descriptor of [T, I], tiles [TP, 64]
    T,
    O: gl.constexpr,
    BLOCKS: gl.constexpr,
    LOW: gl.constexpr,
    HIGH: gl.constexpr,
    NS: gl.constexpr,
    SK: gl.constexpr,
    GROUP: gl.constexpr,
    G: gl.constexpr,
    ZERO: gl.constexpr,
    S_FORM: gl.constexpr,
    O_FORM: gl.constexpr,
    OWN_TABLE: gl.constexpr,
    TP: gl.constexpr,  # rows of x of a program
    DECODERS: gl.constexpr,  # warpgroups that decode: one or two
    REGISTERS: gl.constexpr,  # of a thread
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,  # blocks that a warpgroup loads ahead
    PARTS: gl.constexpr,
    PDL: gl.constexpr,
):
    LINES: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    PER: gl.constexpr = GROUP // SK if GROUP > 0 else NS
    COUNT: gl.constexpr = NS // PER
    STEPS: gl.constexpr = BLOCKS // PARTS * (NS * SK // INNER)
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    w = gl.allocate_shared_memory(dtype, [STAGES, 64, INNER], LINES)
    x = gl.allocate_shared_memory(dtype, [STAGES, TP, INNER], LINES)
    full_w = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full_w.index(i), count=1)
        mbarrier.init(full_x.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    if PDL:
        launch_dependents()
    if DECODERS == 1:
        gl.warp_specialize(
            [
                (_multiply, (x_tiles, bias_ptr, y_ptr, part_ptr, ticket_ptr, w, x, full_w, full_x,
                             empty, T, O, STEPS, TP, STAGES, PARTS, PDL)),
                (_decode, (low_ptr, high_ptr, scale_ptr, scale_code_ptr, offset_ptr,
                           offset_code_ptr, zero_ptr, table_ptr, w, full_w, empty, 0, O, BLOCKS,
                           LOW, HIGH, NS, SK, PER, COUNT, G, ZERO, S_FORM, O_FORM, OWN_TABLE,
                           STAGES, DECODERS, AHEAD, PARTS)),
            ],
            [4],
            [REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (x_tiles, bias_ptr, y_ptr, part_ptr, ticket_ptr, w, x, full_w, full_x,
                             empty, T, O, STEPS, TP, STAGES, PARTS, PDL)),
                (_decode, (low_ptr, high_ptr, scale_ptr, scale_code_ptr, offset_ptr,
                           offset_code_ptr, zero_ptr, table_ptr, w, full_w, empty, 0, O, BLOCKS,
                           LOW, HIGH, NS, SK, PER, COUNT, G, ZERO, S_FORM, O_FORM, OWN_TABLE,
                           STAGES, DECODERS, AHEAD, PARTS)),
                (_decode, (low_ptr, high_ptr, scale_ptr, scale_code_ptr, offset_ptr,
                           offset_code_ptr, zero_ptr, table_ptr, w, full_w, empty, 1, O, BLOCKS,
                           LOW, HIGH, NS, SK, PER, COUNT, G, ZERO, S_FORM, O_FORM, OWN_TABLE,
                           STAGES, DECODERS, AHEAD, PARTS)),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )  # fmt: skip


class GroupedHopperPlan(NamedTuple):
    """Split of a product.

    rows: of x of a program; decoders: warpgroups that decode; registers: of a thread; stages;
    ahead: blocks that one loads ahead; parts: of the inputs.
    """

    rows: int
    decoders: int
    registers: int
    stages: int
    ahead: int
    parts: int


def supports(x: Tensor, weight: TiledWeight) -> bool:
    """Whether this kernel multiplies these rows: not those of tables."""
    whole = weight.slices * weight.slice_width % INNER.value == 0
    fits = whole and is_aligned(x) and weight.table is None and weight.blocks > 1
    return fits and gpu_target(x.device).capability == (9, 0)


def plan_grouped_hopper(rows: int, weight: TiledWeight) -> GroupedHopperPlan:
    """One program fills a multiprocessor; parts where there are too few programs."""
    tall = 128 if rows <= 128 else 256
    bands = cdiv(weight.shape[0], TILE)
    parts = 2 if bands <= 66 and rows <= tall and weight.blocks % 2 == 0 else 1
    each = weight.blocks // parts
    decoders = 2 if each % 2 == 0 else 1
    ahead = next(n for n in (4, 3, 2, 1) if each // decoders % n == 0)
    while ahead > 1 and ahead * weight.slices * weight.bits > 64:
        ahead = next(n for n in range(ahead - 1, 0, -1) if each // decoders % n == 0)
    return GroupedHopperPlan(tall, decoders, 168, 6 if tall == 128 else 5, ahead, parts)


def launch(
    y: Tensor,
    x: Tensor,
    weight: TiledWeight,
    bias: Tensor | None = None,
    plan: GroupedHopperPlan | None = None,
) -> None:
    """y [T, O] = x @ weight.T + bias; the columns of x are in the order of the codes."""
    rows, outputs = x.shape[0], weight.shape[0]
    tall, decoders, registers, stages, ahead, parts = plan or plan_grouped_hopper(rows, weight)
    row_tiles, bands = cdiv(rows, tall), cdiv(outputs, TILE)
    assert parts == 1 or row_tiles == 1, "parts of a sum are counted for one tile of rows"
    assert weight.blocks % (parts * decoders * ahead) == 0, (weight.blocks, plan)
    sums = None
    if parts > 1:
        sums = torch.empty(bands * parts * TILE * tall, dtype=torch.float32, device=y.device)
    _, high, *numbers, _ = weight_tensors(weight)
    planes = (weight.low.view(torch.int32), None if high is None else high.view(torch.int32))
    _grouped_gemm_hopper(
        (row_tiles, bands, parts),
        (*planes, *numbers, weight.table, bias, y, sums, weight.counters),
        (rows,),
        (
            outputs, *weight_constants(weight), tall, decoders, registers, stages, ahead, parts,
            PDL_ENABLED,
        ),
        pdl=PDL_ENABLED,
        tiles=(describe_rows(x, tall),),
        maxnreg=registers,
    )  # fmt: skip

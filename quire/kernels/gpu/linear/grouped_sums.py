"""What the Gluon kernels of grouped weights on Hopper share: factors, sums in parts, and stores.

A warpgroup has the sums of 64 outputs, a band, and TP rows. Where there are too few programs to
keep the device busy, each sum is split along the inputs; the program that finishes last adds the
parts, in one order, so results do not depend on timing.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.formats.tiled_weight import TiledWeight

BLOCK = gl.constexpr(128)  # inputs of a block of 4 bits: four slices of 32


@gluon.jit
def load_factors(scale_ptr, zero_ptr, row, block, G: gl.constexpr, SHARE: gl.constexpr):
    """(scale,) or (scale, zero) of a block's group, as they are in memory, for rows [64]."""
    S: gl.constexpr = (G + SHARE - 1) // SHARE
    g = gl.minimum(block, G - 1)
    found = (gl.load(scale_ptr + row // 64 * (64 * S) + g // SHARE * 64 + row % 64),)
    if zero_ptr is not None:
        zero = gl.load(zero_ptr + row // 64 * (64 * G) + g * 64 + row % 64)
        found = found + (zero,)  # type: ignore[assignment]
    return found


@gluon.jit
def store_rows(y_ptr, bias_ptr, acc, band, first, T, O: gl.constexpr, TP: gl.constexpr,
               ACC: gl.constexpr, LINES: gl.constexpr):  # fmt: skip
    """Store the outputs of a band, for rows from `first` on. LINES: the layout of the store."""
    o_acc = band * 64 + gl.arange(0, 64, gl.SliceLayout(1, ACC))
    o = band * 64 + gl.arange(0, 64, gl.SliceLayout(1, LINES))
    t = first + gl.arange(0, TP, gl.SliceLayout(0, LINES))
    if O % 64 == 0:
        if bias_ptr is not None:
            acc += gl.load(bias_ptr + o_acc).to(gl.float32)[:, None]
        live = (t < T)[None, :]
    else:
        if bias_ptr is not None:
            acc += gl.load(bias_ptr + o_acc, o_acc < O, 0.0).to(gl.float32)[:, None]
        live = (o < O)[:, None] & (t < T)[None, :]
    y = gl.convert_layout(acc.to(y_ptr.dtype.element_ty), LINES)
    gl.store(y_ptr + t.to(gl.int64)[None, :] * O + o[:, None], y, live)


@gluon.jit
def store_sums(y_ptr, bias_ptr, part_ptr, ticket_ptr, acc, band, part, first, T,
               O: gl.constexpr, TP: gl.constexpr, PARTS: gl.constexpr, ACC: gl.constexpr,
               LINES: gl.constexpr):  # fmt: skip
    """As store_rows(). With PARTS, keep this part; the last program stores the sum of all."""
    if PARTS > 1:
        o_in = gl.arange(0, 64, gl.SliceLayout(1, ACC))
        t_in = gl.arange(0, TP, gl.SliceLayout(0, ACC))
        parts = (
            part_ptr + band.to(gl.int64) * (PARTS * 64 * TP) + o_in[:, None] * TP + t_in[None, :]
        )
        gl.store(parts + part * (64 * TP), acc)
        gl.thread_barrier()  # all of the part is written before the counter is increased
        last = gl.atomic_add(ticket_ptr + band, 1, sem="acq_rel") == PARTS - 1
        if last:
            acc = gl.zeros([64, TP], gl.float32, ACC)
            for p in gl.static_range(PARTS):
                acc += gl.load(parts + p * (64 * TP), cache_modifier=".cg")
            gl.store(ticket_ptr + band, 0)
            store_rows(y_ptr, bias_ptr, acc, band, first, T, O, TP, ACC, LINES)
    else:
        store_rows(y_ptr, bias_ptr, acc, band, first, T, O, TP, ACC, LINES)


def decodes_in_registers(x: Tensor, weight: TiledWeight) -> bool:
    """Whether weights are 4 bits in groups of 128, without a table, and x is aligned for copies."""
    scale = weight.scale
    plain = weight.bits == 4 and weight.group in (0, BLOCK.value) and weight.table is None
    plain = plain and weight.offset is None and scale is not None and scale.codes is None
    return plain and weight.shape[0] % 128 == 0 and is_aligned(x)


def is_aligned(x: Tensor) -> bool:
    """Whether the copy engine can read rows x [T, I]."""
    return x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def describe_rows(x: Tensor, rows: int) -> TensorDescriptor:
    """Rows x [T, I] of two-byte numbers as tiles [rows, 64]."""
    layout = gl.NVMMASharedLayout(128, 16)
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [rows, 64], layout)


def describe_codes(weight: TiledWeight) -> TensorDescriptor:
    """Codes of 4 bits, four a word, as tiles of words [64, 32]."""
    low = weight.low.view(-1, 32)
    return TensorDescriptor(low, list(low.shape), [32, 1], [64, 32], gl.NVMMASharedLayout(64, 16))

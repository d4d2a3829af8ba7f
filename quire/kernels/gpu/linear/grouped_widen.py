"""Widen kernels: a TiledWeight as the plain matrix, and the rows of an embedding.

For products of so many rows that the library's are faster, a layer is widened into a scratch; the
columns stay in the order of the codes. Each number is rounded once, from float32.

Axes: T ids, O outputs or rows of the embedding, I inputs.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.embedding import round_to_dtype
from quire.kernels.formats.tiled_weight import TILE, TiledWeight
from quire.kernels.gpu.linear.grouped_decode import float_of, load_factor, load_words
from quire.kernels.gpu.linear.grouped_gemm import weight_constants, weight_tensors
from quire.kernels.gpu.runtime.fast_launch import kernel

_BLOCKS = 8
"""Blocks of inputs of a program that looks up a row."""


@kernel("factor")
def _widen(
    id_ptr,  # [T] int32, or None: all rows in order
    low_ptr,  # planes: see TiledWeight
    high_ptr,
    scale_ptr,
    scale_code_ptr,
    offset_ptr,
    offset_code_ptr,
    zero_ptr,
    table_ptr,  # [16] or [O, 16] float32
    y_ptr,  # [T or O, I] out
    factor,
    O: tl.constexpr,
    I: tl.constexpr,
    BLOCKS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    NS: tl.constexpr,
    SK: tl.constexpr,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    ZERO: tl.constexpr,
    S_FORM: tl.constexpr,
    O_FORM: tl.constexpr,
    OWN_TABLE: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    TIMES: tl.constexpr,
):
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if id_ptr is None:
        o = r
    else:
        o = tl.load(id_ptr + r)
    live = o < O
    row = tl.minimum(o, O - 1)
    j = tl.arange(0, SK)
    for step in tl.static_range(TIMES):
        m = tl.minimum(tl.program_id(0) * TIMES + step, BLOCKS - 1)
        low = load_words(low_ptr, row, m, BLOCKS, NS * LOW // 16, SK, "evict_first")
        high = ()
        if HIGH:
            high = load_words(high_ptr, row, m, BLOCKS, NS * HIGH // 16, SK, "evict_first")
        for s in tl.static_range(NS):
            word = low[s // (16 // LOW)].to(tl.int32)
            q = (word >> (s % (16 // LOW) * LOW)) & ((1 << LOW) - 1)
            if HIGH:
                above = high[s // (16 // HIGH)].to(tl.int32) >> (s % (16 // HIGH) * HIGH)
                q = q | ((above & ((1 << HIGH) - 1)) << LOW)
            at = m * (NS * SK) + s * SK
            g = at // GROUP if GROUP > 0 else 0
            if table_ptr is not None:
                w = tl.load(table_ptr + q + (row[:, None] * 16 if OWN_TABLE else 0))
            elif zero_ptr is not None:
                zero = tl.load(zero_ptr + (row // 64) * (64 * G) + row % 64 + g * 64)
                w = q.to(tl.float32) - zero.to(tl.float32)[:, None]
            elif ZERO is None:
                w = float_of(q, 1)
            else:
                w = (q - ZERO).to(tl.float32)
            if scale_ptr is not None:
                w *= load_factor(scale_ptr, scale_code_ptr, row, g, G, S_FORM)[:, None]
            if offset_ptr is not None:
                w += load_factor(offset_ptr, offset_code_ptr, row, g, G, O_FORM)[:, None]
            y = w.to(y_ptr.dtype.element_ty)
            if SCALED:
                y = (y.to(tl.float32) * factor).to(y_ptr.dtype.element_ty)
            y_at = y_ptr + r.to(tl.int64)[:, None] * I + (at + j)[None, :]
            tl.store(y_at, y, live[:, None] & (at + j < I)[None, :])


def _launch(
    y: Tensor, ids: Tensor | None, weight: TiledWeight, scale: float, rows: int, times: int
) -> None:
    _widen(
        (-(-weight.blocks // times), -(-y.shape[0] // rows), 1),
        (ids, *weight_tensors(weight)[:-1], weight.table, y),
        (scale,),
        (*weight.shape, *weight_constants(weight), scale != 1.0, rows, times),
    )


def widen(weight: TiledWeight, dtype: torch.dtype) -> Tensor:
    """Return the matrix [O, I] with its columns in the order of the codes."""
    y = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    _launch(y, None, weight, 1.0, TILE, 1)
    return y


def outputs(ids: Tensor, weight: object, scale: float = 1.0) -> Tensor:
    if not isinstance(weight, TiledWeight) or weight.perm is not None:
        return NotImplemented
    if ids.dtype != torch.int32 or not ids.is_contiguous():
        return NotImplemented
    return torch.empty((len(ids), weight.shape[1]), dtype=weight.dtype, device=ids.device)


def launch(out: Tensor, ids: Tensor, weight: TiledWeight, scale: float = 1.0) -> None:
    if len(ids):
        factor = 1.0 if scale == 1.0 else round_to_dtype(scale, weight.dtype)
        _launch(out, ids, weight, factor, 1, min(_BLOCKS, 32 // weight.slices))

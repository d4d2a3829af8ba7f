"""What surrounds a forward pass on the GPU: table entries in, inputs gathered, results out.

Not ops: there is no model in them. The runner's device state (tables, last tokens) is read and
written here and nowhere else, by slot, so the host sends only what is new.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.start import kernel

BLOCK = 256


@kernel("count")
def _write_tables_kernel(
    at_ptr,  # [n] flat indexes into the tables
    block_ptr,  # [n]
    tables_ptr,  # [G, M, W]
    count,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    at = tl.load(at_ptr + i, mask=live, other=0)
    tl.store(tables_ptr + at.to(tl.int64), tl.load(block_ptr + i, mask=live, other=0), mask=live)


@kernel("tokens", "group_stride", "width")
def _gather_kernel(
    token_ptr,  # [T] ids; negative: the slot's last token
    slot_ptr,  # [T]; negative: padding
    position_ptr,  # [T]
    last_ptr,  # [M]
    tables_ptr,  # [G, M, W]
    id_ptr,  # [T] out
    kv_ptr,  # [G, T] out, int64
    tokens,
    group_stride,  # M * W
    width,
    GROUPS: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = t < tokens
    slot = tl.load(slot_ptr + t, mask=live, other=-1)
    real = slot >= 0
    token = tl.load(token_ptr + t, mask=live, other=0)
    last = tl.load(last_ptr + slot, mask=real & (token < 0), other=0)
    tl.store(id_ptr + t, tl.where(token < 0, last, token), mask=live)
    position = tl.load(position_ptr + t, mask=live, other=0)
    entry = slot.to(tl.int64) * width + position // KV_BLOCK
    for g in tl.static_range(GROUPS):
        block = tl.load(tables_ptr + g * group_stride.to(tl.int64) + entry, mask=real, other=0)
        at = block.to(tl.int64) * KV_BLOCK + position % KV_BLOCK
        tl.store(kv_ptr + g * tokens.to(tl.int64) + t, tl.where(real, at, -1), mask=live)


@kernel("rows", "stride")
def _finish_kernel(
    chosen_ptr,  # [R]
    top_ptr,  # [R] float32
    slot_ptr,  # [R]; negative: padding
    last_ptr,  # [M] out
    result_ptr,  # [2, stride] out: ids, then the bits of the tops
    rows,
    stride,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = r < rows
    chosen = tl.load(chosen_ptr + r, mask=live, other=0).to(tl.int32)
    top = tl.load(top_ptr + r, mask=live, other=0.0).to(tl.float32)
    slot = tl.load(slot_ptr + r, mask=live, other=-1)
    tl.store(last_ptr + slot, chosen, mask=slot >= 0)
    tl.store(result_ptr + r, chosen, mask=live)
    tl.store(result_ptr + stride + r, top.to(tl.int32, bitcast=True), mask=live)


def write_tables(at: Tensor, blocks: Tensor, tables: Tensor) -> None:
    """tables.view(-1)[at] = blocks. at, blocks: [n] int32. tables: [G, M, W] int32."""
    count = at.shape[0]
    _write_tables_kernel(
        (triton.cdiv(count, BLOCK), 1, 1), (at, blocks, tables), (count,), (BLOCK,)
    )


def gather(
    token_ids: Tensor,
    token_slots: Tensor,
    positions: Tensor,
    last_token: Tensor,
    tables: Tensor,
    ids: Tensor,
    kv_slots: Tensor,
    block_size: int,
) -> None:
    """Fill ids [T] int32 and kv_slots [G, T] int64, where each token's keys and values go.

    token_ids, token_slots, positions: [T] int32; a negative id is the slot's last token, a negative
    slot is padding (id as given, kv slot -1). last_token: [M]. tables: [G, M, W].
    """
    tokens, (groups, slots, width) = token_ids.shape[0], tables.shape
    _gather_kernel(
        (triton.cdiv(tokens, BLOCK), 1, 1),
        (token_ids, token_slots, positions, last_token, tables, ids, kv_slots),
        (tokens, slots * width, width),
        (groups, block_size, BLOCK),
    )


def finish(
    chosen: Tensor,
    tops: Tensor,
    row_slots: Tensor,
    last_token: Tensor,
    results: Tensor,
    stride: int,
) -> None:
    """Keep each row's token as its slot's last, and pack ids and tops for the host.

    chosen: [R] int. tops: [R] float32. row_slots: [R] int32, negative for padding.
    last_token: [M] int32. results: int32, of which [2, stride] are written.
    """
    rows = chosen.shape[0]
    _finish_kernel(
        (triton.cdiv(rows, BLOCK), 1, 1),
        (chosen, tops, row_slots, last_token, results),
        (rows, stride),
        (BLOCK,),
    )

"""Step I/O kernels write table entries, gather a forward pass's inputs and store its results.

They are not ops: they contain nothing of a model. Only they read and write the runner's device
state (tables, last tokens), by slot, so the host sends only what is new.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2

BLOCK = 256
AHEAD_ROWS = 4096
"""As in quire.runner.step_batch."""


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


@triton.jit
def store_kv_slots(kv_ptr, tables_ptr, i, slot, position, real, live, count, group_stride, width,
                   GROUPS: tl.constexpr, KV_BLOCK: tl.constexpr):  # fmt: skip
    """Store where each layer group keeps the KV of tokens: kv [G, count] at i, -1 if not real.

    slot, position: of the tokens, whose blocks are in the tables [G, M, W]. group_stride: M * W.
    """
    entry = slot.to(tl.int64) * width + position // KV_BLOCK
    for g in tl.static_range(GROUPS):
        block = tl.load(tables_ptr + g * group_stride.to(tl.int64) + entry, mask=real, other=0)
        at = block.to(tl.int64) * KV_BLOCK + position % KV_BLOCK
        tl.store(kv_ptr + g * count.to(tl.int64) + i, tl.where(real, at, -1), mask=live)


@kernel("tokens", "group_stride", "width")
def _gather_inputs_kernel(
    token_ptr,  # [T] ids; -1: the slot's last token
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
    last = tl.load(last_ptr + slot, mask=real & (token == -1), other=0)
    tl.store(id_ptr + t, tl.where(token == -1, last, token), mask=live)
    position = tl.load(position_ptr + t, mask=live, other=0)
    store_kv_slots(
        kv_ptr, tables_ptr, t, slot, position, real, live, tokens, group_stride, width, GROUPS,
        KV_BLOCK,
    )  # fmt: skip


@kernel("rows", "group_stride", "width", "stride")
def _load_decode_inputs_kernel(
    state_ptr,  # [2]: box of the next step, box of the step under way
    inbox_ptr,  # [boxes, 6, stride], in host memory
    last_ptr,  # [M]
    tables_ptr,  # [G, M, W]
    words_ptr,  # [6, stride] out
    id_ptr,  # [rows] out
    kv_ptr,  # [G, rows] out, int64
    ahead_ptr,  # [2 + D, AHEAD]: of each row of the step before, accepted drafts, then tokens
    rows,
    group_stride,  # M * W
    width,
    stride,
    GROUPS: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BOXES: tl.constexpr,
    AHEAD: tl.constexpr,  # 0: no step continues another
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program, so that it can advance to the next box at its end."""
    box = tl.load(state_ptr)
    inbox_ptr += box * 6 * stride  # written before the launch, so plain loads see it
    for start in range(0, rows, BLOCK):
        r = start + tl.arange(0, BLOCK)
        live = r < rows
        token = tl.load(inbox_ptr + r, mask=live, other=0)
        position = tl.load(inbox_ptr + stride + r, mask=live, other=0)
        context = tl.load(inbox_ptr + 2 * stride + r, mask=live, other=0)
        row = tl.load(inbox_ptr + 3 * stride + r, mask=live, other=0)
        slot = tl.load(inbox_ptr + 4 * stride + r, mask=live, other=-1)
        output = tl.load(inbox_ptr + 5 * stride + r, mask=live, other=0)
        if AHEAD:
            place = -2 - token
            known = live & (place >= 0)
            of = place % ROWS
            token = tl.load(ahead_ptr + (1 + place // ROWS) * AHEAD + of, mask=known, other=token)
            accepted = tl.load(ahead_ptr + of, mask=known, other=0)
            position += accepted
            context += accepted
            output += accepted
        tl.store(words_ptr + stride + r, position, mask=live)
        tl.store(words_ptr + 2 * stride + r, context, mask=live)
        tl.store(words_ptr + 3 * stride + r, row, mask=live)
        tl.store(words_ptr + 4 * stride + r, slot, mask=live)
        tl.store(words_ptr + 5 * stride + r, output, mask=live)
        real = slot >= 0
        last = tl.load(last_ptr + slot, mask=real & (token < 0), other=0)
        token = tl.where(token < 0, last, token)
        tl.store(id_ptr + r, token, mask=live)
        if AHEAD:
            tl.store(words_ptr + r, token, mask=live)
        place = tl.maximum(context - 1, 0)
        store_kv_slots(
            kv_ptr, tables_ptr, r, slot, place, real, live, rows, group_stride, width, GROUPS,
            KV_BLOCK,
        )  # fmt: skip
    tl.debug_barrier()  # every thread has read the state
    tl.store(state_ptr + 1, box)
    tl.store(state_ptr, (box + 1) % BOXES)


@kernel("rows", "stride")
def _store_decode_results_kernel(
    state_ptr,  # [2]
    chosen_ptr,  # [rows]
    top_ptr,  # [rows] float32
    slot_ptr,  # [rows]; negative for padding
    last_ptr,  # [M] out
    outbox_ptr,  # [boxes, 2, stride] out, in host memory: ids, then the bits of the tops
    rows,
    stride,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = r < rows
    outbox_ptr += tl.load(state_ptr + 1) * 2 * stride
    chosen = tl.load(chosen_ptr + r, mask=live, other=0).to(tl.int32)
    top = tl.load(top_ptr + r, mask=live, other=0.0).to(tl.float32)
    slot = tl.load(slot_ptr + r, mask=live, other=-1)
    tl.store(last_ptr + slot, chosen, mask=slot >= 0)
    tl.store(outbox_ptr + r, chosen, mask=live)
    tl.store(outbox_ptr + stride + r, top.to(tl.int32, bitcast=True), mask=live)


@kernel("rows", "stride")
def _store_results_kernel(
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
    _write_tables_kernel((cdiv(count, BLOCK), 1, 1), (at, blocks, tables), (count,), (BLOCK,))


def gather_inputs(
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

    token_ids, token_slots, positions: [T] int32; id -1 is the slot's last token, a negative slot is
    padding (id as given, kv slot -1). last_token: [M]. tables: [G, M, W].
    """
    tokens, (groups, slots, width) = token_ids.shape[0], tables.shape
    _gather_inputs_kernel(
        (cdiv(tokens, BLOCK), 1, 1),
        (token_ids, token_slots, positions, last_token, tables, ids, kv_slots),
        (tokens, slots * width, width),
        (groups, block_size, BLOCK),
    )


def store_results(
    chosen: Tensor,
    tops: Tensor,
    row_slots: Tensor,
    last_token: Tensor,
    results: Tensor,
) -> None:
    """Keep each row's token as its slot's last, and pack ids and tops for the host.

    chosen: [R] int. tops: [R] float32. row_slots: [R] int32, negative for padding.
    last_token: [M] int32. results: [2, R or more] int32.
    """
    rows = chosen.shape[0]
    _store_results_kernel(
        (cdiv(rows, BLOCK), 1, 1),
        (chosen, tops, row_slots, last_token, results),
        (rows, results.shape[1]),
        (BLOCK,),
    )


def load_decode_inputs(
    state: Tensor,
    inbox: Tensor,
    words: Tensor,
    last_token: Tensor,
    tables: Tensor,
    ids: Tensor,
    kv_slots: Tensor,
    boxes: int,
    block_size: int,
    ahead: Tensor | None = None,
) -> None:
    """Load a decode step's integers from the current box, and gather as `gather_inputs` does.

    inbox: [boxes * 6 * stride] int32, pinned; of a box: token ids (-1: the slot's last), rotary
    positions, contexts, rows, row slots (negative: padding), outputs. words: [6, stride] int32 on
    the device; the first are the ids, written if there is `ahead`. ids: [S] int32. kv_slots: [G, S]
    int64.
    ahead: [2 + D, m] int32, of rows of the step before: accepted drafts, last token, and drafts
    behind it. The id -2 - (j * AHEAD_ROWS + i) is token j of row i, of which 0 is the last one;
    what is in the box for it is of the place without accepted drafts.
    """
    (groups, slots, width), rows = tables.shape, ids.shape[0]
    _load_decode_inputs_kernel(
        (1, 1, 1),
        (state, inbox, last_token, tables, words, ids, kv_slots, state if ahead is None else ahead),
        (rows, slots * width, width, words.shape[1]),
        (groups, block_size, boxes, 0 if ahead is None else ahead.shape[1], AHEAD_ROWS,
         min(1024, max(32, next_power_of_2(rows)))),
        warps=8,
    )  # fmt: skip


def store_decode_results(
    state: Tensor,
    chosen: Tensor,
    tops: Tensor,
    row_slots: Tensor,
    last_token: Tensor,
    outbox: Tensor,
    stride: int,
) -> None:
    """Keep each row's token as its slot's last, and write ids and tops to the host's box.

    outbox: [boxes * 2 * stride] int32, pinned. The others as in `store_results`.
    """
    rows = chosen.shape[0]
    _store_decode_results_kernel(
        (cdiv(rows, BLOCK), 1, 1),
        (state, chosen, tops, row_slots, last_token, outbox),
        (rows, stride),
        (BLOCK,),
    )

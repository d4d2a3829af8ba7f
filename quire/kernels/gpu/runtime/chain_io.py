"""Chain I/O kernels take a chain of drafts from one pass to the next, without the host.

They are not ops: they contain nothing of a model. Beside those of step_io they alone read the
runner's block tables.

Axes: T tokens of the step before, m rows with drafts, D drafts of a row
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.step_io import AHEAD_ROWS, store_kv_slots

BLOCK = 128
ANY_TOKEN = -2
"""In place of a draft: it is accepted, whatever was sampled."""


class PassInputs(NamedTuple):
    """What a pass over n tokens reads, each of them a row."""

    tokens: Tensor  # [n] int32
    positions: Tensor  # [n] int32
    contexts: Tensor  # [n] int32; 0: padding
    rows: Tensor  # [n] int32, of the block tables
    kv_slots: Tensor  # [G, n] int64; -1: padding


@kernel("rows", "stride", "longest", "number")
def _find_ends_kernel(
    chosen_ptr,  # [T]
    draft_ptr,  # [T] the draft behind each token; -1: none; below ANY: in `ahead`
    context_ptr,  # [T]
    row_ptr,  # [4, stride]: first token, number of tokens, then what advance_rows reads
    end_ptr,  # [m] out
    place_ptr,  # [m] out
    pass_ptr,  # [1] out
    ahead_ptr,  # [2 + D, stride]: accepted drafts out, last tokens out, drafts that were verified
    rows,
    stride,
    longest,
    number,
    ANY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = r < rows
    first = tl.load(row_ptr + r, mask=live, other=0)
    count = tl.load(row_ptr + stride + r, mask=live, other=0)
    accepted = tl.zeros([BLOCK], tl.int32)
    for j in range(longest):
        behind = (accepted == j) & (j < count)  # all before have been accepted
        draft = tl.load(draft_ptr + first + j, mask=behind, other=-1)
        kept = behind & (draft < ANY)
        place = -2 - draft
        there = ahead_ptr + (1 + place // ROWS) * stride + place % ROWS
        draft = tl.load(there, mask=kept, other=draft)
        chosen = tl.load(chosen_ptr + first + j, mask=behind, other=-1)
        agrees = (draft == ANY) | ((draft >= 0) & (draft == chosen))
        accepted += tl.where(behind & agrees, 1, 0)
    end = first + accepted
    context = tl.load(context_ptr + end, mask=live & (count > 0), other=1)
    tl.store(ahead_ptr + r, accepted, mask=live)
    last = tl.load(chosen_ptr + end, mask=live & (count > 0), other=0)
    tl.store(ahead_ptr + stride + r, last, mask=live)
    tl.store(end_ptr + r, end, mask=live)
    tl.store(place_ptr + r, context - 1, mask=live)
    tl.store(pass_ptr, number, mask=tl.program_id(0) == 0)


@kernel("rows", "stride", "group_stride", "width")
def _advance_rows_kernel(
    pass_ptr,  # [1] in and out
    id_ptr,  # [m] drafts
    row_ptr,  # [4, stride]: ..., room, slot; negative: padding
    tables_ptr,  # [G, M, W]
    place_ptr,  # [m] in and out
    token_ptr,  # [m] out
    position_ptr,  # [m] out
    context_ptr,  # [m] out
    table_row_ptr,  # [m] out
    kv_ptr,  # [G, m] out, int64
    draft_ptr,  # [D, stride] out
    rows,
    stride,
    group_stride,  # M * W
    width,
    GROUPS: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program, so that it can count the pass at its end."""
    number = tl.load(pass_ptr)
    for start in range(0, rows, BLOCK):
        r = start + tl.arange(0, BLOCK)
        live = r < rows
        token = tl.load(id_ptr + r, mask=live, other=0)
        room = tl.load(row_ptr + 2 * stride + r, mask=live, other=0)
        slot = tl.load(row_ptr + 3 * stride + r, mask=live, other=-1)
        place = tl.load(place_ptr + r, mask=live, other=0) + 1
        real = (slot >= 0) & (place < room)
        tl.store(place_ptr + r, place, mask=live)
        tl.store(token_ptr + r, token, mask=live)
        tl.store(draft_ptr + number * stride + r, token, mask=live & (number >= 0))
        tl.store(position_ptr + r, tl.where(real, place, 0), mask=live)
        tl.store(context_ptr + r, tl.where(real, place + 1, 0), mask=live)
        tl.store(table_row_ptr + r, tl.where(real, slot, 0), mask=live)
        store_kv_slots(
            kv_ptr, tables_ptr, r, slot, place, real, live, rows, group_stride, width, GROUPS,
            KV_BLOCK,
        )  # fmt: skip
    tl.debug_barrier()  # every thread has read the number
    tl.store(pass_ptr, number + 1)


@kernel("tokens", "stride")
def _place_tokens_kernel(
    token_ptr,  # [T] codes in, tokens out
    position_ptr,  # [T] in and out
    context_ptr,  # [T] in and out
    output_ptr,  # [T] in and out
    rotary_ptr,  # [T] in and out
    ahead_ptr,  # [2 + D, stride]: of each row of the step before, accepted drafts, then tokens
    tokens,
    stride,
    ROTARY: tl.constexpr,  # whether rotary positions are others
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = t < tokens
    place = -2 - tl.load(token_ptr + t, mask=live, other=-2)
    row = place % ROWS
    token = tl.load(ahead_ptr + (1 + place // ROWS) * stride + row, mask=live, other=0)
    accepted = tl.load(ahead_ptr + row, mask=live, other=0)
    tl.store(token_ptr + t, token, mask=live)
    position = tl.load(position_ptr + t, mask=live, other=0)
    tl.store(position_ptr + t, position + accepted, mask=live)
    context = tl.load(context_ptr + t, mask=live, other=0)
    tl.store(context_ptr + t, context + accepted, mask=live)
    output = tl.load(output_ptr + t, mask=live, other=0)
    tl.store(output_ptr + t, output + accepted, mask=live)
    if ROTARY:
        rotary = tl.load(rotary_ptr + t, mask=live, other=0)
        tl.store(rotary_ptr + t, rotary + accepted, mask=live)


def place_tokens(
    token_ids: Tensor,
    positions: Tensor,
    contexts: Tensor,
    outputs: Tensor,
    rotary: Tensor | None,
    ahead: Tensor,
    count: int,
) -> None:
    """Give the first `count` tokens of a step what they continue with: their tokens in place of
    codes (quire.runner.step_batch.ahead_code), and positions behind the drafts that were accepted.

    All but ahead: [T or more] int32, and written; each of these tokens is a row, and is sampled.
    rotary: None: rotary positions are positions. ahead: as find_ends() has it.
    """
    own_rotary = positions if rotary is None else rotary
    _place_tokens_kernel(
        (cdiv(count, BLOCK), 1, 1),
        (token_ids, positions, contexts, outputs, own_rotary, ahead),
        (count, ahead.shape[1]),
        (rotary is not None, AHEAD_ROWS, BLOCK),
    )


def find_ends(
    chosen: Tensor,
    drafts: Tensor,
    contexts: Tensor,
    rows: Tensor,
    ends: Tensor,
    places: Tensor,
    counter: Tensor,
    ahead: Tensor,
    longest: int,
    number: int = 0,
) -> None:
    """Find the last accepted token of each row, and its position: ends, places [m] int32.

    chosen, drafts, contexts: [T] int32 of the step: sampled tokens, the draft behind each (-1:
    none, ANY_TOKEN: one that counts as accepted, less: it is in `ahead`, see load_decode_inputs()),
    contexts. ahead: [2 + D, m or more], as wide as rows: accepted drafts of each row and its last
    token, which are written; drafts. rows: [4, m or more]: first tokens,
    numbers of tokens (0: padding), and two more. counter: [1], becomes `number`, that of the first
    pass whose ids advance_rows() is given. longest: most tokens of a row.
    """
    count = ends.shape[0]
    _find_ends_kernel(
        (cdiv(count, BLOCK), 1, 1),
        (chosen, drafts, contexts, rows, ends, places, counter, ahead),
        (count, rows.shape[1], longest, number),
        (ANY_TOKEN, AHEAD_ROWS, BLOCK),
    )


def advance_rows(
    counter: Tensor,
    ids: Tensor,
    rows: Tensor,
    tables: Tensor,
    places: Tensor,
    inputs: PassInputs,
    drafts: Tensor,
    block_size: int,
) -> None:
    """Keep the drafts `ids` [m] int32 of pass counter[0], and fill the inputs of the next pass.

    rows: as find_ends() has them, the last two: positions that the row has blocks for, and its
    slot (negative: padding). A row without room is padding. places: [m] positions of the last pass,
    advanced. drafts: [D, m or more] int32, as wide as rows. Ids of pass -1 are no drafts.
    """
    count, (groups, slots, width) = ids.shape[0], tables.shape
    _advance_rows_kernel(
        (1, 1, 1),
        (counter, ids, rows, tables, places, *inputs, drafts),
        (count, rows.shape[1], slots * width, width),
        (groups, block_size, min(1024, max(32, next_power_of_2(count)))),
        warps=8,
    )

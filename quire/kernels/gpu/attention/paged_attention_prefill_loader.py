"""The loader of prompts' attention on Hopper: one warp that takes items from a queue and fetches
their keys and values. paged_attention_prefill_hopper runs it beside the warpgroups that multiply.

A cell is a tile of rows for one KV head. An item is a cell, or a stretch of the keys of one. For
each item the loader leaves a note in shared memory; its fields are read in the same order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

SCAN = gl.constexpr(256)
HALF = gl.constexpr(64)  # channels in a line of shared memory (128 bytes)
NOTES = gl.constexpr(2)  # items that the loader may be ahead of a warpgroup
FIELDS = gl.constexpr(8)  # of a note; five are used


@gluon.jit
def _sequence_of(q_starts_ptr, first, sequences, tile, QUERIES: gl.constexpr):
    """(sequence, its first tile); as in paged_attention_prefill."""
    ids: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    count = 0
    for low in range(0, sequences, SCAN):
        i = low + gl.arange(0, SCAN, ids)
        begin = gl.load(q_starts_ptr + first + i, mask=i < sequences, other=0) - first
        count += gl.sum(((begin // QUERIES + i <= tile) & (i < sequences)).to(gl.int32), 0)
    begin = gl.load(q_starts_ptr + first + count - 1) - first
    return first + count - 1, begin // QUERIES + count - 1


@gluon.jit
def _load_blocks(cache_tiles, smem, stage, full, table, first, last, row, step,
          NB: gl.constexpr, B: gl.constexpr, D: gl.constexpr):  # fmt: skip
    """Fetch NB blocks, from number `first` of the table on, of one head's keys or values."""
    mbarrier.expect(full, NB * B * D * 2)
    tile = smem.index(stage)._reinterpret(
        smem.dtype, [NB * (D // HALF), B, HALF], cache_tiles.layout
    )
    for i in gl.static_range(NB):
        block = gl.load(table + gl.minimum(first + i, last))
        for h in gl.static_range(D // HALF):
            tma.async_copy_global_to_shared(
                cache_tiles, [block * step + row, h * HALF], full, tile.index(h * NB + i)
            )


@gluon.jit
def _load_tiles(cache_tiles, k_smem, v_smem, k_full, k_empty, v_full, v_empty, table, kh, skip,
          count, last, past, K: gl.constexpr, B: gl.constexpr, D: gl.constexpr, N: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    """Fetch `count` tiles of N keys and values after `skip`, as stages come free. past: how many
    this program has fetched before."""
    NB: gl.constexpr = N // B
    for j in range(count):
        stage = (past + j) % STAGES
        free = ((past + j) // STAGES & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), free)
        _load_blocks(cache_tiles, k_smem, stage, k_full.index(stage), table, (skip + j) * NB, last,
                     kh * B, 2 * K * B, NB, B, D)  # fmt: skip
        mbarrier.wait(v_empty.index(stage), free)
        _load_blocks(cache_tiles, v_smem, stage, v_full.index(stage), table, (skip + j) * NB, last,
                     (K + kh) * B, 2 * K * B, NB, B, D)  # fmt: skip


@gluon.jit
def cell_of(item, cells, SPLIT: gl.constexpr):
    """(cell, number of the stretch of its keys) of an item."""
    # late tiles are the long ones: they start first, so that none runs alone at the end; and
    # first stretches before others: those that a short prefix does not need come last
    if SPLIT:
        return cells - 1 - item % cells, item // cells
    else:
        return cells - 1 - item, 0


@gluon.jit
def range_of(lowest, queries, context, split, splits, window, QUERIES: gl.constexpr,
              N: gl.constexpr, LEAST: gl.constexpr, SPLIT: gl.constexpr,
              WINDOW: gl.constexpr):  # fmt: skip
    """(first tile of keys, number of tiles, how many of them all queries see, programs in use)."""
    prefix = context - queries
    # keys visible to the last query
    seen = prefix + gl.minimum(lowest + QUERIES, queries)
    skip = 0
    full = (prefix + lowest + 1) // N
    used = 1
    if WINDOW:  # few tiles then: all take the mask
        skip = gl.maximum(prefix + lowest + 1 - window, 0) // N
        full = 0
    count = gl.cdiv(seen, N) - skip
    if SPLIT:  # as many stretches of the tile's keys as are worth a program
        size = gl.maximum(gl.cdiv(gl.cdiv(seen, N), splits), LEAST)
        used = gl.maximum(gl.cdiv(gl.cdiv(seen, N), size), 1)
        skip = split * size
        count = gl.minimum(count - skip, size)
        full = gl.minimum(gl.maximum(full - skip, 0), count)
    return skip, count, full, used


@gluon.jit
def _write_note(notes, place, item, begin, queries, lowest, context):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    notes.index(place * FIELDS).store(gl.full([1], item, gl.int32, one))
    notes.index(place * FIELDS + 1).store(gl.full([1], begin, gl.int32, one))
    notes.index(place * FIELDS + 2).store(gl.full([1], queries, gl.int32, one))
    notes.index(place * FIELDS + 3).store(gl.full([1], lowest, gl.int32, one))
    notes.index(place * FIELDS + 4).store(gl.full([1], context, gl.int32, one))


@gluon.jit
def read_note(notes, note_full, note_empty, read):
    """Wait for note number `read` of this program: (item, begin, queries, lowest, context)."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    place = read % NOTES
    mbarrier.wait(note_full.index(place), read // NOTES & 1)
    item = gl.sum(notes.index(place * FIELDS).load(one), 0)
    begin = gl.sum(notes.index(place * FIELDS + 1).load(one), 0)
    queries = gl.sum(notes.index(place * FIELDS + 2).load(one), 0)
    lowest = gl.sum(notes.index(place * FIELDS + 3).load(one), 0)
    context = gl.sum(notes.index(place * FIELDS + 4).load(one), 0)
    gl.thread_barrier()  # every warp has read it
    mbarrier.arrive(note_empty.index(place), count=1)
    return item, begin, queries, lowest, context


@gluon.jit
def load_items(cache_tiles, tables_ptr, rows_ptr, q_starts_ptr, contexts_ptr, queue_ptr, k_smem,
          v_smem, k_full, k_empty, v_full, v_empty, notes, note_full, note_empty, first_sequence,
          sequences, window, splits, cells,
          K: gl.constexpr, D: gl.constexpr, B: gl.constexpr, W: gl.constexpr,
          QUERIES: gl.constexpr, N: gl.constexpr, LEAST: gl.constexpr, SPLIT: gl.constexpr,
          STAGES: gl.constexpr, HAS_ROWS: gl.constexpr, WINDOW: gl.constexpr):  # fmt: skip
    """The loader: takes an item, or items from the queue where there are more than programs, notes
    them for the warpgroups and fetches their keys and values. An item of number -1 is the last."""
    item = gl.program_id(0)
    past = 0
    noted = 0
    while item < cells * splits:
        cell, split = cell_of(item, cells, SPLIT)
        s, first_tile = _sequence_of(q_starts_ptr, first_sequence, sequences, cell // K, QUERIES)
        begin = gl.load(q_starts_ptr + s)
        queries = gl.load(q_starts_ptr + s + 1) - begin
        lowest = (cell // K - first_tile) * QUERIES
        context = gl.load(contexts_ptr + s)
        skip, count, _, used = range_of(
            lowest, queries, context, split, splits, window, QUERIES, N, LEAST, SPLIT, WINDOW
        )
        wanted = lowest < queries
        if SPLIT:
            wanted &= split < used
        if wanted:
            place = noted % NOTES
            mbarrier.wait(note_empty.index(place), (noted // NOTES & 1) ^ 1)
            _write_note(notes, place, item, begin, queries, lowest, context)
            mbarrier.arrive(note_full.index(place), count=1)
            noted += 1
            if context > 0:
                row = s
                if HAS_ROWS:
                    row = gl.load(rows_ptr + s)
                _load_tiles(cache_tiles, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                            tables_ptr + row.to(gl.int64) * W, cell % K, skip, count,
                            (context - 1) // B, past, K, B, D, N, STAGES)  # fmt: skip
                past += count
        item = cells * splits
        if not SPLIT:
            programs = gl.num_programs(0)
            if programs < cells:
                taken = gl.atomic_add(queue_ptr, 1, sem="relaxed")
                if taken == cells - 1:  # each item and each program's end was taken once
                    gl.store(queue_ptr, 0)
                item = taken + programs
    place = noted % NOTES
    mbarrier.wait(note_empty.index(place), (noted // NOTES & 1) ^ 1)
    _write_note(notes, place, -1, 0, 0, 0, 0)
    mbarrier.arrive(note_full.index(place), count=1)

"""MoE sort puts (token, expert) pairs in the order of experts, on the device, without the host.

    starts [X + 1]    expert i has the sorted positions [starts[i], starts[i + 1])
    order  [P]        sorted position -> pair; pair p is token p // k

Pairs with an id of -1 have no expert here, and no place: order is undefined outside of
[starts[0], starts[X]).

Some thousand pairs: one block per expert reads all of them twice, which costs less than a second
launch. More: each pair takes its position from one of its expert's counters. The pairs of one
expert are then in any order; the result of a row does not depend on its position.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import launch_dependents, wait_for_previous_kernel

CHUNK = 4096  # pairs a block looks at together: 16 a thread
COUNT_CHUNK = 512  # pairs of a program that counts
NUM_SHARDS = 8  # counters an expert has, so that fewer wait for the same one
MAX_ONE_LAUNCH = 16_384  # pairs up to which reading them again for every expert is quicker


@kernel("pairs")
def _sort(
    id_ptr,  # [P]
    order_ptr,  # [P] out
    start_ptr,  # [X + 1] out
    pairs,
    X: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_previous_kernel()
        launch_dependents()
    expert = tl.program_id(0)
    before = 0
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        before += tl.sum((tl.load(id_ptr + at, at < pairs, X) < expert).to(tl.int32), 0)
    tl.store(start_ptr + expert, before)
    if expert == X - 1:
        tl.store(start_ptr + X, pairs)
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mine = tl.load(id_ptr + at, at < pairs, X) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order_ptr + before + rank - 1, at, mine)
        before += tl.sum(mine.to(tl.int32), 0)


@kernel("pairs")
def _count(
    id_ptr,  # [P]
    count_ptr,  # [SHARES, X] zero before
    rank_ptr,  # [P] out
    pairs,
    X: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < pairs
    expert = tl.load(id_ptr + at, live, -1)
    live = expert >= 0
    mine = count_ptr + tl.program_id(0) % SHARES * X
    tl.store(rank_ptr + at, tl.atomic_add(mine + expert, 1, live, sem="relaxed"), live)


@kernel("pairs")
def _place(
    id_ptr,  # [P]
    count_ptr,  # [SHARES, X]
    rank_ptr,  # [P]
    order_ptr,  # [P] out
    start_ptr,  # [X + 1] out
    pairs,
    X: tl.constexpr,
    X_PAD: tl.constexpr,
    SHARES: tl.constexpr,
    COUNTED: tl.constexpr,  # pairs that a program of _count looked at
    BLOCK: tl.constexpr,
):
    xs = tl.arange(0, X_PAD)
    shares = tl.arange(0, SHARES)[:, None]
    counts = tl.load(count_ptr + shares * X + xs[None], (xs < X)[None], 0)
    totals = tl.sum(counts, 0)
    starts = tl.cumsum(totals, 0) - totals
    if tl.program_id(0) == 0:
        tl.store(start_ptr + xs, starts, xs <= X)
        tl.store(start_ptr + X, tl.sum(totals, 0))
    share = tl.program_id(0) * BLOCK // COUNTED % SHARES
    starts += tl.sum(tl.where(shares < share, counts, 0), 0)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < pairs
    expert = tl.load(id_ptr + at, live, -1)
    live = expert >= 0
    start = tl.sum(tl.where(expert[:, None] == xs[None], starts[None], 0), 1)
    tl.store(order_ptr + start + tl.load(rank_ptr + at, live, 0), at, live)


def sort_by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(order [P] int32, starts [X + 1] int32) of ids [T, k] int32."""
    pairs = ids.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=ids.device)
    if pairs <= MAX_ONE_LAUNCH:
        block = min(max(next_power_of_2(pairs), 128), CHUNK)
        pdl = not _sort.interpreted
        _sort((experts, 1, 1), (ids, order, starts), (pairs,), (experts, block, pdl), 8, pdl=pdl)
        return order, starts
    counts = torch.zeros((NUM_SHARDS, experts), dtype=torch.int32, device=ids.device)
    ranks = torch.empty_like(order)
    grid = (cdiv(pairs, COUNT_CHUNK), 1, 1)
    _count(grid, (ids, counts, ranks), (pairs,), (experts, NUM_SHARDS, COUNT_CHUNK))
    consts = (experts, next_power_of_2(experts), NUM_SHARDS, COUNT_CHUNK, 128)
    grid = (cdiv(pairs, 128), 1, 1)
    _place(grid, (ids, counts, ranks, order, starts), (pairs,), consts)
    return order, starts

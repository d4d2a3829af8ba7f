"""Puts (token, expert) pairs in the order of experts, on the device: no count reaches the host.

    starts [X + 1]    expert i has the sorted positions [starts[i], starts[i + 1])
    order  [P]        sorted position -> pair; pair p is token p // k

One block per expert reads all pairs twice, which for the few thousand of a step costs less than
a second launch. The order within an expert is that of the pairs, so it is always the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.start import kernel

CHUNK = 4096  # pairs a block looks at together: 16 a thread


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
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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


def sort(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(order [P] int32, starts [X + 1] int32) of ids [T, k] int32."""
    pairs = ids.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=ids.device)
    block = min(max(triton.next_power_of_2(pairs), 128), CHUNK)
    pdl = not _sort.interpreted
    _sort((experts, 1, 1), (ids, order, starts), (pairs,), (experts, block, pdl), 8, pdl=pdl)
    return order, starts

"""Logprob ranks on the GPU: one pass over the vocabulary, then a few groups of each row.

scan    top and mass of each group of 64 logits
rank    a program a row: its mass, how many beat the chosen token, the candidates for the best
list    a program a row: each candidate's place is the number of those before it; no sort
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel
from quire.kernels.gpu.sampling.vocab_groups import (
    LOG2E,
    MAX_CANDIDATES,
    WARPS,
    count_above,
    exp_weight,
    gather_candidates,
    kth_bound,
    num_groups,
    reduce_groups,
    supports,
    to_ordered_key,
)
from quire.kernels.logprob_ranks import LogprobStats

MAX_TOP_LOGPROBS = tl.constexpr(1024)
"""Above, a sort of the whole vocabulary is no slower."""


@kernel("k")
def _rank_kernel(
    x_ptr,  # [R, V]
    tops_ptr,  # [R, G]
    masses_ptr,  # [R, G]
    chosen_ptr,  # [R]
    shifts_ptr,  # [R] float64 out
    values_ptr,  # [R] float64 out
    ranks_ptr,  # [R] out
    counts_ptr,  # [R] out
    list_ptr,  # [R, G] scratch
    cand_x_ptr,  # [R, MOST] out
    cand_id_ptr,  # [R, MOST] out
    k,
    STEP: tl.constexpr,  # of x, from row to row
    V: tl.constexpr,
    G: tl.constexpr,
    AS_LOGITS: tl.constexpr,
    BG: tl.constexpr,  # power of two >= G
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_previous_kernel()
        launch_dependents()
    r = tl.program_id(0).to(tl.int64)  # R * V can pass 2**31
    row, lists = x_ptr + r * STEP, list_ptr + r * G
    source = (row, row, 1.0, 0.0, 0.0)
    g = tl.arange(0, BG)
    tops = tl.load(tops_ptr + r * G + g, mask=g < G, other=float("-inf"))
    masses = tl.load(masses_ptr + r * G + g, mask=g < G, other=0.0)
    shift = tl.full((), 0.0, tl.float64)
    if not AS_LOGITS:
        top = tl.max(tops, 0)
        shift = tl.log(tl.sum((masses * exp_weight(tops, top, LOG2E)).to(tl.float64))) + top
    tl.store(shifts_ptr + r, shift)
    value = tl.load(row + tl.load(chosen_ptr + r)).to(tl.float32)
    tl.store(values_ptr + r, value.to(tl.float64) - shift)
    tl.store(ranks_ptr + r, 1 + count_above(source, tops, g, value, lists, V, G, 32))
    if k > 0:
        bound = tl.full((), float("-inf"), tl.float32)
        if k <= G:
            bound = kth_bound(tops, k)
        n = gather_candidates(
            source, tops, g, bound, lists, cand_x_ptr + r * MAX_CANDIDATES, cand_id_ptr + r *
            MAX_CANDIDATES, V, G,
            False, 32,
        )  # fmt: skip
        tl.store(counts_ptr + r, n)


@triton.jit
def _next_best(row, value, last, V: tl.constexpr, B: tl.constexpr):
    """The best token after (value, last) in the order of the list: greatest first, then by id."""
    at_all = tl.arange(0, B)
    best = tl.full((B,), float("-inf"), tl.float32)
    for start in range(0, V, B):
        at = start + at_all
        x = tl.load(row + at, mask=at < V, other=float("-inf")).to(tl.float32)
        after = (x < value) | ((x == value) & (at > last))
        best = tl.where(after, tl.maximum(best, x), best)
    top = tl.max(best, 0)
    place = tl.full((B,), V, tl.int32)
    for start in range(0, V, B):
        at = start + at_all
        x = tl.load(row + at, mask=at < V, other=float("-inf")).to(tl.float32)
        after = (x < value) | ((x == value) & (at > last))
        place = tl.where(after & (x == top) & (at < V), tl.minimum(place, at), place)
    return top, tl.min(place, 0)


@kernel("k")
def _top_k_kernel(
    x_ptr,  # [R, V]
    counts_ptr,  # [R]
    cand_x_ptr,  # [R, MOST]
    cand_id_ptr,  # [R, MOST]
    shifts_ptr,  # [R]
    ids_ptr,  # [R, k] out
    listed_ptr,  # [R, k] float64 out
    k,
    STEP: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,  # candidates compared at once
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_previous_kernel()
        launch_dependents()
    r = tl.program_id(0).to(tl.int64)  # R * V can pass 2**31
    n = tl.load(counts_ptr + r)
    shift = tl.load(shifts_ptr + r)
    values, names = cand_x_ptr + r * MAX_CANDIDATES, cand_id_ptr + r * MAX_CANDIDATES
    out, listed = ids_ptr + r * k, listed_ptr + r * k
    if n <= MAX_CANDIDATES:
        t = tl.arange(0, MAX_TOP_LOGPROBS)
        lacking = (t >= n) & (t < k)  # a row with NaN has too few: any id is correct
        tl.store(out + t, t * 0, mask=lacking)
        tl.store(listed + t, shift + t * float("nan"), mask=lacking)
        a = n * 0
        while a < n:
            i = a + tl.arange(0, N)
            x = tl.load(values + i, mask=i < n, other=float("-inf"))
            mine = to_ordered_key(x)
            place = tl.zeros((N,), tl.int32)
            b = n * 0
            while b < n:
                j = b + tl.arange(0, N)
                other = to_ordered_key(tl.load(values + j, mask=j < n, other=float("-inf")))
                ahead = (other[None, :] > mine[:, None]) | (
                    (other[None, :] == mine[:, None]) & (j[None, :] < i[:, None])
                )
                place += tl.sum((ahead & (j[None, :] < n)).to(tl.int32), 1)
                b += N
            name = tl.load(names + i, mask=i < n, other=0)
            tl.store(out + place, name, mask=(i < n) & (place < k))
            tl.store(listed + place, x.to(tl.float64) - shift, mask=(i < n) & (place < k))
            a += N
    else:  # masked or equal tokens without end: one after another
        value, last = tl.full((), float("inf"), tl.float32), n * 0 - 1
        filled = n * 0
        while filled < k:
            value, last = _next_best(x_ptr + r * STEP, value, last, V, 4096)
            tl.store(out + filled, tl.minimum(last, V - 1))
            tl.store(listed + filled, value.to(tl.float64) - shift)
            filled += 1


def outputs(logits: Tensor, chosen: Tensor, k: int, as_logits: bool = False) -> LogprobStats:
    rows, vocab = logits.shape
    if (
        not supports(logits)
        or k > MAX_TOP_LOGPROBS.value
        or (k > num_groups(vocab) and vocab > MAX_CANDIDATES.value)
    ):
        return NotImplemented
    device = logits.device
    # not two rows of one tensor: of an address that is no multiple of 16 there are other kernels
    shifts = torch.empty(rows, dtype=torch.float64, device=device)
    values = torch.empty_like(shifts)
    ranks = torch.empty(rows, dtype=torch.int32, device=device)
    ids = torch.empty((rows, k), dtype=torch.int32, device=device)
    listed = torch.empty((rows, k), dtype=torch.float64, device=device)
    return LogprobStats(shifts, values, ranks, ids, listed)


def launch(
    outs: LogprobStats, logits: Tensor, chosen: Tensor, k: int, as_logits: bool = False
) -> None:
    rows, vocab = logits.shape
    if not rows:
        return
    device, groups, most = logits.device, num_groups(vocab), MAX_CANDIDATES.value if k else 0
    tops, masses = reduce_groups(logits, None, None)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    lists = torch.empty((rows, groups), dtype=torch.int32, device=device)
    cand_x = torch.empty((rows, most), dtype=torch.float32, device=device)
    cand_id = torch.empty((rows, most), dtype=torch.int32, device=device)
    step, power = logits.stride(0), next_power_of_2(groups)
    found = (outs.shifts, outs.values, outs.ranks, counts)
    _rank_kernel(
        (rows, 1, 1),
        (logits, tops, masses, chosen, *found, lists, cand_x, cand_id),
        (k,),
        (step, vocab, groups, as_logits, power, PDL_ENABLED),
        warps=WARPS,
        pdl=PDL_ENABLED,
    )
    if k:
        _top_k_kernel(
            (rows, 1, 1),
            (logits, counts, cand_x, cand_id, outs.shifts, outs.top_ids, outs.top_values),
            (k,),
            (step, vocab, 64, PDL_ENABLED),
            warps=4,
            pdl=PDL_ENABLED,
        )

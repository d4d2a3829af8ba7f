"""Sampling kernels: choose tokens on the GPU without sorting the vocabulary.

    scan    all rows, all processors: top and mass of each group of 64 logits
    settle  a program a row: greedy and plain rows are done; others find a bound that every kept
            token reaches, and store the tokens that reach it; few of them are cut at once
    cut     a large program a row, for rows with many stored tokens, and for those with too many to
            store, which are searched whole

Each is exact: bounds only drop tokens that cannot be kept. The program of a finished row returns
at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel
from quire.kernels.gpu.sampling.vocab_groups import (
    GROUP,
    MAX_CANDIDATES,
    SLACK,
    WARPS,
    exp_weight,
    from_ordered_key,
    gather_candidates,
    kth_bound,
    kth_key,
    load_logits,
    num_groups,
    philox_uniform,
    reduce_groups,
    row_source,
    supports,
    table_row_of,
    temperature_scale,
    to_float_penalized,
    to_ordered_key,
)
from quire.kernels.sample import SampledTokens

MAX_PAIRWISE = tl.constexpr(64)
"""Candidates that are cut by comparing each with each, which takes no search."""

SAMPLED = tl.constexpr(-1)
"""As a count of candidates: the row has its token."""


@triton.jit
def _load_sampling_params(slots_ptr, table_ptr, r):
    """temperature, top_k, top_p, min_p and seed of row r."""
    line, _slot = table_row_of(slots_ptr, table_ptr, r)
    first = tl.load(line)
    temperature = first.to(tl.int32).to(tl.float32, bitcast=True)
    top_k = (first >> 32).to(tl.int32)
    top_p = tl.load(line + 1).to(tl.float64, bitcast=True)
    min_p = tl.load(line + 2).to(tl.int32).to(tl.float32, bitcast=True)
    return temperature, top_k, top_p, min_p, tl.load(line + 3)


@triton.jit
def _find_crossing(masses, share, N: tl.constexpr):
    """The first place at which the running sum passes share x the whole, and the share within it.

    masses: [N] float64 >= 0. A place without mass is never found, whatever the rounding; without
    any mass it is N - 1.
    """
    place = tl.arange(0, N)
    running = tl.cumsum(masses, 0)
    target = share * tl.sum(masses)
    some = masses > 0
    found = tl.min(tl.where(some & (running > target), place, N), 0)
    last = tl.max(tl.where(some, place, 0), 0)
    found = tl.where(found == N, last, found)
    here = place == found
    size = tl.sum(tl.where(here, masses, 0.0))
    before = tl.sum(tl.where(here, running, 0.0)) - size
    rest = tl.minimum(tl.maximum((target - before) / size, 0.0), 1.0)
    return found, rest


@triton.jit
def _mass_bound(shares, most):
    """A weight below which the whole row holds less than `most`, given the groups' masses.

    What is below it in a group is no more than the group, nor than 64 times the weight. 16 bits of
    it, rounded down.
    """
    lo = tl.full((), 0, tl.int32)
    hi = tl.full((), 0x3F80, tl.int32)  # weight 1
    while lo < hi:
        mid = (lo + hi + 1) >> 1
        cap = (mid << 16).to(tl.float32, bitcast=True)
        fits = tl.sum(tl.minimum(shares, cap * GROUP)) <= most
        lo = tl.where(fits, mid, lo)
        hi = tl.where(fits, hi, mid - 1)
    return (lo << 16).to(tl.float32, bitcast=True)


@triton.jit
def _draw_by_mass(x, ids, masses, share, top_p, V, N: tl.constexpr):
    """Draw by the masses. Returns the id, the least kept logit, the last kept id that has it."""
    least = tl.min(tl.where(masses > 0, x, float("inf")), 0)
    last = V
    if top_p < 1:
        last = tl.max(tl.where((masses > 0) & (x == least), ids, 0), 0)
    place, _ = _find_crossing(masses, share, N)
    found = tl.sum(tl.where(tl.arange(0, N) == place, ids, 0))
    return tl.minimum(found, V - 1), least, last


@triton.jit
def _filter_and_draw_pairwise(
    x_ptr, id_ptr, n, top, scale, total, top_k, top_p, min_p, share, V, N: tl.constexpr
):
    """Cut and draw among the n candidates of a row: ranks are counts of pairs."""
    i, j = tl.arange(0, N), tl.arange(0, N)
    x = tl.load(x_ptr + i, mask=i < n, other=float("-inf"))
    ids = tl.load(id_ptr + i, mask=i < n, other=V - 1)
    other = tl.load(x_ptr + j, mask=j < n, other=float("-inf"))
    above = other[None, :] > x[:, None]
    w = exp_weight(x, top, scale)
    w = tl.where(w >= min_p, w, 0.0)
    if top_k > 0:
        w = tl.where(tl.sum(above.to(tl.int32), 1) < top_k, w, 0.0)
    masses = w.to(tl.float64)
    if top_p < 1:
        by_mass = (top_k <= 0) & (min_p <= 0)
        limit = top_p * tl.where(by_mass, total, tl.sum(masses))
        ahead = above | ((other[None, :] == x[:, None]) & (j[None, :] < i[:, None]))
        before = tl.sum(tl.where(ahead, masses[None, :], 0.0), 1)
        masses = tl.where(before < limit, masses, 0.0)
    return _draw_by_mass(x, ids, masses, share, top_p, V, N)


@triton.jit
def _candidate_bound(tops, shares, top, scale, total, top_k, top_p, min_p, G):
    """A logit that every kept token reaches."""
    bound = tl.full((), float("-inf"), tl.float32)
    if min_p > 0:
        bound = tl.maximum(bound, top + (tl.log2(min_p) - SLACK) / scale)
    if (top_k > 0) & (top_k <= G):
        bound = tl.maximum(bound, kth_bound(tops, top_k))
    if (top_k <= 0) & (min_p <= 0):  # else the mass that top_p divides is not known yet
        least = _mass_bound(shares, (1 - top_p) * total * (1 - 1e-4))
        if least > 0:
            bound = tl.maximum(bound, top + (tl.log2(least) - SLACK) / scale)
    return bound


@kernel()
def _sample_candidates_kernel(
    x_ptr,  # [R, V]
    tops_ptr,  # [R, G]
    masses_ptr,  # [R, G]
    seen_ptr,  # [slots, V], read if PUNISH
    slots_ptr,  # [R]
    outputs_ptr,  # [R]
    table_ptr,  # [slots, WORDS]
    ids_ptr,  # [R] out
    best_ptr,  # [R] out
    least_ptr,  # [R] out
    last_ptr,  # [R] out
    totals_ptr,  # [R] float64 out
    counts_ptr,  # [R] out
    list_ptr,  # [R, G] scratch
    cand_x_ptr,  # [R, MOST] out
    cand_id_ptr,  # [R, MOST] out
    STEP: tl.constexpr,  # of x, from row to row
    V: tl.constexpr,
    G: tl.constexpr,
    SCALED: tl.constexpr,
    PUNISH: tl.constexpr,
    BG: tl.constexpr,  # power of two >= G, at least GROUP
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_previous_kernel()
        launch_dependents()
    r = tl.program_id(0).to(tl.int64)  # R * V can pass 2**31
    source = row_source(x_ptr, seen_ptr, slots_ptr, table_ptr, r, STEP, V, PUNISH)
    temperature, top_k, top_p, min_p, seed = _load_sampling_params(slots_ptr, table_ptr, r)
    scale = temperature_scale(slots_ptr, table_ptr, r, SCALED)
    g = tl.arange(0, BG)
    tops = tl.load(tops_ptr + r * G + g, mask=g < G, other=float("-inf"))
    masses = tl.load(masses_ptr + r * G + g, mask=g < G, other=0.0)
    top = tl.max(tops, 0)
    spoilt = tl.max((masses != masses).to(tl.int32), 0) > 0
    best = tl.where(spoilt & (top != float("inf")), float("nan"), top)
    shares = masses * exp_weight(tops, top, scale)
    # Sums of 64 groups: running sums over all of them would take all registers.
    wide = tl.sum(tl.reshape(shares, (BG // GROUP, GROUP)), 1).to(tl.float64)
    total = tl.sum(wide)
    tl.store(best_ptr + r, best)
    tl.store(least_ptr + r, float("-inf"))
    tl.store(last_ptr + r, V)
    tl.store(totals_ptr + r, total)
    cut = (min_p > 0) | (top_k > 0) | (top_p < 1)
    lane = tl.arange(0, GROUP)
    if (temperature <= 0) | spoilt:
        first = tl.min(tl.where((tops == top) & (g < G), g, G - 1), 0)
        at = first * GROUP + lane
        x = load_logits(source, at, at < V, PUNISH)
        tl.store(ids_ptr + r, tl.min(tl.where((x == top) & (at < V), at, V - 1), 0))
        tl.store(counts_ptr + r, SAMPLED)
    elif not cut:
        share = philox_uniform(seed, tl.load(outputs_ptr + r))
        block, rest = _find_crossing(wide, share, BG // GROUP)
        near = block * GROUP + lane
        near_tops = tl.load(tops_ptr + r * G + near, mask=near < G, other=float("-inf"))
        near_masses = tl.load(masses_ptr + r * G + near, mask=near < G, other=0.0)
        near_masses *= exp_weight(near_tops, top, scale)
        inside, rest = _find_crossing(near_masses.to(tl.float64), rest, GROUP)
        found = block * GROUP + inside
        at = found * GROUP + lane
        x = load_logits(source, at, at < V, PUNISH)
        place, _ = _find_crossing(exp_weight(x, top, scale).to(tl.float64), rest, GROUP)
        tl.store(ids_ptr + r, tl.minimum(found * GROUP + place, V - 1))
        tl.store(counts_ptr + r, SAMPLED)
    else:
        bound = _candidate_bound(tops, shares, top, scale, total, top_k, top_p, min_p, G)
        n = gather_candidates(
            source, tops, g, bound, list_ptr + r * G, cand_x_ptr + r * MAX_CANDIDATES,
            cand_id_ptr + r * MAX_CANDIDATES, V, G, PUNISH, 32,
        )  # fmt: skip
        if n <= MAX_PAIRWISE:
            share = philox_uniform(seed, tl.load(outputs_ptr + r))
            tl.debug_barrier()  # the threads that stored the candidates do not read them
            found, least, last = _filter_and_draw_pairwise(
                cand_x_ptr + r * MAX_CANDIDATES, cand_id_ptr + r * MAX_CANDIDATES, n, top, scale,
                total, top_k, top_p,
                min_p, share, V, MAX_PAIRWISE,
            )  # fmt: skip
            tl.store(ids_ptr + r, found)
            tl.store(least_ptr + r, least)
            tl.store(last_ptr + r, last)
            n = SAMPLED
        else:
            tl.store(least_ptr + r, bound)
        tl.store(counts_ptr + r, n)


@triton.jit
def _mass_key(keys, masses, limit, N: tl.constexpr):
    """The greatest key whose tokens, with all above, weigh `limit`; the least if none do."""
    lo = tl.min(keys, 0).to(tl.int64)
    hi = tl.max(keys, 0).to(tl.int64)
    while lo < hi:
        mid = (lo + hi + 1) >> 1
        enough = tl.sum(tl.where(keys >= mid.to(tl.int32), masses, 0.0)) >= limit
        lo = tl.where(enough, mid, lo)
        hi = tl.where(enough, hi, mid - 1)
    return lo.to(tl.int32)


@triton.jit
def _filter_and_draw(
    x_ptr, id_ptr, n, top, scale, total, top_k, top_p, min_p, share, V, N: tl.constexpr
):
    """Cut and draw among the n candidates of a row. Returns id, least, last."""
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i, mask=i < n, other=float("-inf"))
    ids = tl.load(id_ptr + i, mask=i < n, other=V - 1)
    keys = to_ordered_key(x)
    w = exp_weight(x, top, scale)
    w = tl.where(w >= min_p, w, 0.0)
    if (top_k > 0) & (top_k < n):
        least_key, most_key = tl.min(keys, 0).to(tl.int64), tl.max(keys, 0).to(tl.int64)
        w = tl.where(keys >= kth_key(keys, top_k, least_key, most_key), w, 0.0)
    masses = w.to(tl.float64)
    if top_p < 1:
        by_mass = (top_k <= 0) & (min_p <= 0)
        limit = top_p * tl.where(by_mass, total, tl.sum(masses))
        live = tl.where(w > 0, keys, to_ordered_key(tl.full((N,), float("-inf"), tl.float32)))
        key = _mass_key(live, masses, limit, N)
        above = tl.sum(tl.where(live > key, masses, 0.0))
        tied = live == key
        place = tl.cumsum(tied.to(tl.int32), 0) - 1
        within = above + place.to(tl.float64) * masses < limit
        stays = (live > key) | (tied & ((place == 0) | within))
        masses = tl.where(stays, masses, 0.0)
    return _draw_by_mass(x, ids, masses, share, top_p, V, N)


# --- rows with too many candidates: searches over the row itself ---


@triton.jit
def _load_raw_piece(source, start, V: tl.constexpr, B: tl.constexpr):
    """[B, 8] logits from `start` on, in order, unchanged."""
    at = start + tl.arange(0, B)[:, None] * 8 + tl.arange(0, 8)[None, :]
    return tl.load(source[0] + at, mask=at < V, other=float("-inf"))


@triton.jit
def _penalize_piece(source, x, start, V: tl.constexpr, PUNISH: tl.constexpr, B: tl.constexpr):
    """A piece as float32, after penalties; and the ids."""
    at = start + tl.arange(0, B)[:, None] * 8 + tl.arange(0, 8)[None, :]
    return to_float_penalized(source, x, at, at < V, PUNISH), at


@triton.jit
def _search_weight(x, top, scale, floor, min_p, BY_COUNT: tl.constexpr):
    """The weight of a token in a search: 1, or its mass. Nothing below the floor."""
    if BY_COUNT:
        w = (x > float("-inf")).to(tl.float32)
    else:
        w = exp_weight(x, top, scale)
        w = tl.where((x >= floor) & (w >= min_p), w, 0.0)
    return w


@triton.jit
def _narrow_threshold(t, parts, limit, lo, hi, f_lo, f_hi):
    """Add a threshold's sum to the search."""
    f = tl.sum(parts.to(tl.float64))
    reaches = f >= limit
    up, down = reaches & (t > lo), (f < limit) & (t > lo) & (t < hi)
    return (
        tl.where(up, t, lo),
        tl.where(down, t, hi),
        tl.where(up, f, f_lo),
        tl.where(down, f, f_hi),
    )


@triton.jit
def _search_threshold(
    source, top, scale, floor, min_p, limit, total, V: tl.constexpr,
    BY_COUNT: tl.constexpr, SHIFT: tl.constexpr, PUNISH: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The greatest logit whose tokens, with all above, weigh `limit`, and the mass of those above.

    The floor is known to reach it, or is the answer. Seven thresholds a pass, which costs what
    reading the row costs: three at quarters of what is left, so that it ends; four about where a
    straight line between the ends meets the limit, which is near. total: the mass of the floor's,
    about. SHIFT: bits of a key that the logits' dtype leaves zero.
    """
    lo = (to_ordered_key(floor) >> SHIFT).to(tl.int64)
    hi = (to_ordered_key(top) >> SHIFT).to(tl.int64) + 1
    f_lo, f_hi = tl.maximum(total, limit), limit * 0
    while hi - lo > 1:
        d = hi - lo
        share = (f_lo - limit) / tl.maximum(f_lo - f_hi, 1e-30)
        near = lo + (share * d).to(tl.int64)
        step = (d >> 6) + 1
        t1, t2, t3 = lo + (d >> 2), lo + (d >> 1), lo + (d * 3 >> 2)
        t4, t5, t6, t7 = near - step, near, near + 1, near + 1 + step
        t4 = tl.minimum(tl.maximum(t4, lo), hi)
        t5 = tl.minimum(tl.maximum(t5, lo), hi)
        t6 = tl.minimum(tl.maximum(t6, lo), hi)
        t7 = tl.minimum(tl.maximum(t7, lo), hi)
        k1, k2, k3, k4 = t1.to(tl.int32), t2.to(tl.int32), t3.to(tl.int32), t4.to(tl.int32)
        k5, k6, k7 = t5.to(tl.int32), t6.to(tl.int32), t7.to(tl.int32)
        a1 = tl.zeros((B,), tl.float32)
        a2, a3, a4, a5, a6, a7 = a1, a1, a1, a1, a1, a1
        coming = _load_raw_piece(source, 0, V, B)
        for start in range(0, V, B * 8):
            x, _at = _penalize_piece(source, coming, start, V, PUNISH, B)
            coming = _load_raw_piece(
                source, start + B * 8, V, B
            )  # on its way while this one is added up
            key = to_ordered_key(x) >> SHIFT
            w = _search_weight(x, top, scale, floor, min_p, BY_COUNT)
            a1 += tl.sum(tl.where(key >= k1, w, 0.0), 1)
            a2 += tl.sum(tl.where(key >= k2, w, 0.0), 1)
            a3 += tl.sum(tl.where(key >= k3, w, 0.0), 1)
            a4 += tl.sum(tl.where(key >= k4, w, 0.0), 1)
            a5 += tl.sum(tl.where(key >= k5, w, 0.0), 1)
            a6 += tl.sum(tl.where(key >= k6, w, 0.0), 1)
            a7 += tl.sum(tl.where(key >= k7, w, 0.0), 1)
        lo, hi, f_lo, f_hi = _narrow_threshold(t1, a1, limit, lo, hi, f_lo, f_hi)
        lo, hi, f_lo, f_hi = _narrow_threshold(t2, a2, limit, lo, hi, f_lo, f_hi)
        lo, hi, f_lo, f_hi = _narrow_threshold(t3, a3, limit, lo, hi, f_lo, f_hi)
        lo, hi, f_lo, f_hi = _narrow_threshold(t4, a4, limit, lo, hi, f_lo, f_hi)
        lo, hi, f_lo, f_hi = _narrow_threshold(t5, a5, limit, lo, hi, f_lo, f_hi)
        lo, hi, f_lo, f_hi = _narrow_threshold(t6, a6, limit, lo, hi, f_lo, f_hi)
        lo, hi, f_lo, f_hi = _narrow_threshold(t7, a7, limit, lo, hi, f_lo, f_hi)
    key = lo.to(tl.int32) << SHIFT
    key = tl.where(key < 0, key | ((1 << SHIFT) - 1), key)  # keys invert negatives
    return from_ordered_key(key), f_hi


@triton.jit
def _remaining_mass(
    source, top, scale, floor, min_p, V: tl.constexpr, PUNISH: tl.constexpr, B: tl.constexpr
):
    """Mass and least logit of what reaches the floor and min_p."""
    mass = tl.zeros((B,), tl.float32)
    least = tl.full((B,), float("inf"), tl.float32)
    coming = _load_raw_piece(source, 0, V, B)
    for start in range(0, V, B * 8):
        x, _at = _penalize_piece(source, coming, start, V, PUNISH, B)
        coming = _load_raw_piece(source, start + B * 8, V, B)
        w = _search_weight(x, top, scale, floor, min_p, False)
        mass += tl.sum(w, 1)
        least = tl.minimum(least, tl.min(tl.where(w > 0, x, float("inf")), 1))
    return tl.sum(mass.to(tl.float64)), tl.min(least, 0)


@triton.jit
def _nth_equal(source, value, n, V: tl.constexpr, PUNISH: tl.constexpr, B: tl.constexpr):
    """The id of the n-th token (from 1) that has this logit; the last id if there are fewer."""
    seen, found = n * 0, n * 0 + V
    coming = _load_raw_piece(source, 0, V, B)
    for start in range(0, V, B * 8):
        x, _at = _penalize_piece(source, coming, start, V, PUNISH, B)
        same = (x == value).to(tl.int32)
        coming = _load_raw_piece(source, start + B * 8, V, B)
        count = tl.sum(tl.sum(same, 1))
        if (seen < n) & (seen + count >= n):
            flat = tl.reshape(same, (B * 8,))
            place = tl.arange(0, B * 8)
            inside = (flat > 0) & (tl.cumsum(flat, 0) <= n - seen)
            found = start + tl.max(tl.where(inside, place, 0), 0)
        seen += count
    return found


@triton.jit
def _draw(
    source, top, scale, least, last, share, total, V: tl.constexpr,
    PUNISH: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Walk through the kept tokens in id order to the share of their mass."""
    target, before = share * total, total * 0
    found, done = last * 0, last * 0
    coming = _load_raw_piece(source, 0, V, B)
    for start in range(0, V, B * 8):
        if done == 0:
            x, at = _penalize_piece(source, coming, start, V, PUNISH, B)
            coming = _load_raw_piece(source, start + B * 8, V, B)
            kept = (x > least) | ((x == least) & (at <= last))
            w = tl.where(kept, exp_weight(x, top, scale), 0.0)
            size = tl.sum(tl.sum(w, 1).to(tl.float64))
            crosses = before + size > target
            if (size > 0) & (crosses | (start + B * 8 >= V)):
                flat = tl.reshape(w, (B * 8,)).to(tl.float64)
                rest = tl.minimum(tl.maximum((target - before) / size, 0.0), 1.0)
                place, _rest = _find_crossing(flat, rest, B * 8)
                found = start + place
            done = crosses.to(tl.int32)
            before += size
    return found


@kernel()
def _sample_full_row_kernel(
    x_ptr,  # [R, V]
    seen_ptr,
    slots_ptr,
    outputs_ptr,
    table_ptr,
    ids_ptr,
    best_ptr,
    least_ptr,  # [R] in: a bound that all kept tokens reach; out
    last_ptr,
    totals_ptr,
    counts_ptr,
    cand_x_ptr,
    cand_id_ptr,
    STEP: tl.constexpr,
    V: tl.constexpr,
    SCALED: tl.constexpr,
    PUNISH: tl.constexpr,
    SHIFT: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_previous_kernel()
        launch_dependents()
    r = tl.program_id(0).to(tl.int64)  # R * V can pass 2**31
    n = tl.load(counts_ptr + r)
    if n > MAX_PAIRWISE:
        source = row_source(x_ptr, seen_ptr, slots_ptr, table_ptr, r, STEP, V, PUNISH)
        _, top_k, top_p, min_p, seed = _load_sampling_params(slots_ptr, table_ptr, r)
        scale = temperature_scale(slots_ptr, table_ptr, r, SCALED)
        top, total, floor = tl.load(best_ptr + r), tl.load(totals_ptr + r), tl.load(least_ptr + r)
        share = philox_uniform(seed, tl.load(outputs_ptr + r))
        xs, names = cand_x_ptr + r * MAX_CANDIDATES, cand_id_ptr + r * MAX_CANDIDATES
        if n <= MAX_PAIRWISE * 8:
            found, least, last = _filter_and_draw(
                xs, names, n, top, scale, total, top_k, top_p, min_p, share, V, MAX_PAIRWISE * 8
            )
        elif n <= MAX_CANDIDATES:
            found, least, last = _filter_and_draw(
                xs, names, n, top, scale, total, top_k, top_p, min_p, share, V, MAX_CANDIDATES
            )
        else:
            if top_k > 0:
                kth, _above = _search_threshold(
                    source,
                    top,
                    scale,
                    floor,
                    min_p,
                    top_k.to(tl.float64),
                    V,
                    V,
                    True,
                    SHIFT,
                    PUNISH,
                    B,
                )
                floor = tl.maximum(floor, kth)
            if (top_k > 0) | (min_p > 0):
                total, floor = _remaining_mass(source, top, scale, floor, min_p, V, PUNISH, B)
            least, last = floor, V
            if top_p < 1:
                limit = top_p * total
                least, above = _search_threshold(
                    source,
                    top,
                    scale,
                    floor,
                    0.0,
                    limit,
                    total,
                    V,
                    False,
                    SHIFT,
                    PUNISH,
                    B,
                )
                each = exp_weight(least, top, scale).to(tl.float64)
                ties = tl.maximum(tl.ceil((limit - above) / each), 1.0)
                last = _nth_equal(source, least, ties.to(tl.int32), V, PUNISH, B)
                total = above + ties * each
            found = _draw(source, top, scale, least, last, share, total, V, PUNISH, B)
        tl.store(ids_ptr + r, tl.minimum(found, V - 1))
        tl.store(least_ptr + r, least)
        tl.store(last_ptr + r, last)


_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits that are zero in float32 of each dtype."""


def outputs(logits: Tensor, *_: Any, **__: Any) -> SampledTokens:
    if not supports(logits):
        return NotImplemented
    ids = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    tops = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    # not two rows of one tensor: of an address that is no multiple of 16 there are other kernels
    return SampledTokens(ids, tops, torch.empty_like(tops), torch.empty_like(ids))


def launch(
    outs: SampledTokens,
    logits: Tensor,
    slots: Tensor,
    outputs: Tensor,
    table: Tensor,
    scaled: bool = False,
    counts: Tensor | None = None,
) -> None:
    rows, vocab = logits.shape
    if not rows:
        return
    device, groups, grid = logits.device, num_groups(vocab), (rows, 1, 1)
    tops, masses = reduce_groups(
        logits, None if scaled else slots, None if scaled else table, counts
    )
    punish, shift = counts is not None, 0 if counts is not None else _SHIFTS[logits.dtype]
    totals = torch.empty(rows, dtype=torch.float64, device=device)
    numbers = torch.empty(rows, dtype=torch.int32, device=device)
    lists = torch.empty((rows, groups), dtype=torch.int32, device=device)
    cand_x = torch.empty((rows, MAX_CANDIDATES.value), dtype=torch.float32, device=device)
    cand_id = torch.empty((rows, MAX_CANDIDATES.value), dtype=torch.int32, device=device)
    power = max(GROUP.value, next_power_of_2(groups))
    inputs, chosen = (counts, slots, outputs, table), (*outs, totals, numbers)
    step = logits.stride(0)
    _sample_candidates_kernel(
        grid,
        (logits, tops, masses, *inputs, *chosen, lists, cand_x, cand_id),
        (),
        (step, vocab, groups, scaled, punish, power, PDL_ENABLED),
        warps=WARPS,
        pdl=PDL_ENABLED,
    )
    _sample_full_row_kernel(
        grid,
        (logits, *inputs, *chosen, cand_x, cand_id),
        (),
        (step, vocab, scaled, punish, shift, 1024, PDL_ENABLED),
        warps=16,
        pdl=PDL_ENABLED,
    )

"""Vocabulary groups: rows of logits by groups of 64, shared by the sampling kernels.

One pass over the vocabulary leaves two numbers a group, its greatest logit and its mass. From
them follow the groups that can hold a relevant token, so all later passes read a few groups.

Masses are sums of integers, so they are the same whatever the dtype, the batch and the grid.

Axes: R rows, V vocab, G groups of a row, n candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel

GROUP = tl.constexpr(64)
WARPS = 8

MAX_CANDIDATES = tl.constexpr(4096)
"""Candidates of a row up to which the short search is used."""

LOG2E = tl.constexpr(1.4426950408889634)
SLACK = tl.constexpr(1e-3)
"""How far, in logits, a bound stays below what rounding could move."""

LOWEST_KEY = tl.constexpr(-32641)  # upper half of the key of -inf: with zeros below it is a NaN

ROW_WORDS = tl.constexpr(
    6
)  # int64 words of a slot's line: quire.kernels.formats.sampling_table_layout


def num_groups(vocab: int) -> int:
    """G."""
    return cdiv(vocab, GROUP.value)


def supports(logits: Tensor) -> bool:
    """Whether these kernels read such logits."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return logits.dim() == 2 and logits.stride(1) == 1 and logits.dtype in kinds


@triton.jit
def to_ordered_key(x):
    """int32 in the order of float32; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_ordered_key(key):
    """The float32 of which this is the key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def exp_weight(x, top, scale):
    """e**((x - top) / temperature); 0 where x is -inf. scale: log2(e) / temperature."""
    return tl.where(x == float("-inf"), 0.0, tl.exp2((x - top) * scale))


@triton.jit
def _nan_max_combine(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nan_max(x, axis: tl.constexpr):
    """Maximum; NaN if there is one."""
    return tl.reduce(x, axis, _nan_max_combine)


@triton.jit
def table_row_of(slots_ptr, table_ptr, r):
    """Where row r's line is, and its slot; a padding row reads the first one's."""
    slot = tl.maximum(tl.load(slots_ptr + r), 0).to(tl.int64)
    return table_ptr + slot * ROW_WORDS, slot


@triton.jit
def load_penalties(line):
    """Repetition, frequency and presence."""
    first = tl.load(line + 4)
    repetition = first.to(tl.int32).to(tl.float32, bitcast=True)
    frequency = (first >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    presence = tl.load(line + 5).to(tl.int32).to(tl.float32, bitcast=True)
    return repetition, frequency, presence


@triton.jit
def penalize(x, count, repetition, frequency, presence):
    """Logits after penalties: quire.kernels.penalties."""
    times = (count & 0x7FFF).to(tl.float32)
    y = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    y = y - frequency * times - tl.where(times > 0, presence, 0.0)
    return tl.where(count != 0, y, x)


@triton.jit
def row_source(
    x_ptr,
    counts_ptr,
    slots_ptr,
    table_ptr,
    r,
    STEP: tl.constexpr,
    V: tl.constexpr,
    PUNISH: tl.constexpr,
):
    """The pointers with which `read` loads row r. r: int64, for R * V can pass 2**31."""
    row = x_ptr + r * STEP
    source = (row, row, 1.0, 0.0, 0.0)
    if PUNISH:
        line, slot = table_row_of(slots_ptr, table_ptr, r)
        repetition, frequency, presence = load_penalties(line)
        source = (row, counts_ptr + slot * V, repetition, frequency, presence)
    return source


@triton.jit
def to_float_penalized(source, x, at, live, PUNISH: tl.constexpr):
    """Loaded logits as float32, after penalties."""
    x = x.to(tl.float32)
    if PUNISH:
        count = tl.load(source[1] + at, mask=live, other=0)
        x = penalize(x, count.to(tl.int32), source[2], source[3], source[4])
    return x


@triton.jit
def load_logits(source, at, live, PUNISH: tl.constexpr):
    """Logits of a row, -inf where not live. float32, after penalties."""
    x = tl.load(source[0] + at, mask=live, other=float("-inf"))
    return to_float_penalized(source, x, at, live, PUNISH)


@triton.jit
def philox_uniform(seed, count):
    """A float64 in [0, 1) of 53 random bits: quire.kernels.sample.uniforms."""
    zero = count * 0
    a, b, _, _ = tl.philox(seed, count, zero, zero, zero)
    return ((a >> 5).to(tl.int64) * (1 << 26) + (b >> 6).to(tl.int64)).to(tl.float64) * 2.0**-53


@triton.jit
def temperature_scale(slots_ptr, table_ptr, r, SCALED: tl.constexpr):
    """log2(e) / temperature of row r; log2(e) if it is greedy."""
    scale = LOG2E
    if not SCALED:
        line, _slot = table_row_of(slots_ptr, table_ptr, r)
        t = tl.load(line).to(tl.int32).to(tl.float32, bitcast=True)
        scale = LOG2E / tl.where(t > 0, t, 1.0)
    return scale


@kernel()
def _reduce_groups_kernel(
    x_ptr,  # [R, V]
    counts_ptr,  # [slots, V], read if PUNISH
    slots_ptr,  # [R], read unless SCALED
    table_ptr,  # [slots, WORDS] int64, read unless SCALED
    tops_ptr,  # [R, G] out
    masses_ptr,  # [R, G] out, relative to the group's top
    STEP: tl.constexpr,  # of x, from row to row
    V: tl.constexpr,
    G: tl.constexpr,
    SCALED: tl.constexpr,
    PUNISH: tl.constexpr,
    TILE: tl.constexpr,  # groups of a program
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_previous_kernel()
        launch_dependents()
    parts = tl.cdiv(G, TILE)
    pid = tl.program_id(0)
    r = (pid // parts).to(tl.int64)  # R * V can pass 2**31
    g = (pid % parts) * TILE + tl.arange(0, TILE)
    at = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    source = row_source(x_ptr, counts_ptr, slots_ptr, table_ptr, r, STEP, V, PUNISH)
    x = load_logits(source, at, at < V, PUNISH)
    scale = temperature_scale(slots_ptr, table_ptr, r, SCALED)
    top = nan_max(x, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    # Weights as 23 bits after the point: adding 2**23 leaves just those in the mantissa. Sums of
    # integers are the same in any order.
    weights = tl.exp2((x - base[:, None]) * scale + 23.0) + 8388608.0
    units = tl.sum(weights.to(tl.int32, bitcast=True) - 0x4B000000, 1)
    mass = units.to(tl.float32) * (1.0 / 8388608.0)
    mass = tl.where(top < float("inf"), mass, float("nan"))  # NaN too is not below
    live = g < G
    tl.store(tops_ptr + r * G + g, top, mask=live)
    tl.store(masses_ptr + r * G + g, mass, mask=live)


def reduce_groups(
    logits: Tensor,
    slots: Tensor | None,
    table: Tensor | None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Top and mass of each group: [R, G] float32 each. No table: as at temperature 1."""
    rows, vocab = logits.shape
    groups = num_groups(vocab)
    tops, masses = torch.empty((2, rows, groups), dtype=torch.float32, device=logits.device)
    tile = 128 if rows >= 8 else 16  # few rows: more programs than processors
    scaled = table is None
    _reduce_groups_kernel(
        (rows * cdiv(groups, tile), 1, 1),
        (logits, counts, None if scaled else slots, None if scaled else table, tops, masses),
        (),
        (logits.stride(0), vocab, groups, scaled, counts is not None, tile, PDL_ENABLED),
        warps=WARPS,
        pdl=PDL_ENABLED,
    )
    return tops, masses


@triton.jit
def kth_key(keys, k, lo, hi):
    """The greatest of lo to hi (int64) that k of the int32 keys reach; lo if none is.

    Three thresholds a step: their counts, below 2**16 each, are one number, so one sum.
    """
    while lo < hi:
        d = hi - lo + 1
        t1, t2, t3 = lo + ((d + 3) >> 2), lo + ((d + 1) >> 1), lo + ((d * 3 + 3) >> 2)
        one = (keys >= t1.to(tl.int32)).to(tl.int64)
        two = (keys >= t2.to(tl.int32)).to(tl.int64)
        three = ((keys >= t3.to(tl.int32)) & (t3 <= hi)).to(tl.int64)
        packed = tl.sum(one + (two << 16) + (three << 32))
        n1, n2, n3 = packed & 0xFFFF, (packed >> 16) & 0xFFFF, packed >> 32
        base = lo
        lo = tl.where(n1 >= k, t1, lo)
        lo = tl.where(n2 >= k, t2, lo)
        lo = tl.where(n3 >= k, t3, lo)
        hi = tl.where(n3 >= k, hi, t3 - 1)
        hi = tl.where(n2 >= k, hi, t2 - 1)
        hi = tl.where(n1 >= k, hi, t1 - 1)
        hi = tl.maximum(hi, base)
    return lo.to(tl.int32)


@triton.jit
def kth_bound(tops, k):
    """A value that at least k groups reach, and so k tokens; the k-th greatest but for 16 bits."""
    keys = to_ordered_key(tops) >> 16
    lo, hi = tl.full((), -(2**15), tl.int64), tl.full((), 2**15 - 1, tl.int64)
    key = kth_key(keys, k, lo, hi)
    return tl.where(key <= LOWEST_KEY, float("-inf"), from_ordered_key(key << 16))


@triton.jit
def _list_groups(chosen, groups, list_ptr):
    """Store the chosen groups, in order, for all threads to read. Returns how many there are."""
    places = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.debug_barrier()  # the readers of the earlier candidates are done
    tl.store(list_ptr + places, groups, mask=chosen)
    tl.debug_barrier()  # the threads that wrote it do not read it
    return tl.sum(chosen.to(tl.int32))


@triton.jit
def _load_group_batch(
    source, list_ptr, start, n_groups, V, G, PUNISH: tl.constexpr, BATCH: tl.constexpr
):
    """The logits of BATCH stored groups, their ids, and which are real. [BATCH * GROUP] each."""
    lane = tl.arange(0, BATCH * GROUP)
    i = start + lane // GROUP
    g = tl.load(list_ptr + i, mask=i < n_groups, other=G)
    at = g * GROUP + lane % GROUP
    live = (i < n_groups) & (at < V)
    return load_logits(source, at, live, PUNISH), at, live


@triton.jit
def gather_candidates(
    source, tops, groups, bound, list_ptr, x_out, id_out, V, G,
    PUNISH: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """Store the tokens that reach the bound, in id order. Returns how many there are.

    tops, groups: [BG]. list_ptr: scratch [G]. x_out, id_out: [MOST]; more than MOST are counted
    only as far as the batch that passes it.
    """
    n_groups = _list_groups((tops >= bound) & (groups < G), groups, list_ptr)
    found, start = n_groups * 0, n_groups * 0
    while (start < n_groups) & (found <= MAX_CANDIDATES):
        x, at, live = _load_group_batch(source, list_ptr, start, n_groups, V, G, PUNISH, BATCH)
        live = live & (x >= bound)
        to = found + tl.cumsum(live.to(tl.int32), 0) - 1
        tl.store(x_out + to, x, mask=live & (to < MAX_CANDIDATES))
        tl.store(id_out + to, at, mask=live & (to < MAX_CANDIDATES))
        found += tl.sum(live.to(tl.int32))
        start += BATCH
    return found


@triton.jit
def count_above(source, tops, groups, value, list_ptr, V, G, BATCH: tl.constexpr):
    """How many tokens are strictly greater than the value."""
    n_groups = _list_groups((tops > value) & (groups < G), groups, list_ptr)
    found, start = n_groups * 0, n_groups * 0
    while start < n_groups:
        x, _, live = _load_group_batch(source, list_ptr, start, n_groups, V, G, False, BATCH)
        found += tl.sum((live & (x > value)).to(tl.int32))
        start += BATCH
    return found

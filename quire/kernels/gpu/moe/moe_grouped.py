"""Experts of two to eight bits on the GPU: as the products of grouped_gemm.py of gpu/linear.

    few pairs    gate_up and gate, down, weighted sum           a tile is one pair: no sort. In
                 half precision by grouped_small_m.py of gpu/linear
    more         sort, gate_up and gate, down, weighted sum     a tile is some rows of one expert

A pair is a token and one of its experts. Only weights of chosen experts are read. W is the left
operand, so one row of an expert takes a product 8 wide and not 64.
Axes: P pairs, T tokens, E hidden size, F width of one expert, X experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.tiled_weight import TILE, TiledExperts
from quire.kernels.gpu.linear import grouped_linear
from quire.kernels.gpu.linear.grouped_decode import load_table, load_words
from quire.kernels.gpu.linear.grouped_gemm import (
    load_groups,
    multiply_block,
    weight_constants,
    weight_tensors,
)
from quire.kernels.gpu.linear.grouped_linear import gather_columns
from quire.kernels.gpu.moe.grouped_gemm import GroupedGemmTile, find_tile, max_row_tiles
from quire.kernels.gpu.moe.moe_gate import apply_gate
from quire.kernels.gpu.moe.moe_sort import sort_by_expert
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel
from quire.kernels.moe_experts import ExpertActivation

MAX_UNSORTED = 64
"""Pairs up to which each is a tile: then hardly any two share an expert."""


class Gating(NamedTuple):
    """The activation of a kernel: kind None for the second product."""

    kind: str | None
    alpha: float
    limit: float


@triton.jit
def _multiply(x_at, o, low_ptr, high_ptr, scale_ptr, scale_code_ptr, offset_ptr, offset_code_ptr,
              zero_ptr, table_ptr, I: tl.constexpr, BLOCKS: tl.constexpr, LOW: tl.constexpr,
              HIGH: tl.constexpr, NS: tl.constexpr, SK: tl.constexpr, GROUP: tl.constexpr,
              G: tl.constexpr, ZERO: tl.constexpr, S_FORM: tl.constexpr,
              O_FORM: tl.constexpr, OWN_TABLE: tl.constexpr,
              second, PAIR: tl.constexpr, BN: tl.constexpr, TP: tl.constexpr,
              STAGES: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Rows o of the bank times x, and rows second too if PAIR: each [BN, TP].

    x_at: pointers [SK, TP] to the first slice of each row.
    """
    dtype: tl.constexpr = x_at.dtype.element_ty
    OFFSET: tl.constexpr = offset_ptr is not None
    SCALED: tl.constexpr = GROUP > 0 or OFFSET
    PER: tl.constexpr = GROUP // SK if GROUP > 0 else NS
    COUNT: tl.constexpr = NS // PER
    AHEAD: tl.constexpr = COUNT <= 4  # the next block's load early; more would not fit registers
    EXACT: tl.constexpr = I == BLOCKS * NS * SK
    TABLE: tl.constexpr = table_ptr is not None
    acc = tl.zeros((BN, TP), tl.float32)
    other = tl.zeros((BN, TP), tl.float32)
    table, other_table = (), ()
    if TABLE:
        table = load_table(table_ptr, o, OWN_TABLE)
        other_table = load_table(table_ptr, second, OWN_TABLE)
    groups = load_groups(scale_ptr, scale_code_ptr, offset_ptr, offset_code_ptr, zero_ptr, o, 0,
                         G, COUNT, ZERO, LOW + HIGH, S_FORM, O_FORM,
                         dtype)  # fmt: skip
    others = groups
    if PAIR:
        others = load_groups(scale_ptr, scale_code_ptr, offset_ptr, offset_code_ptr, zero_ptr,
                             second, 0, G, COUNT, ZERO, LOW + HIGH, S_FORM, O_FORM,
                             dtype)  # fmt: skip
    for m in tl.range(0, BLOCKS, num_stages=STAGES):
        at = m * (NS * SK)
        low = load_words(low_ptr, o, m, BLOCKS, NS * LOW // 16, SK, "")
        high = ()
        if HIGH:
            high = load_words(high_ptr, o, m, BLOCKS, NS * HIGH // 16, SK, "")
        if PAIR:
            low_2 = load_words(low_ptr, second, m, BLOCKS, NS * LOW // 16, SK, "")
            high_2 = ()
            if HIGH:
                high_2 = load_words(high_ptr, second, m, BLOCKS, NS * HIGH // 16, SK, "")
        following, following_2 = groups, others
        if GROUP > 0:
            g = (m + 1) * COUNT if AHEAD else m * COUNT
            following = load_groups(scale_ptr, scale_code_ptr, offset_ptr, offset_code_ptr,
                                    zero_ptr, o, g, G, COUNT, ZERO, LOW + HIGH, S_FORM, O_FORM,
                                    dtype)  # fmt: skip
            if PAIR:
                following_2 = load_groups(scale_ptr, scale_code_ptr, offset_ptr, offset_code_ptr,
                                          zero_ptr, second, g, G, COUNT, ZERO, LOW + HIGH, S_FORM,
                                          O_FORM, dtype)  # fmt: skip
        if not AHEAD:
            groups, others = following, following_2
        acc = multiply_block(acc, x_at + at, at, low, high, groups, table, I, LOW, HIGH, NS, SK,
                             PER, SCALED, OFFSET, TABLE, EXACT, ZERO is None, ASM)  # fmt: skip
        if PAIR:
            other = multiply_block(other, x_at + at, at, low_2, high_2, others, other_table, I,
                                   LOW, HIGH, NS, SK, PER, SCALED, OFFSET, TABLE, EXACT,
                                   ZERO is None, ASM)  # fmt: skip
        groups, others = following, following_2
    if not SCALED:
        acc *= groups[0][:, None]
        other *= others[0][:, None]
    return acc, other


@kernel()
def _experts(
    x_ptr,  # [T, E], or h [P, F]
    order_ptr,  # [P], or None: not sorted
    start_ptr,  # [X + 1], or ids [P] if not sorted
    low_ptr,  # planes: see TiledWeight
    high_ptr,
    scale_ptr,
    scale_code_ptr,
    offset_ptr,
    offset_code_ptr,
    zero_ptr,
    table_ptr,
    bias_ptr,  # [X, 2F] or [X, E], or None
    y_ptr,  # h [P, F] out, sorted if any is, or y [P, E] out, by pair
    X_T: tl.constexpr,
    O: tl.constexpr,  # F or E: outputs of a pair
    X: tl.constexpr,
    X_PAD: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,  # rows of an expert's matrix, padding included
    KIND: tl.constexpr,  # None, or the activation of the two halves
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
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
    TP: tl.constexpr,
    BN: tl.constexpr,
    TURNS: tl.constexpr,  # row tiles that take turns over one tile of outputs
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    PAIR: tl.constexpr = KIND is not None
    BANDS: tl.constexpr = (O + BN - 1) // BN
    if order_ptr is None:
        band, first = tl.program_id(0) % BANDS, tl.program_id(0) // BANDS
        expert, end = tl.load(start_ptr + first), first + 1
    else:
        expert, first, end, band = find_tile(start_ptr, BANDS, X, X_PAD, TP, TURNS)
    if expert < 0:
        return
    rows = first + tl.arange(0, TP)
    live = rows < end
    known = tl.minimum(rows, end - 1)
    if order_ptr is None:
        pair = known
    else:
        pair = tl.load(order_ptr + known)
    source = pair // TOP if PAIR else known
    n = band * BN + tl.arange(0, BN)
    row = tl.minimum(n, O - 1)
    o = expert * ROWS + row
    x_at = x_ptr + source.to(tl.int64)[None, :] * X_T + tl.arange(0, SK)[:, None]
    acc, up = _multiply(x_at, o, low_ptr, high_ptr, scale_ptr, scale_code_ptr, offset_ptr,
                        offset_code_ptr, zero_ptr, table_ptr, I, BLOCKS, LOW, HIGH, NS, SK, GROUP,
                        G, ZERO, S_FORM, O_FORM, OWN_TABLE, o + O, PAIR, BN, TP,
                        STAGES, ASM)  # fmt: skip
    if bias_ptr is not None:
        b_at = bias_ptr + expert * (2 * O if PAIR else O) + row
        acc += tl.load(b_at).to(tl.float32)[:, None]
        if PAIR:
            up += tl.load(b_at + O).to(tl.float32)[:, None]
    target = pair
    if PAIR:
        acc = apply_gate(acc, up, KIND, ALPHA, LIMIT)
        target = known
    y_at = y_ptr + target.to(tl.int64)[None, :] * O + n[:, None]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), (n < O)[:, None] & live[None, :])


def supports(x: Tensor, gate_up: TiledExperts, down: object) -> bool:
    """Whether these kernels support the op: both banks tiled, for rows of this dtype."""
    if not isinstance(down, TiledExperts) or x.stride(1) != 1:
        return False
    banks = (gate_up.bank, down.bank)
    if x.dtype == torch.float32:  # tables are held in half precision
        return all(bank.table is None for bank in banks)
    return all(bank.dtype == x.dtype for bank in banks)


def expert_outputs(
    x: Tensor,
    ids: Tensor,
    gate_up: TiledExperts,
    down: TiledExperts,
    gate: ExpertActivation,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    """The output of each pair's expert, unweighted: [P, E]."""
    pairs, experts = ids.numel(), len(down)
    order, starts, tall = None, ids, 8
    if pairs > MAX_UNSORTED:
        order, starts = sort_by_expert(ids, experts)
        most = 64 if max(gate_up.bank.slices, down.bank.slices) < 16 else 32
        tall = max(8, min(most, next_power_of_2(cdiv(pairs, experts))))
    h = x.new_empty((pairs, down.shape[2]))
    y = x.new_empty((pairs, down.shape[1]))
    small = grouped_linear.gluon_modules(x)[0] if order is None else None
    if small is not None and _suits_small_m(x, gate_up, down, gate):
        small.launch_experts(h, x, ids, gate_up, gate_up_bias, gate.kind)
        small.launch_experts(y, h, ids, down, down_bias, None)
        return y
    gating = Gating(gate.kind, gate.alpha, gate.limit)
    _launch(h, x, order, starts, gate_up, gate_up_bias, gating, ids.shape[1], tall)
    _launch(y, h, order, starts, down, down_bias, Gating(None, 0.0, 0.0), ids.shape[1], tall)
    return y


def _suits_small_m(
    x: Tensor, gate_up: TiledExperts, down: TiledExperts, gate: ExpertActivation
) -> bool:
    """Whether grouped_small_m.py has this activation, and columns as they are."""
    plain = gate_up.bank.perm is None and down.bank.perm is None
    return plain and gate.kind != "clamped" and x.dtype != torch.float32


def multiply_sorted(
    y: Tensor, x: Tensor, order: Tensor, starts: Tensor, bank: TiledExperts, bias: Tensor | None
) -> None:
    """y[pair] = x [P, I], sorted by expert, @ bank[its expert].T + bias."""
    tall = max(8, min(32, next_power_of_2(cdiv(len(x), len(bank)))))
    _launch(y, x, order, starts, bank, bias, Gating(None, 0.0, 0.0), 1, tall)


def _launch(
    y: Tensor,
    x: Tensor,
    order: Tensor | None,
    starts: Tensor,
    experts: TiledExperts,
    bias: Tensor | None,
    gating: Gating,
    top: int,
    tall: int,
) -> None:
    """One product of every pair's row and its expert's matrix."""
    (pairs, outputs), bank, count = y.shape, experts.bank, len(experts)
    if bank.perm is not None:
        x = gather_columns(x, bank.perm)
    tile = GroupedGemmTile(tall, TILE, 0, 4, 4, {4: 3, 8: 2, 16: 2}[bank.slices])
    tiles = pairs if order is None else max_row_tiles(pairs, count, tile)
    _experts(
        (tiles * cdiv(outputs, TILE), 1, 1),
        (x, order, starts, *weight_tensors(bank), bias, y),
        (),
        (
            x.stride(0), outputs, count, next_power_of_2(count), top,
            bank.low.shape[0] // count * TILE, *gating, experts.shape[2], *weight_constants(bank),
            tile.m, tile.n, tile.group, tile.stages,
            not _experts.interpreted and x.dtype != torch.float32, PDL_ENABLED,
        ),
        warps=tile.warps,
        pdl=PDL_ENABLED,
    )  # fmt: skip

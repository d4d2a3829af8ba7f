"""Chunk scan: rows of many tokens, 64 at a time by products of matrices.

Between two chunks there is only a head's state S [K, V]. A chunk, with factors of its tokens:

    y = of_q * (q S) + P new        S = whole S + k' (of_k * new)

Kernels of a layer write P, the factors and what else is independent of S, of all chunks at once
(delta_chunks.py, ssd_chunks.py). One here then goes from chunk to chunk with some columns of S in
registers. new are the values, or with corrections (w is not None) u - w S.

A row's chunks begin at its first token, so bits depend on where a step cuts a prompt, as those of
products of many rows do. So only tokens in bfloat16 go in chunks: operands of products are rounded
to it, sums and states are float32. In float32, without matrix units, they take longer than token by
token; float16 has too small a range for keys of any length.
Axes: G chunks, Q tokens of a chunk, H value heads, K and V sizes of a state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel
from quire.kernels.gpu.runtime.target import INTERPRETER, gpu_target
from quire.kernels.state_rows import StateRows

CHUNK = 64
"""Tokens of a chunk. A row of fewer goes token by token."""
COLUMNS = 32
"""Of a state, that a program has."""
WARPS, STAGES = 4, 2
_CAPABILITIES = ((9, 0), INTERPRETER.capability)


class Chunks(NamedTuple):
    """What the chunks of a step need beside tokens and states."""

    within: Tensor  # [G, H, Q, Q] bfloat16: P
    factors: Tensor  # [G, H, 2, Q] float32: of_q, of_k
    wholes: Tensor  # [G, H] float32: decay of a chunk
    most: int  # G: at least the chunks of the step


def takes_chunks(tokens: tuple[Tensor, ...], rows: StateRows, most_keys: int) -> bool:
    """Whether a step may have rows that go in chunks. tokens: queries, keys, values [T, heads, ..].

    Their heads are of whole 16 bytes, since so large are the copies into shared memory, which has
    room for heads of most_keys keys on Hopper. No other GPU was measured.
    """
    count = len(tokens[0]) - rows.decodes
    if count < CHUNK or len(rows.rows) == rows.decodes or tokens[0].shape[2] > most_keys:
        return False
    if gpu_target(tokens[0].device).capability not in _CAPABILITIES:
        return False
    return all(
        one.dtype == torch.bfloat16 and not one.stride(0) % 8 and not one.shape[2] % 8
        for one in tokens
    )


def empty_chunks(tokens: Tensor, heads: int, rows: StateRows) -> Chunks:
    """Memory for the chunks of a step, whose number only the device has."""
    count = (len(tokens) - rows.decodes) // CHUNK + len(rows.rows) - rows.decodes
    within = tokens.new_empty((count, heads, CHUNK, CHUNK))
    factors = tokens.new_empty((count, heads, 2, CHUNK), dtype=torch.float32)
    return Chunks(within, factors, factors.new_empty((count, heads)), count)


@triton.jit
def find_chunk(rows_ptr, starts_ptr, g, prompts, decodes, padding, CHUNK: tl.constexpr):
    """Return (whether it is one, first token, end of its row) of chunk g of a step.

    Chunk 0 of prompt r has number (tokens of the prompts before) // CHUNK + r, so no two have one.
    """
    low, high = g * 0, g * 0 + prompts
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(starts_ptr + decodes + middle) - decodes
        fits = before // CHUNK + middle <= g
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle)
    start = tl.load(starts_ptr + decodes + low)
    end = tl.load(starts_ptr + decodes + low + 1)
    first = start + (g - (start - decodes) // CHUNK - low) * CHUNK
    live = (end - start >= CHUNK) & (first < end)
    live &= tl.load(rows_ptr + decodes + low) != padding
    return live, first.to(tl.int64), end.to(tl.int64)  # T * C can pass 2**31


@triton.jit
def decays(logs, n):
    """Decays of a chunk, of the logs of its tokens' own [Q].

    Return ([Q, Q] between tokens, 0 to later ones; [Q] from its start; [Q] to its end; over it).
    """
    log, total = tl.cumsum(logs, 0), tl.sum(logs, 0)
    earlier = n[:, None] >= n[None, :]
    between = tl.where(earlier, log[:, None] - log[None, :], 0.0)
    return tl.where(earlier, tl.exp(between), 0.0), tl.exp(log), tl.exp(total - log), tl.exp(total)


@kernel("decodes", "padding")
def _scan_chunks(
    q_ptr,  # [T, J, K], rows anywhere
    k_ptr,  # [T, J, K], rows anywhere
    v_ptr,  # [T, H, V], rows anywhere; with w: u [G, H, Q, V]
    w_ptr,  # [G, H, Q, K], or None
    within_ptr,  # [G, H, Q, Q]
    factors_ptr,  # [G, H, 2, Q]
    wholes_ptr,  # [G, H]
    skip_ptr,  # [H], or None
    state_ptr,  # [.., H, K, V], or its last two axes in the other order
    sources_ptr,  # [S]
    rows_ptr,  # [S]
    starts_ptr,  # [S + 1]
    y_ptr,  # [T, H, V] out
    decodes,
    padding,  # row of the state of what pads a step
    Q_T: tl.constexpr,
    K_T: tl.constexpr,
    V_T: tl.constexpr,
    STATE_K: tl.constexpr,
    STATE_V: tl.constexpr,
    H: tl.constexpr,
    EACH: tl.constexpr,  # value heads of a key head
    K: tl.constexpr,
    V: tl.constexpr,
    KEYS: tl.constexpr,  # power of two >= K
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    parts: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    h, r = tl.program_id(0) // parts, tl.program_id(1)
    source, target = tl.load(sources_ptr + decodes + r), tl.load(rows_ptr + decodes + r)
    start = tl.load(starts_ptr + decodes + r).to(tl.int64)  # T * C can pass 2**31
    end = tl.load(starts_ptr + decodes + r + 1).to(tl.int64)
    if (target == padding) | (end - start < CHUNK):
        return
    i, n = tl.arange(0, KEYS), tl.arange(0, CHUNK)
    j = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    kind = q_ptr.dtype.element_ty
    own = state_ptr + h * (K * V) + i[:, None] * STATE_K + j[None, :] * STATE_V
    live = (i < K)[:, None] & (j < V)[None, :]
    state = tl.load(own + source * (H * K * V), live, 0.0)
    key = h // EACH * K
    first = ((start - decodes) // CHUNK + r) * H + h
    for c in range((end - start + CHUNK - 1) // CHUNK):
        t, at = start + c * CHUNK + n, first + c * H
        known = (t < end)[:, None] & (i < K)[None, :]
        q = tl.load(q_ptr + t[:, None] * Q_T + key + i[None, :], known, 0.0)
        k = tl.load(k_ptr + t[:, None] * K_T + key + i[None, :], known, 0.0)
        within = tl.load(within_ptr + (at * CHUNK + n[:, None]) * CHUNK + n[None, :])
        of_q = tl.load(factors_ptr + at * (2 * CHUNK) + n)
        of_k = tl.load(factors_ptr + at * (2 * CHUNK) + CHUNK + n)
        whole = tl.load(wholes_ptr + at)
        before = state.to(kind)
        if w_ptr is not None:
            cell = at * CHUNK + n[:, None]
            w = tl.load(w_ptr + cell * K + i[None, :], (i < K)[None, :], 0.0)
            new = tl.load(v_ptr + cell * V + j[None, :], (j < V)[None, :], 0.0).to(tl.float32)
            new -= tl.dot(w, before)
        else:
            exists = (t < end)[:, None] & (j < V)[None, :]
            new = tl.load(v_ptr + t[:, None] * V_T + h * V + j[None, :], exists, 0.0)
            new = new.to(tl.float32)
        y = tl.dot(q, before) * of_q[:, None]
        y = tl.dot(within, new.to(kind), y)
        if skip_ptr is not None:
            y += new * tl.load(skip_ptr + h).to(tl.float32)
        added = (new * of_k[:, None]).to(kind)
        state = tl.dot(tl.trans(k), added, state * whole)
        exists = (t < end)[:, None] & (j < V)[None, :]
        tl.store(y_ptr + (t[:, None] * H + h) * V + j[None, :], y, exists)
    tl.store(own + target * (H * K * V), state, live)


def scan_chunks(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: Chunks,
    state: Tensor,
    rows: StateRows,
    *,
    w: Tensor | None = None,
    skip: Tensor | None = None,
    keys_last: bool = False,
) -> None:
    """Fill out [T, H, V] and the states of the rows that go in chunks.

    v: [T, H, V]; with w it is u [G, H, Q, V]. keys_last: state is [.., H, V, K].
    """
    heads, keys, values = out.shape[1], q.shape[2], out.shape[2]
    columns = min(COLUMNS, max(16, next_power_of_2(values)))
    consts: tuple[Any, ...] = (
        *(one.stride(0) for one in (q, k, v)),
        *((1, keys) if keys_last else (values, 1)),
        heads,
        heads // q.shape[1],
        keys,
        values,
        max(16, next_power_of_2(keys)),
        columns,
        CHUNK,
        PDL_ENABLED,
    )
    _scan_chunks(
        (heads * cdiv(values, columns), len(rows.rows) - rows.decodes, 1),
        (q, k, v, w, *chunks[:3], skip, state, rows.sources, rows.rows, rows.token_starts(), out),
        (rows.decodes, len(state) - 1),
        consts,
        warps=WARPS,
        stages=STAGES,
        pdl=PDL_ENABLED,
    )

"""Gated delta rule kernel: a program has some columns of a head's state, and all tokens of a row.

Rows of many tokens go in chunks (delta_chunks.py).

What a token reads follows from the state before it, so both sums over it run side by side:

    found = k S    read = q S    change = beta (v - decay found)    o = decay read + (q k) change
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gated_delta_rule import EPS
from quire.kernels.gpu.recurrent.chunk_scan import CHUNK, takes_chunks
from quire.kernels.gpu.recurrent.delta_chunks import MOST_KEYS, launch_chunks
from quire.kernels.gpu.recurrent.step_tokens import (
    TILE,
    find_tokens,
    has_chains,
    load_token,
    row_tensors,
    sigmoid,
    softplus,
    takes,
)
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel
from quire.kernels.state_rows import StateRows


@kernel("decodes", "padding", "eps")
def _gated_delta_rule(
    q_ptr,  # [T, J, K], rows anywhere, as those of all up to b
    k_ptr,  # [T, J, K]
    v_ptr,  # [T, H, V]
    a_ptr,  # [T, H]
    b_ptr,  # [T, H]
    a_log_ptr,  # [H]
    dt_bias_ptr,  # [H]
    state_ptr,  # [N, H, K, V]
    sources_ptr,  # [S]
    rows_ptr,  # [S]
    starts_ptr,  # [S + 1]
    y_ptr,  # [T, H, V] out
    decodes,
    padding,  # row of the state of what pads a step
    eps,
    Q_T: tl.constexpr,
    K_T: tl.constexpr,
    V_T: tl.constexpr,
    A_T: tl.constexpr,
    B_T: tl.constexpr,
    H: tl.constexpr,
    EACH: tl.constexpr,  # value heads of a key head
    K: tl.constexpr,
    V: tl.constexpr,
    KEYS: tl.constexpr,  # power of two >= K
    COLUMNS: tl.constexpr,
    CHAINS: tl.constexpr,
    SHORT: tl.constexpr,  # longer rows than this go in chunks; 0: no row does
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    parts: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    h, s = tl.program_id(0) // parts, tl.program_id(1)
    i = tl.arange(0, KEYS)
    j = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    source, target, start, end = find_tokens(
        sources_ptr, rows_ptr, starts_ptr, s, decodes, padding, CHAINS
    )
    if target == padding:
        for t in range(start, end):
            at = (t * H + h) * V + j
            tl.store(y_ptr + at, tl.zeros([COLUMNS], tl.float32), j < V)
        return
    if start >= end:
        return
    if SHORT:
        if (s >= decodes) & (end - start > SHORT):
            return
    rate = -tl.exp(tl.load(a_log_ptr + h).to(tl.float32))
    bias = tl.load(dt_bias_ptr + h).to(tl.float32)
    own = state_ptr + (h * K + i[:, None]) * V + j[None, :]
    live = (i < K)[:, None] & (j < V)[None, :]
    state = tl.load(own + source * (H * K * V), live, 0.0)
    key = h // EACH * K
    k = load_token(k_ptr, start, end, K_T, key, i, i < K)
    q = load_token(q_ptr, start, end, Q_T, key, i, i < K)
    v = load_token(v_ptr, start, end, V_T, h * V, j, j < V)
    a = load_token(a_ptr, start, end, A_T, h, 0, True)
    b = load_token(b_ptr, start, end, B_T, h, 0, True)
    for t in range(start, end):
        next_k = load_token(k_ptr, t + 1, end, K_T, key, i, i < K)  # while this token is computed
        next_q = load_token(q_ptr, t + 1, end, Q_T, key, i, i < K)
        next_v = load_token(v_ptr, t + 1, end, V_T, h * V, j, j < V)
        next_a = load_token(a_ptr, t + 1, end, A_T, h, 0, True)
        next_b = load_token(b_ptr, t + 1, end, B_T, h, 0, True)
        decay = tl.exp(rate * softplus(a.to(tl.float32) + bias))
        beta = sigmoid(b.to(tl.float32)).to(b_ptr.dtype.element_ty).to(tl.float32)
        wide_k, wide_q = k.to(tl.float32), q.to(tl.float32)
        of_k = tl.rsqrt(tl.sum(wide_k * wide_k, 0) + eps)
        of_q = tl.rsqrt(tl.sum(wide_q * wide_q, 0) + eps) * (K**-0.5)
        both = tl.sum(wide_k * wide_q, 0) * of_k
        found = tl.sum(state * wide_k[:, None], 0) * of_k
        read = tl.sum(state * wide_q[:, None], 0)
        change = (v.to(tl.float32) - decay * found) * beta
        state = state * decay + wide_k[:, None] * (change * of_k)[None, :]
        y = (decay * read + both * change) * of_q
        tl.store(y_ptr + (t * H + h) * V + j, y, j < V)
        if CHAINS:
            if s < decodes:
                tl.store(own + tl.load(rows_ptr + t) * (H * K * V), state, live)
        k, q, v, a, b = next_k, next_q, next_v, next_a, next_b
    if not CHAINS or s >= decodes:
        tl.store(own + target * (H * K * V), state, live)


def outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    rows: StateRows,
    a_log: Tensor,
    dt_bias: Tensor,
) -> Any:
    if not takes(state, (q, k, v, a, b), (a_log, dt_bias)):
        return NotImplemented
    return torch.empty(v.shape, dtype=torch.float32, device=v.device)


def launch(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    rows: StateRows,
    a_log: Tensor,
    dt_bias: Tensor,
) -> None:
    heads, keys, values = state.shape[1:]
    chunked = takes_chunks((q, k, v), rows, MOST_KEYS)
    padded = next_power_of_2(keys)
    columns = min(max(2 * TILE // padded, 1), next_power_of_2(values))  # its sums take most time
    _gated_delta_rule(
        (heads * cdiv(values, columns), len(rows.rows), 1),
        (q, k, v, a, b, a_log, dt_bias, state, *row_tensors(rows), out),
        (rows.decodes, len(state) - 1, EPS),
        (
            *(t.stride(0) for t in (q, k, v, a, b)),
            heads,
            heads // k.shape[1],
            keys,
            values,
            padded,
            columns,
            has_chains(rows),
            CHUNK - 1 if chunked else 0,
            PDL_ENABLED,
        ),
        warps=1,
        stages=1,
        pdl=PDL_ENABLED,
    )
    if chunked:
        launch_chunks(out, q, k, v, a, b, state, rows, a_log, dt_bias)

"""Gated delta rule in chunks: what is independent of the state, of all chunks at once.

Each token corrects what the state has of its key, and so what the tokens before it have put there.
In a chunk of normed keys k with decays D (D[i, j]: from token j to i; d: from the chunk's start)
the corrections `new` are the solution of a system that is lower triangular, its diagonal 1:

    (1 + L) new = beta (v - d k S)        L[i, j] = beta[i] k[i] k[j] D[i, j], j < i

With X = inverse of 1 + L that is new = u - w S, u = X beta v and w = X beta d k.

X is composed of the inverses of blocks of 1, 2, 4 .. tokens on the diagonal: of two of them and the
block C of L beside them it is [[A, 0], [-B C A, B]]. A series in powers of L would lose all digits
where keys are alike, as those of a token that repeats are.

Source: Yang et al., Gated Delta Networks, arXiv 2412.06464
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gated_delta_rule import EPS
from quire.kernels.gpu.recurrent.chunk_scan import (
    CHUNK,
    decays,
    empty_chunks,
    find_chunk,
    scan_chunks,
)
from quire.kernels.gpu.recurrent.step_tokens import sigmoid, softplus
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel
from quire.kernels.state_rows import StateRows

WARPS = 4
MOST_KEYS = 128
"""Of a head, for which shared memory has room."""


@triton.jit
def _invert(lower, n, LEVELS: tl.constexpr):
    """Inverse of 1 + lower, which is [2**LEVELS, 2**LEVELS] and 0 on and above its diagonal."""
    i, j = n[:, None], n[None, :]
    found = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, lower, 0.0)
    for level in range(1, LEVELS):
        beside = (i >> level + 1 == j >> level + 1) & (i >> level != j >> level)
        block = tl.where(beside, lower, 0.0)
        half = tl.dot(found, block, input_precision="tf32")
        found -= tl.dot(half, found, input_precision="tf32")
    return found


@kernel("prompts", "decodes", "padding", "eps")
def _correct_chunks(
    q_ptr,  # [T, J, K], rows anywhere, as those of all up to b
    k_ptr,  # [T, J, K]
    v_ptr,  # [T, H, V]
    a_ptr,  # [T, H]
    b_ptr,  # [T, H]
    a_log_ptr,  # [H]
    dt_bias_ptr,  # [H]
    rows_ptr,  # [S]
    starts_ptr,  # [S + 1]
    u_ptr,  # [G, H, Q, V] out
    w_ptr,  # [G, H, Q, K] out
    within_ptr,  # [G, H, Q, Q] out
    factors_ptr,  # [G, H, 2, Q] out
    wholes_ptr,  # [G, H] out
    prompts,
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
    VALUES: tl.constexpr,  # power of two >= V
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,  # 2**LEVELS == CHUNK
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    h, g = tl.program_id(0), tl.program_id(1)
    live, first, end = find_chunk(rows_ptr, starts_ptr, g, prompts, decodes, padding, CHUNK)
    if not live:
        return
    n, i, j = tl.arange(0, CHUNK), tl.arange(0, KEYS), tl.arange(0, VALUES)
    t, at, key = first + n, g.to(tl.int64) * H + h, h // EACH * K
    kind = q_ptr.dtype.element_ty
    known = t < end
    rate = -tl.exp(tl.load(a_log_ptr + h).to(tl.float32))
    bias = tl.load(dt_bias_ptr + h).to(tl.float32)
    a = tl.load(a_ptr + t * A_T + h, known, 0.0).to(tl.float32)
    b = tl.load(b_ptr + t * B_T + h, known, 0.0).to(tl.float32)
    logs = tl.where(known, rate * softplus(a + bias), 0.0)
    decay, since, to_end, whole = decays(logs, n)
    beta = tl.where(known, sigmoid(b).to(b_ptr.dtype.element_ty).to(tl.float32), 0.0)
    exists = known[:, None] & (i < K)[None, :]
    k = tl.load(k_ptr + t[:, None] * K_T + key + i[None, :], exists, 0.0)
    q = tl.load(q_ptr + t[:, None] * Q_T + key + i[None, :], exists, 0.0)
    wide_k, wide_q = k.to(tl.float32), q.to(tl.float32)
    of_k = tl.rsqrt(tl.sum(wide_k * wide_k, 1) + eps)
    of_q = tl.rsqrt(tl.sum(wide_q * wide_q, 1) + eps) * (K**-0.5)
    tl.store(factors_ptr + at * (2 * CHUNK) + n, of_q * since)
    tl.store(factors_ptr + at * (2 * CHUNK) + CHUNK + n, of_k * to_end)
    tl.store(wholes_ptr + at, whole)
    decay *= of_k[None, :]
    cell = at * CHUNK + n[:, None]
    within = tl.dot(q, tl.trans(k)) * decay * of_q[:, None]
    tl.store(within_ptr + cell * CHUNK + n[None, :], within.to(kind))
    lower = tl.dot(k, tl.trans(k)) * decay * (beta * of_k)[:, None]
    lower = tl.where(n[:, None] > n[None, :], lower, 0.0)
    inverse = _invert(lower, n, LEVELS) * beta[None, :]
    of_state = (inverse * (since * of_k)[None, :]).to(kind)
    w = tl.dot(of_state, k)
    tl.store(w_ptr + cell * K + i[None, :], w.to(kind), (i < K)[None, :])
    exists = known[:, None] & (j < V)[None, :]
    v = tl.load(v_ptr + t[:, None] * V_T + h * V + j[None, :], exists, 0.0)
    u = tl.dot(inverse.to(kind), v)
    tl.store(u_ptr + cell * V + j[None, :], u.to(kind), (j < V)[None, :])


def launch_chunks(
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
    """As the op, of the rows that go in chunks."""
    heads, keys, values = state.shape[1:]
    chunks = empty_chunks(q, heads, rows)
    u = q.new_empty((chunks.most, heads, CHUNK, values))
    w = q.new_empty((chunks.most, heads, CHUNK, keys))
    _correct_chunks(
        (heads, chunks.most, 1),
        (q, k, v, a, b, a_log, dt_bias, rows.rows, rows.token_starts(), u, w, *chunks[:3]),
        (len(rows.rows) - rows.decodes, rows.decodes, len(state) - 1, EPS),
        (
            *(one.stride(0) for one in (q, k, v, a, b)),
            heads,
            heads // k.shape[1],
            keys,
            values,
            max(16, next_power_of_2(keys)),
            max(16, next_power_of_2(values)),
            CHUNK,
            CHUNK.bit_length() - 1,
            PDL_ENABLED,
        ),
        warps=WARPS,
        stages=1,
        pdl=PDL_ENABLED,
    )
    scan_chunks(out, q, k, u, chunks, state, rows, w=w)

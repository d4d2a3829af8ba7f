"""SSD scan in chunks: what is independent of the state, of all chunks at once.

C is the query, B the key and x the value of a token, whose time step multiplies its key. Between
tokens of a chunk that is a product of matrices under a mask of decays.

Source: Dao and Gu, Transformers are SSMs, arXiv 2405.21060
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.recurrent.chunk_scan import (
    CHUNK,
    decays,
    empty_chunks,
    find_chunk,
    scan_chunks,
)
from quire.kernels.gpu.recurrent.step_tokens import softplus
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel
from quire.kernels.state_rows import StateRows

WARPS = 4
MOST_NUMBERS = 256
"""Of a head, for which shared memory has room."""


@kernel("prompts", "decodes", "padding", "lowest", "highest")
def _weigh_chunks(
    dt_ptr,  # [T, H], rows anywhere, as those of b and c
    b_ptr,  # [T, J, N]
    c_ptr,  # [T, J, N]
    a_log_ptr,  # [H]
    dt_bias_ptr,  # [H]
    rows_ptr,  # [S]
    starts_ptr,  # [S + 1]
    within_ptr,  # [G, H, Q, Q] out
    factors_ptr,  # [G, H, 2, Q] out
    wholes_ptr,  # [G, H] out
    prompts,
    decodes,
    padding,  # row of the state of what pads a step
    lowest,  # time step
    highest,
    DT_T: tl.constexpr,
    B_T: tl.constexpr,
    C_T: tl.constexpr,
    H: tl.constexpr,
    EACH: tl.constexpr,  # heads of a group
    N: tl.constexpr,
    NUMBERS: tl.constexpr,  # power of two >= N
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    h, g = tl.program_id(0), tl.program_id(1)
    live, first, end = find_chunk(rows_ptr, starts_ptr, g, prompts, decodes, padding, CHUNK)
    if not live:
        return
    n, i = tl.arange(0, CHUNK), tl.arange(0, NUMBERS)
    t, at, group = first + n, g.to(tl.int64) * H + h, h // EACH * N
    known = t < end
    rate = -tl.exp(tl.load(a_log_ptr + h).to(tl.float32))
    bias = tl.load(dt_bias_ptr + h).to(tl.float32)
    step = softplus(tl.load(dt_ptr + t * DT_T + h, known, 0.0).to(tl.float32) + bias)
    step = tl.where(known, tl.minimum(tl.maximum(step, lowest), highest), 0.0)
    decay, since, to_end, whole = decays(step * rate, n)
    tl.store(factors_ptr + at * (2 * CHUNK) + n, since)
    tl.store(factors_ptr + at * (2 * CHUNK) + CHUNK + n, step * to_end)
    tl.store(wholes_ptr + at, whole)
    exists = known[:, None] & (i < N)[None, :]
    b = tl.load(b_ptr + t[:, None] * B_T + group + i[None, :], exists, 0.0)
    c = tl.load(c_ptr + t[:, None] * C_T + group + i[None, :], exists, 0.0)
    within = tl.dot(c, tl.trans(b)) * decay * step[None, :]
    cell = at * CHUNK + n[:, None]
    tl.store(within_ptr + cell * CHUNK + n[None, :], within.to(within_ptr.dtype.element_ty))


def launch_chunks(
    out: Tensor,
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    rows: StateRows,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
) -> None:
    """As the op, of the rows that go in chunks."""
    heads, groups, numbers = x.shape[1], b.shape[1], b.shape[2]
    chunks = empty_chunks(x, heads, rows)
    _weigh_chunks(
        (heads, chunks.most, 1),
        (dt, b, c, a_log, dt_bias, rows.rows, rows.token_starts(), *chunks[:3]),
        (len(rows.rows) - rows.decodes, rows.decodes, len(state) - 1, *dt_limit),
        (
            *(one.stride(0) for one in (dt, b, c)),
            heads,
            heads // groups,
            numbers,
            max(16, next_power_of_2(numbers)),
            CHUNK,
            PDL_ENABLED,
        ),
        warps=WARPS,
        stages=1,
        pdl=PDL_ENABLED,
    )
    scan_chunks(out, c, b, x, chunks, state, rows, skip=d, keys_last=True)

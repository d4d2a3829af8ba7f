"""SSD scan kernel: a program has some rows of a head's state, and all tokens of a step's row."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.recurrent.chunk_scan import CHUNK, takes_chunks
from quire.kernels.gpu.recurrent.ssd_chunks import MOST_NUMBERS, launch_chunks
from quire.kernels.gpu.recurrent.step_tokens import (
    TILE,
    find_tokens,
    has_chains,
    load_token,
    row_tensors,
    softplus,
    takes,
)
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel
from quire.kernels.state_rows import StateRows


@kernel("decodes", "padding", "lowest", "highest")
def _ssd_scan(
    x_ptr,  # [T, H, P], rows anywhere, as those of all up to c
    dt_ptr,  # [T, H]
    b_ptr,  # [T, G, N]
    c_ptr,  # [T, G, N]
    a_log_ptr,  # [H]
    d_ptr,  # [H]
    dt_bias_ptr,  # [H]
    state_ptr,  # [.., H, P, N]
    sources_ptr,  # [S]
    rows_ptr,  # [S]
    starts_ptr,  # [S + 1]
    y_ptr,  # [T, H, P] out
    decodes,
    padding,  # row of the state of what pads a step
    lowest,  # time step
    highest,
    X_T: tl.constexpr,
    DT_T: tl.constexpr,
    B_T: tl.constexpr,
    C_T: tl.constexpr,
    H: tl.constexpr,
    EACH: tl.constexpr,  # heads of a group
    P: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    NUMBERS: tl.constexpr,  # power of two >= N
    CHAINS: tl.constexpr,
    SHORT: tl.constexpr,  # longer rows than this go in chunks; 0: no row does
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    parts: tl.constexpr = (P + ROWS - 1) // ROWS
    h, s = tl.program_id(0) // parts, tl.program_id(1)
    i = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, NUMBERS)
    source, target, start, end = find_tokens(
        sources_ptr, rows_ptr, starts_ptr, s, decodes, padding, CHAINS
    )
    if target == padding:
        for t in range(start, end):
            at = (t * H + h) * P + i
            tl.store(y_ptr + at, tl.zeros([ROWS], tl.float32), i < P)
        return
    if start >= end:
        return
    if SHORT:
        if (s >= decodes) & (end - start > SHORT):
            return
    rate = -tl.exp(tl.load(a_log_ptr + h).to(tl.float32))
    skip = tl.load(d_ptr + h).to(tl.float32)
    bias = tl.load(dt_bias_ptr + h).to(tl.float32)
    own = state_ptr + (h * P + i[:, None]) * N + j[None, :]
    live = (i < P)[:, None] & (j < N)[None, :]
    state = tl.load(own + source * (H * P * N), live, 0.0)
    group = h // EACH * N
    x = load_token(x_ptr, start, end, X_T, h * P, i, i < P)
    dt = load_token(dt_ptr, start, end, DT_T, h, 0, True)
    b = load_token(b_ptr, start, end, B_T, group, j, j < N)
    c = load_token(c_ptr, start, end, C_T, group, j, j < N)
    for t in range(start, end):
        next_x = load_token(x_ptr, t + 1, end, X_T, h * P, i, i < P)  # while this token is computed
        next_dt = load_token(dt_ptr, t + 1, end, DT_T, h, 0, True)
        next_b = load_token(b_ptr, t + 1, end, B_T, group, j, j < N)
        next_c = load_token(c_ptr, t + 1, end, C_T, group, j, j < N)
        step = softplus(dt.to(tl.float32) + bias)
        step = tl.minimum(tl.maximum(step, lowest), highest)
        wide = x.to(tl.float32)
        added = (wide * step)[:, None] * b.to(tl.float32)[None, :]
        state = state * tl.exp(step * rate) + added
        y = tl.sum(state * c.to(tl.float32)[None, :], 1) + wide * skip
        tl.store(y_ptr + (t * H + h) * P + i, y, i < P)
        if CHAINS:
            if s < decodes:
                tl.store(own + tl.load(rows_ptr + t) * (H * P * N), state, live)
        x, dt, b, c = next_x, next_dt, next_b, next_c
    if not CHAINS or s >= decodes:
        tl.store(own + target * (H * P * N), state, live)


def outputs(
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
) -> Any:
    if not takes(state, (x, dt, b, c), (a_log, d, dt_bias)):
        return NotImplemented
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


def launch(
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
    heads, size, numbers = state.shape[1:]
    chunked = takes_chunks((c, b, x), rows, MOST_NUMBERS)
    padded = next_power_of_2(numbers)
    each = min(max(TILE // padded, 1), next_power_of_2(size))
    _ssd_scan(
        (heads * cdiv(size, each), len(rows.rows), 1),
        (x, dt, b, c, a_log, d, dt_bias, state, *row_tensors(rows), out),
        (rows.decodes, len(state) - 1, *dt_limit),
        (
            *(t.stride(0) for t in (x, dt, b, c)),
            heads,
            heads // b.shape[1],
            size,
            numbers,
            each,
            padded,
            has_chains(rows),
            CHUNK - 1 if chunked else 0,
            PDL_ENABLED,
        ),
        warps=1,
        stages=1,
        pdl=PDL_ENABLED,
    )
    if chunked:
        launch_chunks(out, x, dt, b, c, state, rows, a_log, d, dt_bias, dt_limit)

"""Selective scan kernel: a program has the states of some channels, and all tokens of a row."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

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


@kernel("decodes", "padding")
def _selective_scan(
    x_ptr,  # [T, C], rows anywhere, as those of all up to z
    dt_ptr,  # [T, C]
    b_ptr,  # [T, N]
    c_ptr,  # [T, N]
    z_ptr,  # [T, C]
    a_log_ptr,  # [C, N]
    d_ptr,  # [C]
    state_ptr,  # [.., C, N]
    sources_ptr,  # [S]
    rows_ptr,  # [S]
    starts_ptr,  # [S + 1]
    y_ptr,  # [T, C] out
    decodes,
    padding,  # row of the state of what pads a step
    X_T: tl.constexpr,
    DT_T: tl.constexpr,
    B_T: tl.constexpr,
    C_T: tl.constexpr,
    Z_T: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    CHANNELS: tl.constexpr,
    NUMBERS: tl.constexpr,  # power of two >= N
    CHAINS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    s = tl.program_id(1)
    i = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    j = tl.arange(0, NUMBERS)
    kind = y_ptr.dtype.element_ty
    source, target, start, end = find_tokens(
        sources_ptr, rows_ptr, starts_ptr, s, decodes, padding, CHAINS
    )
    if target == padding:
        for t in range(start, end):
            at = t * C + i
            tl.store(y_ptr + at, tl.zeros([CHANNELS], tl.float32).to(kind), i < C)
        return
    if start >= end:
        return
    at = i[:, None] * N + j[None, :]
    live = (i < C)[:, None] & (j < N)[None, :]
    rate = -tl.exp(tl.load(a_log_ptr + at, live, 0.0).to(tl.float32))
    skip = tl.load(d_ptr + i, i < C, 0.0).to(tl.float32)
    state = tl.load(state_ptr + source * (C * N) + at, live, 0.0)
    x = load_token(x_ptr, start, end, X_T, 0, i, i < C)
    dt = load_token(dt_ptr, start, end, DT_T, 0, i, i < C)
    z = load_token(z_ptr, start, end, Z_T, 0, i, i < C)
    b = load_token(b_ptr, start, end, B_T, 0, j, j < N)
    c = load_token(c_ptr, start, end, C_T, 0, j, j < N)
    for t in range(start, end):
        next_x = load_token(x_ptr, t + 1, end, X_T, 0, i, i < C)  # while this token is computed
        next_dt = load_token(dt_ptr, t + 1, end, DT_T, 0, i, i < C)
        next_z = load_token(z_ptr, t + 1, end, Z_T, 0, i, i < C)
        next_b = load_token(b_ptr, t + 1, end, B_T, 0, j, j < N)
        next_c = load_token(c_ptr, t + 1, end, C_T, 0, j, j < N)
        step = softplus(dt.to(tl.float32))
        wide, gate = x.to(tl.float32), z.to(tl.float32)
        added = (step * wide)[:, None] * b.to(tl.float32)[None, :]
        state = state * tl.exp(step[:, None] * rate) + added
        y = tl.sum(state * c.to(tl.float32)[None, :], 1) + wide * skip
        y *= gate * sigmoid(gate)
        tl.store(y_ptr + t * C + i, y.to(kind), i < C)
        if CHAINS:
            if s < decodes:
                tl.store(state_ptr + tl.load(rows_ptr + t) * (C * N) + at, state, live)
        x, dt, z, b, c = next_x, next_dt, next_z, next_b, next_c
    if not CHAINS or s >= decodes:
        tl.store(state_ptr + target * (C * N) + at, state, live)


def outputs(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    z: Tensor,
    state: Tensor,
    rows: StateRows,
    a_log: Tensor,
    d: Tensor,
) -> Any:
    if not takes(state, (x, dt, b, c, z), (a_log, d)):
        return NotImplemented
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def launch(
    out: Tensor,
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    z: Tensor,
    state: Tensor,
    rows: StateRows,
    a_log: Tensor,
    d: Tensor,
) -> None:
    channels, numbers = state.shape[1:]
    padded = next_power_of_2(numbers)
    each = min(max(TILE // 2 // padded, 1), next_power_of_2(channels))
    _selective_scan(
        (cdiv(channels, each), len(rows.rows), 1),
        (x, dt, b, c, z, a_log, d, state, *row_tensors(rows), out),
        (rows.decodes, len(state) - 1),
        (
            *(t.stride(0) for t in (x, dt, b, c, z)),
            channels,
            numbers,
            each,
            padded,
            has_chains(rows),
            PDL_ENABLED,
        ),
        warps=1,
        stages=1,
        pdl=PDL_ENABLED,
    )

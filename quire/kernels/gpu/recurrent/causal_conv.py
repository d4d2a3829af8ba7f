"""Causal convolution kernel: a program has some channels of a row of one token, or of a share of
the tokens of a longer one. Sums of a token have one order in both.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.recurrent.step_tokens import find_tokens, has_chains, row_tensors, sigmoid
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel
from quire.kernels.state_rows import StateRows

MAX_WIDTH = 4
_CHANNELS = 128  # of a program
_TOKENS = 16  # of a longer row, at a time
_MIN_SHARES = 8  # of a longer row, if it has so many tokens: rows differ in length


@triton.jit
def _tap(ptr, c, j, C: tl.constexpr, W: tl.constexpr):
    """Weight of each channel for input j of four, of which a narrower kernel has the last."""
    first: tl.constexpr = 4 - W
    return tl.load(ptr + c * W + j - first, (c < C) & (j >= first), 0.0).to(tl.float32)


@triton.jit
def _input(
    x_ptr, state_ptr, source, start, end, t, c, X_T: tl.constexpr, C: tl.constexpr, W: tl.constexpr
):
    """Input of each channel at token t < end of a row, which is a kept one before its first."""
    back = t - start + W - 1
    x = tl.load(x_ptr + t * X_T + c, (c < C) & (t >= start) & (t < end), 0.0)
    at = source * (C * (W - 1)) + c * (W - 1) + back
    before = tl.load(state_ptr + at, (c < C) & (t < start) & (back >= 0), 0.0)
    return x.to(tl.float32) + before.to(tl.float32)  # one of them is 0


@triton.jit
def _keep(ptr, row, c, a, b, d, C: tl.constexpr, W: tl.constexpr):
    """Store the last W - 1 of three inputs."""
    at = ptr + row * (C * (W - 1)) + c * (W - 1) + W - 4
    kind = ptr.dtype.element_ty
    tl.store(at, a.to(kind), (c < C) & (W > 3))
    tl.store(at + 1, b.to(kind), (c < C) & (W > 2))
    tl.store(at + 2, d.to(kind), c < C)


@triton.jit
def _sum(shift, a, b, c, d, k0, k1, k2, k3, SILU: tl.constexpr):
    y = shift + k0 * a
    y += k1 * b
    y += k2 * c
    y += k3 * d
    if SILU:
        y *= sigmoid(y)
    return y


@kernel("decodes", "padding", "shares")
def _causal_conv(
    x_ptr,  # [T, C], rows anywhere
    state_ptr,  # [N, C, W - 1]
    weight_ptr,  # [C, W]
    bias_ptr,  # [C], or None
    sources_ptr,  # [S]
    rows_ptr,  # [S]
    starts_ptr,  # [S + 1]
    y_ptr,  # [T, C] out
    decodes,
    padding,  # row of the state of what pads a step
    shares,
    X_T: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    CHAINS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p = tl.program_id(0)
    of_prompts = tl.maximum(p - decodes, 0)
    s = tl.minimum(p, decodes) + of_prompts // shares
    share = of_prompts % shares
    source, target, start, end = find_tokens(
        sources_ptr, rows_ptr, starts_ptr, s, decodes, padding, CHAINS
    )
    if target == padding:
        for t in range(start + share, end, shares):
            tl.store(y_ptr + t * C + c, tl.zeros_like(c).to(y_ptr.dtype.element_ty), c < C)
        return
    if start + share * TOKENS >= end:
        return
    k0, k1 = _tap(weight_ptr, c, 0, C, W), _tap(weight_ptr, c, 1, C, W)
    k2, k3 = _tap(weight_ptr, c, 2, C, W), _tap(weight_ptr, c, 3, C, W)
    shift = tl.zeros_like(k0)
    if bias_ptr is not None:
        shift += tl.load(bias_ptr + c, c < C, 0.0).to(tl.float32)
    first = start + share * TOKENS
    before = _input(x_ptr, state_ptr, source, start, end, first - 3, c, X_T, C, W)
    middle = _input(x_ptr, state_ptr, source, start, end, first - 2, c, X_T, C, W)
    last = _input(x_ptr, state_ptr, source, start, end, first - 1, c, X_T, C, W)
    if s < decodes:
        for t in range(start, end):
            x = tl.load(x_ptr + t * X_T + c, c < C, 0.0).to(tl.float32)
            y = _sum(shift, before, middle, last, x, k0, k1, k2, k3, SILU)
            tl.store(y_ptr + t * C + c, y.to(y_ptr.dtype.element_ty), c < C)
            before, middle, last = middle, last, x
            tl.debug_barrier()  # another thread may not have read the state
            _keep(state_ptr, tl.load(rows_ptr + t), c, before, middle, last, C, W)
    else:
        if share == 0:  # which alone reads the state
            a = _input(x_ptr, state_ptr, source, start, end, end - 3, c, X_T, C, W)
            b = _input(x_ptr, state_ptr, source, start, end, end - 2, c, X_T, C, W)
            d = _input(x_ptr, state_ptr, source, start, end, end - 1, c, X_T, C, W)
            tl.debug_barrier()  # another thread may not have read the state
            _keep(state_ptr, target, c, a, b, d, C, W)
        for at in range(first, end, shares * TOKENS):
            for n in tl.static_range(TOKENS):
                live = (c < C) & (at + n < end)
                x = tl.load(x_ptr + (at + n) * X_T + c, live, 0.0).to(tl.float32)
                y = _sum(shift, before, middle, last, x, k0, k1, k2, k3, SILU)
                tl.store(y_ptr + (at + n) * C + c, y.to(y_ptr.dtype.element_ty), live)
                before, middle, last = middle, last, x
            then = at + shares * TOKENS
            before = _input(x_ptr, state_ptr, source, start, end, then - 3, c, X_T, C, W)
            middle = _input(x_ptr, state_ptr, source, start, end, then - 2, c, X_T, C, W)
            last = _input(x_ptr, state_ptr, source, start, end, then - 1, c, X_T, C, W)


def outputs(
    x: Tensor, state: Tensor, rows: StateRows, weight: Tensor, bias: Tensor | None, silu: bool
) -> Any:
    packed = (state, weight) if bias is None else (state, weight, bias)
    if weight.shape[1] > MAX_WIDTH or x.stride(1) != 1:
        return NotImplemented
    if any(not t.is_contiguous() for t in packed):
        return NotImplemented
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def launch(
    out: Tensor,
    x: Tensor,
    state: Tensor,
    rows: StateRows,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
) -> None:
    (tokens, channels), prompts = x.shape, len(rows.rows) - rows.decodes
    of_prompts = tokens - rows.decodes
    shares = max(_MIN_SHARES, cdiv(of_prompts, _TOKENS * max(prompts, 1)))
    shares = min(shares, cdiv(of_prompts, _TOKENS))
    _causal_conv(
        (rows.decodes + prompts * shares, cdiv(channels, _CHANNELS), 1),
        (x, state, weight, bias, *row_tensors(rows), out),
        (rows.decodes, len(state) - 1, max(shares, 1)),
        (
            x.stride(0),
            channels,
            weight.shape[1],
            silu,
            has_chains(rows),
            _CHANNELS,
            _TOKENS,
            PDL_ENABLED,
        ),
        warps=2,
        pdl=PDL_ENABLED,
    )

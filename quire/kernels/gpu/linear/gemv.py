"""GEMV kernel: one row times a weight, with the ops before and after it, at memory bandwidth.

    r = x + residual;  y = norm(r)      each program does the whole row: no launch of its own
    z = W y + bias                      each program has a few rows of W, whole, in registers
    a = act(gate) * up                  a program has rows of both halves

A decode step reads every weight once, so time is bytes, plus the gaps between kernels. A program
therefore loads its first rows of W, and prefetches the others to L2, before it waits for the
previous kernel (programmatic dependent launch). Rounded where the separate ops round.
Axes: I inputs, O outputs (of one half, if there are halves).
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.elementwise.activations import activate
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import (
    PDL_ENABLED,
    launch_dependents,
    prefetch_l2,
    wait_for_previous_kernel,
)


class FusedNorm(NamedTuple):
    """The rms_norm before the product, and its results.

    squares: partial sums of the squares of x, if the kernel that computed x added them up
    (small_m_bands.py).
    """

    x: Tensor
    weight: Tensor
    eps: float
    residual: Tensor | None
    offset: float
    y: Tensor
    r: Tensor
    squares: Tensor | None = None


class FusedActivation(NamedTuple):
    """The act_mul after the product, and its result."""

    kind: str
    out: Tensor


class AddedResidual(NamedTuple):
    """The residual added after a product, r [T, O] in which the sum is stored, and partial sums of
    its squares, [parts, 8] in float32."""

    residual: Tensor
    r: Tensor
    squares: Tensor


class GemvPlan(NamedTuple):
    """Split of a product: rows of W at once, columns at once, repeats per program, warps.

    prefetch: before it waits for the previous kernel, a program prefetches to L2 the rows that it
    has not loaded yet (all its rows, if it has loaded all: more is then in flight).
    """

    rows: int
    columns: int
    repeats: int
    warps: int
    prefetch: bool = False


@triton.jit
def load_weight_rows(
    w_ptr, n, k, O: tl.constexpr, I: tl.constexpr, BK: tl.constexpr, C: tl.constexpr
):
    """Whole rows of W as C tiles [BN, BK]. Rows past the end repeat the last, without a mask."""
    tiles = ()
    base = w_ptr + tl.minimum(n, O - 1).to(tl.int64)[:, None] * I + k[None, :]
    for c in tl.static_range(C):
        if (c + 1) * BK <= I:
            tile = tl.load(base + c * BK, eviction_policy="evict_first")
        else:
            tile = tl.load(base + c * BK, (c * BK + k < I)[None, :], 0.0)
        tiles = tiles + (tile,)  # type: ignore[assignment]
    return tiles


@triton.jit
def load_vector(x_ptr, k, I: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    parts = ()
    for c in tl.static_range(C):
        if (c + 1) * BK <= I:
            part = tl.load(x_ptr + c * BK + k)
        else:
            part = tl.load(x_ptr + c * BK + k, c * BK + k < I, 0.0)
        parts = parts + (part,)  # type: ignore[assignment]
    return parts


@triton.jit
def load_normed_vector(x_ptr, res_ptr, ws, y_ptr, r_ptr, k, eps, offset, I: tl.constexpr, BK:
tl.constexpr,
            C: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    """The row that the product reads. The first program stores it for other readers, if it has a
    place (y_ptr)."""
    xs = load_vector(x_ptr, k, I, BK, C)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if ADD:
        rs = load_vector(res_ptr, k, I, BK, C)
        sums = ()
        for c in tl.static_range(C):
            sums = sums + ((xs[c].to(tl.float32) + rs[c].to(tl.float32)).to(dtype),)  # type: ignore[assignment]
        xs = sums
    squares = tl.zeros([BK], tl.float32)
    for c in tl.static_range(C):
        x = xs[c].to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, 0) / I + eps)
    ys = ()
    for c in tl.static_range(C):
        y = (xs[c].to(tl.float32) * scale * (offset + ws[c].to(tl.float32))).to(dtype)
        ys = ys + (y,)  # type: ignore[assignment]
    if y_ptr is not None:
        if tl.program_id(0) == 0:
            for c in tl.static_range(C):
                live = c * BK + k < I
                tl.store(y_ptr + c * BK + k, ys[c], live)
                if ADD:
                    tl.store(r_ptr + c * BK + k, xs[c], live)
    return ys


@triton.jit
def dot_rows(tiles, xs, BN: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, V: tl.constexpr):
    """C tiles times the vector: [BN]. V neighbours that one thread loads are summed at once."""
    acc = tl.zeros([BN, BK // V], tl.float32)
    for c in tl.static_range(C):
        parts = tiles[c].to(tl.float32) * xs[c].to(tl.float32)[None, :]
        if V > 1:
            parts = tl.sum(tl.reshape(parts, (BN, BK // V, V)), 2)
        acc += parts
    return tl.sum(acc, 1)


@kernel("eps", "offset")
def _gemv(
    x_ptr,  # [I]
    res_ptr,  # [I], read only if ADD
    norm_ptr,  # [I], read only if NORM
    w_ptr,  # [O, I], or [2 * O, I] if ACT
    bias_ptr,  # [O] or [2 * O], read only if BIAS
    z_ptr,  # [O] or [2 * O] out
    y_ptr,  # [I] out if NORM
    r_ptr,  # [I] out if ADD
    a_ptr,  # [O] out if ACT
    eps,
    offset,
    O: tl.constexpr,
    I: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    ACT: tl.constexpr,  # None, or a kind
    BN: tl.constexpr,
    BK: tl.constexpr,
    TIMES: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * (BN * TIMES)
    C: tl.constexpr = (I + BK - 1) // BK
    UP: tl.constexpr = O * I
    LOADED: tl.constexpr = BN if TIMES > 1 else 0
    SIZE: tl.constexpr = (
        (BN * TIMES - LOADED) * I * (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
    )
    k = tl.arange(0, BK)
    n = first + tl.arange(0, BN)
    tiles = load_weight_rows(w_ptr, n, k, O, I, BK, C)
    if ACT is not None:
        ups = load_weight_rows(w_ptr + UP, n, k, O, I, BK, C)
    if NORM:
        norm = load_vector(norm_ptr, k, I, BK, C)
    if PDL:
        if AHEAD and SIZE % 16 == 0 and first + BN * TIMES <= O:
            start = (first + LOADED).to(tl.int64) * I
            prefetch_l2(w_ptr + start, SIZE)
            if ACT is not None:
                prefetch_l2(w_ptr + UP + start, SIZE)
        launch_dependents()
        wait_for_previous_kernel()
    if NORM:
        xs = load_normed_vector(x_ptr, res_ptr, norm, y_ptr, r_ptr, k, eps, offset, I, BK, C, ADD)
    else:
        xs = load_vector(x_ptr, k, I, BK, C)
    dtype: tl.constexpr = z_ptr.dtype.element_ty
    for g in tl.static_range(TIMES):
        n = first + g * BN + tl.arange(0, BN)
        if g + 1 < TIMES:  # in flight while this one is summed
            next_tiles = load_weight_rows(w_ptr, n + BN, k, O, I, BK, C)
            if ACT is not None:
                next_ups = load_weight_rows(w_ptr + UP, n + BN, k, O, I, BK, C)
        z = dot_rows(tiles, xs, BN, BK, C, 1)
        if BIAS:
            z += tl.load(bias_ptr + n, n < O, 0.0).to(tl.float32)
        z = z.to(dtype)
        tl.store(z_ptr + n, z, n < O)
        if ACT is not None:
            up = dot_rows(ups, xs, BN, BK, C, 1)
            if BIAS:
                up += tl.load(bias_ptr + O + n, n < O, 0.0).to(tl.float32)
            up = up.to(dtype)
            tl.store(z_ptr + O + n, up, n < O)
            a = activate(z.to(tl.float32), ACT) * up.to(tl.float32)
            tl.store(a_ptr + n, a.to(dtype), n < O)
        if g + 1 < TIMES:
            tiles = next_tiles
            if ACT is not None:
                ups = next_ups


MAX_INPUTS = 32768


def supports(x: Tensor, weight: object, bias: Tensor | None) -> bool:
    """Whether this kernel multiplies this row of x: half precision, packed, not too long."""
    if (
        not isinstance(weight, Tensor)
        or x.shape[0] != 1
        or x.dtype not in (torch.bfloat16, torch.float16)
    ):
        return False
    if x.stride(1) != 1 or not weight.is_contiguous() or weight.shape[1] > MAX_INPUTS:
        return False
    return bias is None or bias.is_contiguous()


def plan_gemv(outputs: int, inputs: int, pair: bool) -> GemvPlan:
    """As measured, else so that a thread holds 64 numbers of W in loads of 16 bytes, and about 500
    programs share the rows: fewer leave the GPU idle, more repeat the norm more often.
    """
    found = tuned_plan("bf16", outputs, inputs, pair)
    if found is not None:
        return found
    warps = 8 if inputs > 4608 else 4
    columns = next(c for c in (2048, 1024, 512, 256) if c == 256 or _padded(inputs, c) <= 1.2)
    numbers = cdiv(inputs, columns) * columns * (2 if pair else 1) // (32 * warps)
    rows = 8
    while rows > 1 and (rows * numbers > 64 or outputs < 384 * rows):
        rows //= 2
    times = 4
    while times > 1 and outputs < 512 * rows * times:
        times //= 2
    return GemvPlan(rows, columns, times, warps, inputs <= 1024 and times == 1)


def _padded(inputs: int, columns: int) -> float:
    return cdiv(inputs, columns) * columns / inputs


def tuned_plan(kind: str, outputs: int, inputs: int, pair: bool) -> GemvPlan | None:
    """The plan that was fastest where it was measured (quire/kernels/tuned/gemv.json)."""
    values = _tuning_table()[kind].get(f"{outputs}x{inputs}{' pair' if pair else ''}")
    if values is None:
        return None
    rows, columns, times, warps, ahead = values
    return GemvPlan(rows, columns, times, warps, bool(ahead))


@functools.cache
def _tuning_table() -> dict[str, Any]:
    path = Path(__file__).parents[2] / "tuned" / "gemv.json"
    return json.loads(path.read_text())


def launch(
    z: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: FusedNorm | None = None,
    act: FusedActivation | None = None,
    memory_idle: bool = False,
    cut: GemvPlan | None = None,
) -> None:
    """z [1, O] = weight @ x; with a norm, x is the norm's input. Fills norm's and act's results.

    memory_idle: the previous kernel leaves memory idle (as attention), so weights may load early.
    """
    total, inputs = weight.shape
    outputs = total if act is None else total // 2
    rows, columns, times, warps, ahead = cut or plan_gemv(outputs, inputs, act is not None)
    add = norm is not None and norm.residual is not None
    out = None if act is None else act.out
    tensors: tuple[Tensor | None, ...] = (x, None, None, weight, bias, z, None, None, out)
    numbers = (0.0, 0.0)
    if norm is not None:
        r = norm.r if add else None
        tensors = (norm.x, norm.residual, norm.weight, weight, bias, z, norm.y, r, out)
        numbers = (norm.eps, norm.offset)
    _gemv(
        (cdiv(outputs, rows * times), 1, 1),
        tensors,
        numbers,
        (
            outputs, inputs, norm is not None, add, bias is not None,
            None if act is None else act.kind, rows, columns, times,
            ahead or (memory_idle and times > 1), PDL_ENABLED,
        ),
        warps=warps,
        pdl=PDL_ENABLED,
    )  # fmt: skip

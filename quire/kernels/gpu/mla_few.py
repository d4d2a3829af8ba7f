"""Queries to latent space and outputs from it for a few rows: the matrices are read once, at once.

    grid (heads, tiles of outputs, tiles of 16 rows)

A library's batched product runs a head on one or two multiprocessors; at few rows all that counts
is how many of them read. Sums are float32, rounded once, as the library does.

Axes: as in quire.kernels.mla_attention; C outputs of a program.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.mla_tile import precision
from quire.kernels.gpu.sizes import cdiv, next_power_of_2
from quire.kernels.gpu.start import kernel

ROWS = 16


@kernel("tokens")
def _to_latent(
    q_ptr,  # [T, H, P]
    up_ptr,  # [H, P, L], heads UP_HEAD apart
    out_ptr,  # [T, H, L]
    tokens,
    H: tl.constexpr,
    P: tl.constexpr,
    PP: tl.constexpr,  # power of two
    L: tl.constexpr,
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    UP_HEAD: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    h = tl.program_id(0)
    c = tl.program_id(1) * C + tl.arange(0, C)
    t = tl.program_id(2) * M + tl.arange(0, M)
    p = tl.arange(0, PP)
    w_at = up_ptr + h * UP_HEAD + p[:, None] * L + c[None, :]
    w = tl.load(w_at, mask=(p[:, None] < P) & (c[None, :] < L), other=0.0)
    real = t[:, None] < tokens
    x_at = q_ptr + t[:, None].to(tl.int64) * Q_ROW + h * Q_HEAD + p[None, :]
    x = tl.load(x_at, mask=real & (p[None, :] < P), other=0.0)
    y = tl.dot(x, w, input_precision=PRECISION)
    to = out_ptr + (t[:, None] * H + h) * L + c[None, :]
    tl.store(to, y.to(out_ptr.dtype.element_ty), mask=real & (c[None, :] < L))


@kernel("tokens")
def _from_latent(
    x_ptr,  # [T, H, L]
    up_ptr,  # [H, V, L], heads UP_HEAD apart
    out_ptr,  # [T, H * V], rows OUT_ROW apart
    tokens,
    H: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    UP_HEAD: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BL: tl.constexpr,  # latent channels at a time
    PRECISION: tl.constexpr,
):
    h = tl.program_id(0)
    c = tl.program_id(1) * C + tl.arange(0, C)
    t = tl.program_id(2) * M + tl.arange(0, M)
    real = t[:, None] < tokens
    x_at = x_ptr + (t[:, None].to(tl.int64) * H + h) * L
    w_at = up_ptr + h * UP_HEAD + c[:, None] * L
    y = tl.zeros([M, C], tl.float32)
    for low in tl.static_range(0, L, BL):
        k = low + tl.arange(0, BL)[None, :]
        w = tl.load(w_at + k, mask=c[:, None] < V, other=0.0)
        x = tl.load(x_at + k, mask=real, other=0.0)
        y = tl.dot(x, tl.trans(w), acc=y, input_precision=PRECISION)
    to = out_ptr + (t[:, None] * H + h) * V + c[None, :]
    tl.store(to, y.to(out_ptr.dtype.element_ty), mask=real & (c[None, :] < V))


def to_latent(out: Tensor, q: Tensor, keys: Tensor) -> None:
    """q [T, H, P] by keys [H, P, L] -> out [T, H, L], contiguous."""
    tokens, heads, plain = q.shape
    latent = keys.shape[2]
    wide = min(latent, 64)
    _to_latent(
        (heads, cdiv(latent, wide), cdiv(tokens, ROWS)),
        (q, keys, out),
        (tokens,),
        (
            heads,
            plain,
            max(16, next_power_of_2(plain)),
            latent,
            q.stride(0),
            q.stride(1),
            keys.stride(0),
            ROWS,
            wide,
            precision(q.dtype),
        ),
    )


def from_latent(out: Tensor, mixed: Tensor, values: Tensor) -> None:
    """mixed [T, H, L] by values [H, V, L] -> out [T, H * V]; both contiguous."""
    tokens, heads, latent = mixed.shape
    value = values.shape[1]
    wide = 16
    consts = (heads, value, latent, values.stride(0), ROWS, wide, min(latent, 256))
    _from_latent(
        (heads, cdiv(value, wide), cdiv(tokens, ROWS)),
        (mixed, values, out),
        (tokens,),
        (*consts, precision(mixed.dtype)),
    )

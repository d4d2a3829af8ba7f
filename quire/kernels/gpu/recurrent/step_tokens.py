"""Step tokens: which tokens a program of a recurrent kernel computes, and what such kernels share.

A program takes all tokens of one row, one after the other, so the bits of a token depend neither
on how its prompt is cut nor on other rows. A row of one token that reads what the row right before
it writes is computed by that row's program, which has the state in registers: so drafts are.

Long rows of some scans go in chunks instead (chunk_scan.py).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.state_rows import StateRows

TILE = 1024
"""Numbers of a state that a program has: one warp, whose sums need no barrier."""


@triton.jit
def find_tokens(sources_ptr, rows_ptr, starts_ptr, s, decodes, padding, CHAINS: tl.constexpr):
    """Return (source, target, first token, end) of row s; no tokens if another program has them.

    CHAINS: rows of one token may continue the one before.
    """
    source = tl.load(sources_ptr + s)
    target = tl.load(rows_ptr + s)
    start = tl.load(starts_ptr + s).to(tl.int64)  # T * C can pass 2**31
    end = tl.load(starts_ptr + s + 1).to(tl.int64)
    if CHAINS:
        is_continued = _continues(sources_ptr, rows_ptr, s + 1, decodes, padding)
        if _continues(sources_ptr, rows_ptr, s, decodes, padding):
            end = start
        else:
            while is_continued:
                end += 1
                is_continued = _continues(sources_ptr, rows_ptr, end, decodes, padding)
    return source, target, start, end


@triton.jit
def _continues(sources_ptr, rows_ptr, s, decodes, padding):
    live = (s > 0) & (s < decodes)
    source = tl.load(sources_ptr + s, live, -1)
    return live & (source != padding) & (source == tl.load(rows_ptr + s - 1, live, -2))


@triton.jit
def load_token(ptr, t, end, T: tl.constexpr, first, i, live):
    """Numbers first + i of token t, in rows T apart; 0 where not live, and from `end` on."""
    return tl.load(ptr + t * T + first + i, live & (t < end), 0.0)


@triton.jit
def softplus(x):
    """log(1 + e**x), by log(1 + u) = 2 artanh(u / (2 + u)): exact for tiny u as well."""
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    q = s * s
    p = q * (1.0 / 17) + 1.0 / 15
    p = p * q + 1.0 / 13
    p = p * q + 1.0 / 11
    p = p * q + 1.0 / 9
    p = p * q + 1.0 / 7
    p = p * q + 1.0 / 5
    p = p * q + 1.0 / 3
    p = p * q + 1.0
    return tl.maximum(x, 0.0) + 2.0 * s * p


@triton.jit
def sigmoid(x):
    """1 / (1 + e**-x)."""
    return 1.0 / (1.0 + tl.exp(-x))


def row_tensors(rows: StateRows) -> tuple[Tensor, Tensor, Tensor]:
    """(sources, rows, starts), as find_tokens() reads them."""
    return rows.sources, rows.rows, rows.token_starts()


def has_chains(rows: StateRows) -> bool:
    """Whether a row may read what one before it writes."""
    return rows.sources is not rows.rows


def takes(state: Tensor, tokens: tuple[Tensor, ...], params: tuple[Tensor, ...]) -> Any:
    """Whether a scan of these can run here: rows of tokens anywhere, all else packed."""
    packed = (state, *params)
    return all(t[:1].is_contiguous() for t in tokens) and all(t.is_contiguous() for t in packed)

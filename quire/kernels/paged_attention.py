"""Causal attention of the last tokens of several sequences over their paged keys and values.

    sequence s owns query rows [q_starts[s], q_starts[s+1]): the LAST of its contexts[s] tokens
    the token at position p stands in block tables[s, p // B], at offset p % B
    position p sees positions [0, p], with a window w only (p - w, p]

One contract for decoding (one row a sequence), chunks of prompts and prefix hits. Nothing gathers
a whole context: work goes by tiles of queries and chunks of keys, so memory is linear.

Axes: T query tokens, S sequences, H query heads, K kv heads, D head size, N blocks, B block size,
W width of the block table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.native.library import ATTENTION, DTYPES, Call, empty
from quire.kernels.op import op

_TILE = 256  # query rows of one sequence the reference scores at a time


def _case(
    device: torch.device,
    shape: tuple[int, int, int, int],
    rows: list[tuple[int, int]],
    dtype: torch.dtype,
    window: int | None = None,
    softcap: float | None = None,
) -> dict[str, Any]:
    """rows: (queries, context) of each sequence. Blocks before a window are given back (-1)."""
    heads, kv_heads, size, block = shape
    queries = [q for q, _ in rows]
    width = max(-(-c // block) for _, c in rows) + 1
    pool = sum(-(-c // block) for _, c in rows) + 3
    free = torch.randperm(pool)
    tables = torch.full((len(rows), width), -1, dtype=torch.int32)
    at = 0
    for s, (q, c) in enumerate(rows):
        used = -(-c // block)
        tables[s, :used] = free[at : at + used].int()
        at += used
        if window is not None:
            tables[s, : max(0, c - q - window + 1) // block] = -1
    qkv = torch.randn(sum(queries), heads + 2, size, device=device).to(dtype)
    cache = torch.randn(pool, 2, kv_heads, block, size, device=device).to(dtype)
    for s, (_, c) in enumerate(rows):  # what no token has written yet may hold anything
        if c % block:
            cache[tables[s, c // block], :, :, c % block :] = float("nan")
    return {
        "q": qkv[:, :heads],
        "cache": cache,
        "tables": tables.to(device),
        "q_starts": torch.tensor([0, *queries]).cumsum(0).int().to(device),
        "contexts": torch.tensor([c for _, c in rows], dtype=torch.int32, device=device),
        "scale": size**-0.5,
        "window": window,
        "softcap": softcap,
    }


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    bf16, fp32 = torch.bfloat16, torch.float32
    mixed = [(1, 33), (7, 7), (1, 1), (5, 70), (40, 150)]
    yield _case(device, (4, 2, 64, 16), mixed, fp32)
    yield _case(device, (4, 2, 64, 16), mixed, bf16)
    yield _case(device, (4, 4, 16, 8), mixed, fp32)
    yield _case(device, (8, 1, 128, 16), mixed, bf16)
    yield _case(device, (4, 1, 80, 16), mixed, bf16)
    yield _case(device, (2, 2, 256, 16), mixed, bf16)
    yield _case(device, (2, 1, 20, 4), mixed, fp32)
    yield _case(device, (6, 2, 32, 1), mixed, bf16)
    yield _case(device, (16, 8, 128, 16), [(1, 2300), (1, 1024), (1, 1025), (3, 1026)], bf16)
    yield _case(device, (2, 1, 64, 16), [(1, 3000)], fp32)
    yield _case(device, (4, 2, 64, 16), mixed, fp32, window=20)
    yield _case(device, (4, 2, 64, 16), [*mixed, (1, 2100), (130, 1400)], bf16, window=100)
    yield _case(device, (4, 2, 64, 16), mixed, fp32, softcap=5.0)
    yield _case(device, (4, 2, 32, 32), mixed, bf16, window=16, softcap=5.0)
    yield _case(device, (4, 2, 32, 16), mixed, torch.float16)


_run = Call(ATTENTION, "q" * 17 + "dd")
_MAX_SIZE = 1024


def _native(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    q_starts: Tensor,
    contexts: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    code, strides = DTYPES.get(q.dtype), q.stride()
    if code is None or cache.dtype != q.dtype or not cache.is_contiguous() or strides[2] != 1:
        return NotImplemented
    for index in (tables, q_starts, contexts):
        if index.dtype != torch.int32 or index.stride(-1) != 1:
            return NotImplemented
    blocks, _, kv_heads, block, size = cache.shape
    if size > _MAX_SIZE or size * q.element_size() % 4:
        return NotImplemented
    y = empty(q.shape, q.dtype)
    _run(
        q.data_ptr(), strides[0], strides[1], cache.data_ptr(),
        tables.data_ptr(), q_starts.data_ptr(), contexts.data_ptr(), y.data_ptr(),
        tables.stride(0), contexts.shape[0], q.shape[1], kv_heads, size, block, blocks, code,
        window or 0, scale, softcap or 0.0,
    )  # fmt: skip
    return y


@op(cases=_cases, native=_native)
def paged_attention(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    q_starts: Tensor,
    contexts: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend every query row to the cached tokens of its sequence.

    q: [T, H, D], may be strided. cache: [N, 2, K, B, D], the keys and values of the step written.
    tables: [S, W] int32; entries wholly before the window may be -1. q_starts: [S+1] int32.
    contexts: [S] int32, the step's tokens included. Returns a new [T, H, D] in q.dtype.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts, lengths = q_starts.tolist(), contexts.tolist()
    for s, context in enumerate(lengths):
        for row in range(starts[s], starts[s + 1], _TILE):
            stop = min(row + _TILE, starts[s + 1])
            end = context - (starts[s + 1] - stop)  # tokens the last of these rows sees
            first = max(0, end - (stop - row) - window + 1) if window is not None else 0
            k, v = _span(cache, tables[s], first, end)
            mask = _visible(stop - row, end - first, window, q.device)
            out[row:stop] = _attend(q[row:stop], k, v, mask, scale, softcap)
    return out


def _span(cache: Tensor, table: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
    """Keys and values of positions [first, end): [K, n, D] each, fp32."""
    size = cache.shape[3]
    low = first // size
    blocks = cache[table[low : -(-end // size)].long()]  # [n, 2, K, B, D]
    both = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [2, K, n * B, D]
    both = both[:, :, first - low * size : end - low * size].float()
    return both[0], both[1]


def _visible(rows: int, span: int, window: int | None, device: torch.device) -> Tensor:
    """[rows, span]: row i is position span - rows + i of the span."""
    at = torch.arange(span - rows, span, device=device)[:, None]
    key = torch.arange(span, device=device)[None]
    seen = key <= at
    return seen if window is None else seen & (key > at - window)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None
) -> Tensor:
    rows, heads, size = q.shape
    grouped = q.float().view(rows, k.shape[0], -1, size)  # [rows, K, H / K, D]
    scores = torch.einsum("rkgd,knd->kgrn", grouped, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("kgrn,knd->rkgd", weights, v).reshape(rows, heads, size).to(q.dtype)

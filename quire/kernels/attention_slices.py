"""Attention slices: queries attend to some of their keys here, to the others on other ranks.

    result    [H, S, D + 1] float32: per head and query, the mean of the values and, last, the
              base-2 logarithm of the sum of the exponentials of the scores
    combined  each rank's result, weighted by its share of the sum over all ranks

A query whose keys are all elsewhere has a logarithm of LOWEST_SUM here, and so no weight. Slices
are combined in rank order, and a sink counts once, when they are.

Axes: S queries, one of a sequence each; H query heads, K kv heads, D size of a value, R ranks, N
blocks, B block size, W width of the block table, M rows of the block table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.formats.kv_cache import CODE_LIMITS
from quire.kernels.framework.op import op
from quire.kernels.native.op_tape import refuse_recording

LOWEST_SUM = -1.0e30
"""The logarithm of a sum of no terms: finite, so that differences are."""


def _case(
    device: torch.device,
    shape: tuple[int, int, int, int],
    contexts: list[int],
    dtype: torch.dtype,
    window: int | None = None,
    softcap: float | None = None,
    *,
    shuffled: bool = False,
    code: torch.dtype | None = None,
) -> dict[str, Any]:
    heads, kv_heads, size, block = shape
    width = max(-(-c // block) for c in contexts) + 1
    tables = torch.randperm(len(contexts) * width)[: len(contexts) * width].view(-1, width).int()
    cache = torch.randn(len(contexts) * width, 2, kv_heads, block, size).to(dtype)
    for s, c in enumerate(contexts):  # slots without a token may hold any number
        if c % block:
            cache[tables[s, c // block], :, :, c % block :] = float("nan")
        if window is not None:
            tables[s, : max(0, c - window) // block] = -1
    case: dict[str, Any] = {
        "q": torch.randn(len(contexts), heads, size, device=device).to(dtype),
        "cache": cache.to(device),
        "tables": tables.to(device),
        "contexts": torch.tensor(contexts, dtype=torch.int32, device=device),
        "scale": size**-0.5,
        "window": window,
        "softcap": softcap,
    }
    if code is not None:
        case["cache"] = (cache.nan_to_num().float() * 2).to(code).to(device)
        case |= {"k_scale": 0.5, "v_scale": 0.25}
    if shuffled:
        order = torch.randperm(len(contexts))
        case |= {"tables": tables[order].to(device), "rows": order.argsort().int().to(device)}
    return case


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    bf16, fp32 = torch.bfloat16, torch.float32
    contexts = [33, 1, 0, 130, 7]
    yield _case(device, (4, 1, 16, 16), contexts, fp32)
    yield _case(device, (8, 2, 20, 8), [33, 1, 0, 70, 7], fp32, shuffled=True)
    yield _case(device, (16, 1, 64, 16), [*contexts, 2300], bf16, shuffled=True)
    yield _case(device, (6, 1, 128, 16), [1100, 64], bf16, window=40)
    yield _case(device, (4, 1, 32, 16), contexts, torch.float16, softcap=5.0)
    yield _case(device, (8, 1, 32, 16), contexts, bf16, code=torch.float8_e4m3fn)


@op(cases=_cases, gpu="attention.paged_attention_slice")
def paged_attention_slice(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    contexts: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    rows: Tensor | None = None,
    max_context: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    scales: Tensor | None = None,
) -> Tensor:
    """Attend each query to the keys of its sequence that are here: a result, [H, S, D + 1].

    q: [S, H, D]. cache: [N, 2, K, B, D]. tables: [S, W], or [M, W] with rows [S]. contexts: [S]
    int32, keys here. window: the last ones of these that are seen. max_context: a bound of contexts
    that the host has. k_scale, v_scale, scales: of codes, as in paged_attention.
    """
    refuse_recording("attention to slices")
    sequences, heads, size = q.shape
    kv_heads, block = cache.shape[2:4]
    out = torch.zeros(heads, sequences, size + 1, device=q.device)
    out[..., -1] = LOWEST_SUM
    coded = cache.dtype in CODE_LIMITS
    for s, context in enumerate(contexts.tolist()):
        if not context:
            continue
        first = 0 if window is None else max(context - window, 0)
        at = torch.arange(first, context, device=q.device)
        used = tables[s if rows is None else int(rows[s])][at // block].long()
        held = cache[used, :, :, at % block].float()  # [n, 2, K, D]
        if coded and scales is not None:
            held = held * scales[used, :, :, at % block][..., None]
        elif coded:
            held = held * held.new_tensor([k_scale, v_scale])[None, :, None, None]
        mine = q[s].float().view(kv_heads, -1, size)
        scores = torch.einsum("kgd,nkd->kgn", mine, held[:, 0]) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        total = scores.logsumexp(-1)
        mixed = torch.einsum("kgn,nkd->kgd", (scores - total[..., None]).exp(), held[:, 1])
        out[:, s, :size] = mixed.flatten(0, 1)
        out[:, s, size] = total.flatten() * math.log2(math.e)
    return out


def _combine_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for ranks, heads, rows, size, dtype in (
        (2, 4, 3, 16, torch.float32),
        (4, 3, 9, 80, torch.bfloat16),
        (3, 2, 1, 512, torch.float16),
    ):
        parts = torch.randn(ranks, heads, rows, size + 1, device=device)
        parts[0, :, 0, :size], parts[0, :, 0, size] = 0.0, LOWEST_SUM
        parts[:, :, rows // 2, :size], parts[:, :, rows // 2, size] = 0.0, LOWEST_SUM
        yield {"parts": parts, "dtype": dtype}
        yield {"parts": parts, "dtype": dtype, "sinks": torch.randn(heads, device=device)}


@op(cases=_combine_cases, gpu="attention.combine_slices")
def combine_slices(parts: Tensor, dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
    """Combine the ranks' results of these heads, [R, H, S, D + 1], to [S, H, D] of this dtype.

    sinks: [H] logits that join the sum and have no value. Queries without keys: zeros.
    """
    sums = parts[..., -1]
    top = sums.amax(0)
    weights = torch.exp2(sums - top)
    total = weights.sum(0)
    if sinks is not None:
        total = total + torch.exp2(sinks.float()[:, None] * math.log2(math.e) - top)
    mixed = torch.zeros_like(parts[0, ..., :-1])
    for weight, part in zip(weights, parts[..., :-1]):
        mixed = mixed + weight[..., None] * part
    return (mixed / total[..., None]).transpose(0, 1).to(dtype).contiguous()

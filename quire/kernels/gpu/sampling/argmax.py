"""Argmax in two launches: the greatest value of each part of a row, then its index.

Parts keep the value only; the second launch reads the one part that holds the greatest once more.
So the pass over the vocabulary does no index arithmetic, and a single row uses many processors.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel
from quire.kernels.gpu.sampling.vocab_groups import nan_max, supports


@kernel()
def _max_of_parts_kernel(
    x_ptr,  # [R, V]
    tops_ptr,  # [R, P] out
    STEP: tl.constexpr,  # of x, from row to row
    V: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_previous_kernel()
        launch_dependents()
    pid = tl.program_id(0)
    r, p = (pid // P).to(tl.int64), pid % P  # R * V can pass 2**31
    at = p * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + r * STEP + at, mask=at < V, other=float("-inf")).to(tl.float32)
    tl.store(tops_ptr + pid, nan_max(x, 0))


@kernel()
def _locate_max_kernel(
    x_ptr,  # [R, V]
    parts_ptr,  # [R, P]
    ids_ptr,  # [R] out
    tops_ptr,  # [R] out
    STEP: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    BP: tl.constexpr,  # power of two >= P
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_previous_kernel()
        launch_dependents()
    r = tl.program_id(0).to(tl.int64)  # R * V can pass 2**31
    p = tl.arange(0, BP)
    tops = tl.load(parts_ptr + r * P + p, mask=p < P, other=float("-inf"))
    top = nan_max(tops, 0)
    first = tl.min(tl.where(((tops == top) | (tops != tops)) & (p < P), p, P - 1), 0)
    at = first * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + r * STEP + at, mask=at < V, other=float("-inf")).to(tl.float32)
    found = tl.min(tl.where(((x == top) | (x != x)) & (at < V), at, V - 1), 0)
    tl.store(ids_ptr + r, found)
    tl.store(tops_ptr + r, top)


def outputs(logits: Tensor) -> tuple[Tensor, Tensor]:
    if not supports(logits):
        return NotImplemented
    rows, device = logits.shape[0], logits.device
    ids = torch.empty(rows, dtype=torch.int32, device=device)
    return ids, torch.empty(rows, dtype=torch.float32, device=device)


def launch(outs: tuple[Tensor, Tensor], logits: Tensor) -> None:
    rows, vocab = logits.shape
    if not rows:
        return
    block = 2048 if rows < 16 else 8192  # few rows: more programs than processors
    parts = cdiv(vocab, block)
    tops = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    sizes = (logits.stride(0), vocab, parts, block)
    _max_of_parts_kernel(
        (rows * parts, 1, 1), (logits, tops), (), (*sizes, PDL_ENABLED), warps=8, pdl=PDL_ENABLED
    )
    power = next_power_of_2(parts)
    _locate_max_kernel(
        (rows, 1, 1),
        (logits, tops, *outs),
        (),
        (*sizes, power, PDL_ENABLED),
        warps=8,
        pdl=PDL_ENABLED,
    )

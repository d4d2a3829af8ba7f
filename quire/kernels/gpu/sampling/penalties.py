"""Penalties on the GPU: a pass over the rows that have any; other programs return at once."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel
from quire.kernels.gpu.sampling.vocab_groups import load_penalties, penalize, table_row_of

_BLOCK = 4096


@kernel()
def _apply_penalties_kernel(
    x_ptr,  # [R, V] float32, in place
    slots_ptr,  # [R]
    table_ptr,  # [slots, WORDS] int64
    counts_ptr,  # [slots, V] int16
    STEP: tl.constexpr,  # of x, from row to row
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_previous_kernel()
        launch_dependents()
    pid = tl.program_id(0)
    parts = tl.cdiv(V, BLOCK)
    r = (pid // parts).to(tl.int64)  # R * V can pass 2**31
    if tl.load(slots_ptr + r) >= 0:
        line, slot = table_row_of(slots_ptr, table_ptr, r)
        repetition, frequency, presence = load_penalties(line)
        if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
            at = (pid % parts) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + r * STEP + at, mask=at < V)
            count = tl.load(counts_ptr + slot * V + at, mask=at < V, other=0).to(tl.int32)
            penalized = penalize(x, count, repetition, frequency, presence)
            tl.store(x_ptr + r * STEP + at, penalized, mask=(at < V) & (count != 0))


def outputs(logits: Tensor, slots: Tensor, table: Tensor, counts: Tensor) -> Tensor:
    return logits


def launch(out: Tensor, logits: Tensor, slots: Tensor, table: Tensor, counts: Tensor) -> None:
    rows, vocab = logits.shape
    if not rows:
        return
    _apply_penalties_kernel(
        (rows * cdiv(vocab, _BLOCK), 1, 1),
        (logits, slots, table, counts),
        (),
        (logits.stride(0), vocab, _BLOCK, PDL_ENABLED),
        warps=8,
        pdl=PDL_ENABLED,
    )

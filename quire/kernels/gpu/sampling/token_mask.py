"""Token mask kernel: one pass over the masked rows, which reads no logit."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel
from quire.kernels.gpu.sampling.vocab_groups import supports

_BLOCK = 4096


@kernel()
def _mask_kernel(
    x_ptr,  # [R, V], in place
    words_ptr,  # [n, W]
    rows_ptr,  # [n]; negative: padding
    STEP: tl.constexpr,  # of x, from row to row
    V: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_previous_kernel()
        launch_dependents()
    pid = tl.program_id(0)
    parts = tl.cdiv(V, BLOCK)
    i = pid // parts
    r = tl.load(rows_ptr + i).to(tl.int64)  # R * V can pass 2**31
    if r >= 0:
        at = (pid % parts) * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(words_ptr + i.to(tl.int64) * W + at // 32, mask=at < V, other=-1)
        barred = ((word >> (at % 32)) & 1) == 0
        lowest = tl.full([BLOCK], float("-inf"), tl.float32).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + r * STEP + at, lowest, mask=barred & (at < V))


def outputs(logits: Tensor, words: Tensor, rows: Tensor) -> Tensor:
    return logits if supports(logits) and words.is_contiguous() else NotImplemented


def launch(out: Tensor, logits: Tensor, words: Tensor, rows: Tensor) -> None:
    if not len(rows):
        return
    vocab = logits.shape[1]
    _mask_kernel(
        (len(rows) * cdiv(vocab, _BLOCK), 1, 1),
        (logits, words, rows),
        (),
        (logits.stride(0), vocab, words.shape[1], _BLOCK, PDL_ENABLED),
        warps=8,
        pdl=PDL_ENABLED,
    )

"""Token masks set the logits of tokens that are not allowed to -inf.

A mask is a row of 32-bit words: bit t % 32 of word t // 32 is set if token t may come next (see
quire.grammar.backends.base). Allowed logits keep their bits, whatever they are.

Axes: R rows of logits, V vocabulary, n masks, W words of one: ceil(V / 32).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.framework.op import op
from quire.kernels.native.library import DTYPES, MASK, NativeOp


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for r, v, dtype in [
        (1, 40, torch.float32),
        (3, 64, torch.bfloat16),
        (4, 4501, torch.bfloat16),
        (5, 2501, torch.float32),
        (3, 999, torch.float16),
        (33, 50_257, torch.float32),
        (64, 151_936, torch.bfloat16),
    ]:
        logits = torch.randn(r, v, device=device).to(dtype)
        logits[0, ::5], logits[-1, ::7] = -0.0, torch.inf
        rows = torch.randperm(r, device=device)[: max(1, r - 1)].int()
        if r > 3:
            rows[0] = -1
        words = torch.randint(-(2**31), 2**31, (len(rows), -(-v // 32)), device=device)
        words[-1, ::2], words[-1, 1::4] = 0, -1
        yield {"logits": logits, "words": words.int(), "rows": rows}


_run = NativeOp(MASK, "q" * 8)


def _native(logits: Tensor, words: Tensor, rows: Tensor) -> Tensor:
    code = DTYPES.get(logits.dtype)
    if code is None or logits.stride(1) != 1 or not words.is_contiguous():
        return NotImplemented
    if words.dtype != torch.int32 or rows.dtype != torch.int32 or not rows.is_contiguous():
        return NotImplemented
    _run(
        logits.data_ptr(), logits.stride(0), logits.shape[1], words.data_ptr(), words.shape[1],
        rows.data_ptr(), len(rows), code,
    )  # fmt: skip
    return logits


@op(cases=_cases, native=_native, gpu="sampling.token_mask")
def token_mask(logits: Tensor, words: Tensor, rows: Tensor) -> Tensor:
    """Change logits [R, V], any float dtype, in place, and return them.

    words: [n, W] int32. rows: [n] int32, the row of the logits that each mask is for, each at most
    once; negative: padding. Rows without a mask stay.
    """
    live = rows >= 0
    at = rows[live].long()
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = (words[live][:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]] != 0
    logits[at] = torch.where(allowed, logits[at], -torch.inf)
    return logits

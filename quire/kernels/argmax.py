"""Argmax: the greatest logit of each row, for greedy sampling and to check that a row is finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.framework.op import op


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for r, v, dtype in [
        (1, 40, torch.float32),
        (3, 5000, torch.bfloat16),
        (2, 9001, torch.float32),
        (64, 151_936, torch.bfloat16),
        (5, 262_144, torch.float16),
    ]:
        x = torch.randn(r, v, device=device).to(dtype)
        x[-1, v // 2 :] = 3.0  # equal values: the lowest id is returned
        x[-1, : v // 2] = -torch.inf
        if r > 1:
            x[0, v // 3] = torch.nan
        yield {"logits": x}


@op(cases=_cases, gpu="sampling.argmax")
def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The column of each row's greatest value (of equal ones the lowest), and that value.

    logits: [R, V], any float dtype, rows contiguous. Returns ids [R] int32 and tops [R] float32; a
    row with a NaN has the top NaN and some id in range.
    """
    ids = logits.argmax(-1)
    return ids.int(), logits.gather(1, ids[:, None])[:, 0].float()

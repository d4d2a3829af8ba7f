"""What log probabilities need of each row: its mass, how many tokens beat one, and the k best."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.kernels.op import op


class Standing(NamedTuple):
    """How the tokens of n rows stand."""

    log_totals: Tensor  # [n] float64, log(sum(exp(row)))
    greater: Tensor  # [n] int32, tokens whose logit is strictly above the chosen one's
    ids: Tensor  # [n, k] int32, the k best, best first, equal ones by id


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for r, v, k, dtype in [
        (1, 40, 3, torch.float32),
        (3, 5000, 20, torch.bfloat16),
        (2, 3001, 0, torch.float32),
        (2, 600, 600, torch.float32),
        (32, 151_936, 5, torch.bfloat16),
    ]:
        x = (3 * torch.randn(r, v, device=device)).to(dtype)
        x[0, v // 2 :] = -torch.inf
        yield {"logits": x, "chosen": torch.arange(r, device=device, dtype=torch.int32), "k": k}


@op(cases=_cases, gpu=True)
def stand(logits: Tensor, chosen: Tensor, k: int) -> Standing:
    """Where the chosen token of each row stands, and which are the k best.

    logits: [n, V], any float dtype, not changed. chosen: [n] int32 or int64. k: 0 to V.
    """
    x = logits.float()
    top = x.amax(-1, keepdim=True)
    log_totals = (x - top).exp().sum(-1, dtype=torch.float64).log() + top[:, 0]
    greater = (x > x.gather(1, chosen.long()[:, None])).sum(-1)
    ids = x.sort(dim=-1, descending=True, stable=True).indices[:, :k] if k else x[:, :0]
    return Standing(log_totals, greater.int(), ids.int())

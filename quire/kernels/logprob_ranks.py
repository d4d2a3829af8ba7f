"""Logprob ranks: log-sum-exp of each row, the rank of one token, and the k best tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.kernels.framework.op import op


class LogprobStats(NamedTuple):
    """Logprob statistics of n rows. Values are log probabilities, or logits if requested."""

    shifts: Tensor  # [n] float64: what was taken off the logits, log(sum(exp(row))) or 0
    values: Tensor  # [n] float64, of the chosen token
    ranks: Tensor  # [n] int32, 1 + tokens whose logit is strictly above the chosen one's
    top_ids: Tensor  # [n, k] int32, the k best, best first, equal ones by id
    top_values: Tensor  # [n, k] float64, their values


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
        chosen = torch.arange(r, device=device, dtype=torch.int32)
        yield {"logits": x, "chosen": chosen, "k": k, "as_logits": k == 20}


@op(cases=_cases, gpu="sampling.logprob_ranks")
def logprob_ranks(logits: Tensor, chosen: Tensor, k: int, as_logits: bool = False) -> LogprobStats:
    """The rank of the chosen token of each row, and the k best tokens.

    logits: [n, V], any float dtype, not changed. chosen: [n] int32 or int64. k: 0 to V.
    """
    x, at = logits.float(), chosen.long()[:, None]
    top = x.amax(-1, keepdim=True)
    shifts = (x - top).exp().sum(-1, dtype=torch.float64).log() + top[:, 0]
    if as_logits:
        shifts = torch.zeros_like(shifts)
    ranks = 1 + (x > x.gather(1, at)).sum(-1)
    ids = torch.zeros((len(x), 0), dtype=torch.int64, device=x.device)
    if k:
        ids = x.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    values = x.gather(1, torch.cat([at, ids], 1)).double() - shifts[:, None]
    return LogprobStats(shifts, values[:, 0], ranks.int(), ids.int(), values[:, 1:])

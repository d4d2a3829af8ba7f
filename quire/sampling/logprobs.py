"""Log probabilities: of the chosen token, of the k best, of any ids, with ranks.

Rank: 1 + the number of tokens whose logit is strictly greater, so equal tokens share the better
rank. Among equal tokens the lower id is listed first. Not here: which logits are scored (raw or
processed; quire.sampling.sampler knows). Only rows that ask are scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from quire.core.types import TokenLogprobs
from quire.sampling.rows import Scratch, joined, log_sums

Mode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]

ALL = -1
"""As a k: every token of the vocabulary."""


@dataclass(slots=True)
class Scores:
    """Scored rows, on the device until `lists`. n rows; the listed tokens are [n, C]."""

    chosen: Tensor  # [n] int64
    value: Tensor  # [n] float64
    rank: Tensor  # [n] int64
    ids: Tensor  # [n, C] int64, best first
    values: Tensor  # [n, C] float64

    def lists(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """For the host: row i lists its first counts[i] tokens (ALL: every one)."""
        chosen, value, rank = self.chosen.tolist(), self.value.tolist(), self.rank.tolist()
        ids, values = self.ids.cpu().numpy(), self.values.cpu().numpy()
        ranks = _shared_ranks(values)
        made = []
        for i, count in enumerate(counts):
            end = ids.shape[1] if count == ALL else count
            made.append(
                TokenLogprobs(
                    [chosen[i], *ids[i, :end].tolist()],
                    [value[i], *values[i, :end].tolist()],
                    [rank[i], *ranks[i, :end].tolist()],
                )
            )
        return made


def _shared_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks of rows sorted best first; equal values share the first one's."""
    ranks = np.broadcast_to(np.arange(1, values.shape[1] + 1), values.shape).copy()
    ranks[:, 1:][values[:, 1:] == values[:, :-1]] = 0
    return np.maximum.accumulate(ranks, axis=1)


def score(
    logits: Tensor, chosen: Tensor, k: int, scratch: Scratch, *, as_logits: bool = False
) -> Scores:
    """Score the chosen token and the k best of each row.

    logits: [n, V], any float dtype, not changed. chosen: [n] int64. k: 0 or more, or ALL.
    as_logits: give logits instead of logprobs.
    """
    log_total = 0.0 if as_logits else log_sums(logits, scratch)[:, None]
    value = logits.gather(1, chosen[:, None])
    ranks, ids = [], []
    for block in scratch.blocks(len(logits)):
        ranks.append(scratch.lane.greater(logits[block], value[block]))
        ids.append(_best(logits[block].float(), k, scratch))
    listed = joined(ids)
    values = logits.gather(1, listed).double() - log_total
    own = (value.double() - log_total)[:, 0]
    return Scores(chosen, own, joined(ranks) + 1, listed, values)


def score_ids(
    logits: Tensor, chosen: Tensor, ids: Sequence[int], *, as_logits: bool, scratch: Scratch
) -> TokenLogprobs:
    """Score the chosen token of one row [1, V], then the given ids in their order."""
    scores = score(logits, chosen, 0, scratch, as_logits=as_logits)
    wanted = torch.tensor([list(ids)], device=logits.device)
    log_total = 0.0 if as_logits else log_sums(logits, scratch)[:, None]
    picked = logits.gather(1, wanted)
    ordered = logits[0].float().sort().values
    beaten = torch.searchsorted(ordered, picked[0].float(), right=True)
    values = (picked.double() - log_total)[0].tolist()
    ranks = (len(ordered) - beaten + 1).tolist()
    only = scores.lists([0])[0]
    return TokenLogprobs(only.ids + list(ids), only.values + values, only.ranks + ranks)


def _best(x: Tensor, k: int, scratch: Scratch) -> Tensor:
    if k == 0:
        return torch.empty((len(x), 0), dtype=torch.int64, device=x.device)
    if k == ALL or k >= x.shape[1]:
        return x.sort(dim=-1, descending=True, stable=True).indices
    found: Tensor = scratch.lane.best(x, k)
    return found


def prompt_logprobs(
    logits: Tensor, targets: Tensor, k: int, *, mode: Mode = "raw_logprobs"
) -> list[TokenLogprobs]:
    """Score prompt tokens: logits [P, V] (any float dtype) predict targets [P] (int64).

    Goes through blocks of rows, so float32 of all of them never exists at once.
    """
    if not len(logits):
        return []
    scratch = Scratch(logits.shape[1], logits.device, len(logits))
    scores = score(logits, targets, k, scratch, as_logits=mode.endswith("_logits"))
    return scores.lists([k] * len(logits))

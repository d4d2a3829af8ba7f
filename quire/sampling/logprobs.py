"""Log probabilities: scores the chosen token, the k best, or any ids, with ranks.

Rank: 1 + the number of tokens with a strictly greater logit, so equal tokens share the better rank.
Among equal tokens the lower id is listed first. Only rows that return logprobs are scored;
quire.sampling.sampler decides whether raw or processed logits are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from quire.core.types import TokenLogprobs
from quire.kernels.logprob_ranks import LogprobStats, logprob_ranks
from quire.sampling import numpy_ops
from quire.sampling.h2d import to_host_async
from quire.sampling.row_ops import ScratchBuffers, concat_blocks, logsumexp_rows

Mode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]

ALL_TOKENS = -1
"""As a k: every token of the vocabulary."""


@dataclass(slots=True)
class LogprobScores:
    """Scored rows, on the device until fetched. n rows; the listed tokens are [n, C]."""

    chosen: Tensor  # [n] int
    chosen_logprob: Tensor  # [n] float64
    chosen_rank: Tensor  # [n] int
    ids: Tensor  # [n, C] int
    logprobs: Tensor  # [n, C] float64
    ranks: Tensor | None = None  # [n, C] int; None: the list is sorted, so they follow

    def copy_to_host(self) -> LogprobScores:
        """The same on the host, once the device's stream has come this far."""
        return LogprobScores(
            to_host_async(self.chosen),
            to_host_async(self.chosen_logprob),
            to_host_async(self.chosen_rank),
            to_host_async(self.ids),
            to_host_async(self.logprobs),
            None if self.ranks is None else to_host_async(self.ranks),
        )

    def to_lists(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """For the host: row i lists its first counts[i] tokens (ALL: every one)."""
        chosen, chosen_logprob, chosen_rank = (
            self.chosen.tolist(),
            self.chosen_logprob.tolist(),
            self.chosen_rank.tolist(),
        )
        ids, logprobs = self.ids.cpu().numpy(), self.logprobs.cpu().numpy()
        ranks = _shared_ranks(logprobs) if self.ranks is None else self.ranks.cpu().numpy()
        made = []
        for i, count in enumerate(counts):
            end = ids.shape[1] if count == ALL_TOKENS else count
            made.append(
                TokenLogprobs(
                    [chosen[i], *ids[i, :end].tolist()],
                    [chosen_logprob[i], *logprobs[i, :end].tolist()],
                    [chosen_rank[i], *ranks[i, :end].tolist()],
                )
            )
        return made


def _shared_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks of rows sorted best first; equal values share the first one's."""
    ranks = np.broadcast_to(np.arange(1, values.shape[1] + 1), values.shape).copy()
    ranks[:, 1:][values[:, 1:] == values[:, :-1]] = 0
    return np.maximum.accumulate(ranks, axis=1)


def score_top_k(
    logits: Tensor,
    chosen: Tensor,
    k: int,
    scratch: ScratchBuffers | None,
    *,
    as_logits: bool = False,
) -> LogprobScores:
    """Score the chosen token and the k best of each row.

    logits: [n, V], any float dtype, not changed. chosen: [n] int. k: 0 or more, or ALL.
    scratch: the host's; None: the logits are not on the host. as_logits: logits, not logprobs.
    """
    stats = _compute_stats(logits, chosen, k, scratch, as_logits)
    return LogprobScores(chosen, stats.values, stats.ranks, stats.top_ids, stats.top_values)


def score_ids(
    logits: Tensor,
    chosen: Tensor,
    ids: Tensor,
    scratch: ScratchBuffers | None,
    *,
    as_logits: bool = False,
) -> LogprobScores:
    """Score the chosen token of each row, then the given ids [n, C] in their order."""
    stats = _compute_stats(logits, chosen, 0, scratch, as_logits)
    picked = logits.gather(1, ids.long())
    beaten = [(logits > picked[:, c : c + 1]).sum(-1) for c in range(ids.shape[1])]
    ranks, values = torch.stack(beaten, 1) + 1, picked.double() - stats.shifts[:, None]
    return LogprobScores(chosen, stats.values, stats.ranks, ids, values, ranks)


def _compute_stats(
    logits: Tensor, chosen: Tensor, k: int, scratch: ScratchBuffers | None, as_logits: bool
) -> LogprobStats:
    wanted = logits.shape[1] if k == ALL_TOKENS else min(k, logits.shape[1])
    if scratch is None:
        return logprob_ranks(logits, chosen, wanted, as_logits)
    value = logits.gather(1, chosen[:, None])
    greater, ids = [], []
    for block in scratch.blocks(len(logits)):
        greater.append(numpy_ops.count_greater(logits[block], value[block]))
        ids.append(_top_ids(logits[block].float(), wanted))
    listed = concat_blocks(ids)
    shifts = torch.zeros((), dtype=torch.float64) if as_logits else logsumexp_rows(logits, scratch)
    shifts = shifts.expand(len(logits))
    values = logits.gather(1, listed).double() - shifts[:, None]
    own = value[:, 0].double() - shifts
    return LogprobStats(shifts, own, concat_blocks(greater) + 1, listed, values)


def _top_ids(x: Tensor, k: int) -> Tensor:
    if k == 0:
        return torch.empty((len(x), 0), dtype=torch.int64, device=x.device)
    if k == x.shape[1]:
        return x.sort(dim=-1, descending=True, stable=True).indices
    found: Tensor = numpy_ops.top_k_columns(x, k)
    return found


def prompt_scores(
    logits: Tensor, targets: Tensor, k: int, *, mode: Mode = "raw_logprobs"
) -> LogprobScores:
    """Score prompt tokens: logits [P, V] (any float dtype) predict targets [P] (int64)."""
    rows, vocab = logits.shape
    scratch = ScratchBuffers(vocab, max(1, rows)) if logits.is_cpu else None
    return score_top_k(logits, targets, k, scratch, as_logits=mode.endswith("_logits"))

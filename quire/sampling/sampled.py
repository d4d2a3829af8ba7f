"""What one sampling chose: on the device (Sampled), and on its way to the host (Fetched)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from quire.core.types import TokenLogprobs
from quire.sampling.logprobs import Scores
from quire.sampling.transfer import fetching


@dataclass(slots=True)
class Scored:
    """The logprobs of some rows."""

    rows: list[int]
    count: int  # tokens to list; ALL: every one
    scores: Scores


@dataclass(slots=True)
class Fetched:
    """Results in host memory. On a GPU they are there only when the stream has passed the copies:
    wait for an event recorded after `Sampled.fetch` before reading.
    """

    _ids: Tensor
    _tops: Tensor
    _faults: dict[int, str]
    _scored: list[Scored]

    def token_ids(self) -> list[int]:
        """One per row."""
        ids: list[int] = self._ids.tolist()
        return ids

    @property
    def tops(self) -> np.ndarray:
        """Each row's best logit."""
        return self._tops.numpy()

    @property
    def errors(self) -> dict[int, str]:
        """Row -> why its sequence must end. Its token means nothing."""
        return faults_of(self._tops.numpy()) | self._faults

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Row -> logprobs, of the rows that asked."""
        found: dict[int, TokenLogprobs] = {}
        for one in self._scored:
            found.update(zip(one.rows, one.scores.lists([one.count] * len(one.rows))))
        return found


@dataclass(slots=True)
class Sampled:
    """What one sampling chose. Reading `errors` or logprobs here waits for the device."""

    token_ids: Tensor  # [R] on the device; nobody may write to it
    tops: Tensor  # [R] each row's best logit: not finite if the row is spoilt
    faults: dict[int, str] = field(default_factory=dict)
    scored: list[Scored] = field(default_factory=list)

    def fetch(self) -> Fetched:
        """Start the copies to the host."""
        scored = [Scored(one.rows, one.count, one.scores.fetch()) for one in self.scored]
        return Fetched(fetching(self.token_ids), fetching(self.tops), self.faults, scored)

    @property
    def errors(self) -> dict[int, str]:
        """Row -> why its sequence must end. Its token means nothing."""
        return faults_of(self.tops.cpu().numpy()) | self.faults

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Row -> logprobs, of the rows that asked."""
        return Fetched(self.token_ids, self.tops, {}, self.scored).logprobs()


def faults_of(tops: np.ndarray) -> dict[int, str]:
    """What is wrong with the rows whose best logit is not finite."""
    finite = np.isfinite(tops)
    if finite.all():
        return {}
    return {row: _spoilt(float(tops[row])) for row in np.flatnonzero(~finite).tolist()}


def _spoilt(top: float) -> str:
    if top == -np.inf:
        return "no token is allowed: every logit is -inf"
    return f"the model's logits are not finite ({top})"

"""What one sampling chose: on the device (Sampled), and on its way to the host (Fetched)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

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


class Verdicts(NamedTuple):
    """Rows whose sequences must end, and why; a row is in one of them at most."""

    errors: dict[int, str]  # what was done for this row raised
    refusals: dict[int, str]  # its request leaves no token
    spoilt: dict[int, str]  # its logits are no numbers

    @property
    def all(self) -> dict[int, str]:
        return {**self.errors, **self.refusals, **self.spoilt}


@dataclass(slots=True)
class Fetched:
    """Results in host memory. On a GPU they are there only when the stream has passed the copies:
    wait for an event recorded after `Sampled.fetch` before reading.
    """

    _ids: Tensor
    _tops: Tensor
    _faults: dict[int, str]
    _banning: frozenset[int]
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
        return self.verdicts.all

    @property
    def verdicts(self) -> Verdicts:
        """Of the rows whose tokens mean nothing."""
        return verdicts_of(self._tops.numpy(), self._faults, self._banning)

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Row -> logprobs, of the rows that asked."""
        found: dict[int, TokenLogprobs] = {}
        for one in self._scored:
            found.update(zip(one.rows, one.scores.lists([one.count] * len(one.rows))))
        return found


@dataclass(slots=True)
class Sampled:
    """What one sampling chose. Reading `verdicts` or logprobs here waits for the device."""

    token_ids: Tensor  # [R] on the device; nobody may write to it
    tops: Tensor  # [R] each row's best logit: not finite if the row is spoilt
    faults: dict[int, str] = field(default_factory=dict)  # rows that raised
    scored: list[Scored] = field(default_factory=list)
    banning: frozenset[int] = frozenset()  # rows whose requests may leave no token

    def fetch(self) -> Fetched:
        """Start the copies to the host."""
        scored = [Scored(one.rows, one.count, one.scores.fetch()) for one in self.scored]
        ids, tops = fetching(self.token_ids), fetching(self.tops)
        return Fetched(ids, tops, self.faults, self.banning, scored)

    @property
    def errors(self) -> dict[int, str]:
        """Row -> why its sequence must end. Its token means nothing."""
        return self.verdicts.all

    @property
    def verdicts(self) -> Verdicts:
        """Of the rows whose tokens mean nothing."""
        return verdicts_of(self.tops.cpu().numpy(), self.faults, self.banning)

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Row -> logprobs, of the rows that asked."""
        return Fetched(self.token_ids, self.tops, {}, frozenset(), self.scored).logprobs()


NOTHING_LEFT = (
    "no token is allowed: logit_bias, allowed_token_ids, bad_words, min_tokens or a logits "
    "processor leave none"
)


def verdicts_of(tops: np.ndarray, faults: Mapping[int, str], banning: AbstractSet[int]) -> Verdicts:
    """tops: each row's best logit. banning: rows whose requests may leave no token."""
    made = Verdicts(dict(faults), {}, {})
    finite = np.isfinite(tops)
    if finite.all():
        return made
    for row in np.flatnonzero(~finite).tolist():
        if row in faults:
            continue
        if tops[row] == -np.inf and row in banning:
            made.refusals[row] = NOTHING_LEFT
        else:
            made.spoilt[row] = f"the model's logits are not finite ({_name(float(tops[row]))})"
    return made


def _name(top: float) -> str:
    return "every logit is -inf" if top == -np.inf else str(top)

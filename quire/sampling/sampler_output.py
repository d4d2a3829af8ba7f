"""Sampler output: what one sampling chose, on the device and on its way to the host."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from quire.core.types import TokenLogprobs
from quire.sampling.h2d import to_host_async
from quire.sampling.logprobs import LogprobScores


@dataclass(slots=True)
class ScoredRows:
    """The logprobs of some rows."""

    rows: list[int]
    count: int  # tokens to list; ALL: every one
    scores: LogprobScores


class RowErrors(NamedTuple):
    """Rows with sequences that must end, and why; a row is in at most one of them."""

    errors: dict[int, str]  # its sampling raised
    refusals: dict[int, str]  # its request leaves no token
    non_finite: dict[int, str]  # its logits are not finite

    @property
    def all(self) -> dict[int, str]:
        return {**self.errors, **self.refusals, **self.non_finite}


@dataclass(slots=True)
class HostSamplerOutput:
    """Results in host memory. On a GPU they are there only when the stream has passed the copies:
    wait for an event recorded after `SamplerOutput.copy_to_host` before reading.
    """

    _ids: Tensor
    _top_logits: Tensor
    _row_errors: dict[int, str]
    _maskable_rows: frozenset[int]
    _scored: list[ScoredRows]

    def token_ids(self) -> list[int]:
        """One per row."""
        ids: list[int] = self._ids.tolist()
        return ids

    @property
    def top_logits(self) -> np.ndarray:
        """Each row's best logit."""
        return self._top_logits.numpy()

    @property
    def all_errors(self) -> dict[int, str]:
        """Row -> why its sequence must end. Its token must not be used."""
        return self.row_errors.all

    @property
    def row_errors(self) -> RowErrors:
        """The rows with tokens that must not be used."""
        return find_row_errors(self._top_logits.numpy(), self._row_errors, self._maskable_rows)

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Row -> logprobs, of the rows that return them."""
        found: dict[int, TokenLogprobs] = {}
        for one in self._scored:
            found.update(zip(one.rows, one.scores.to_lists([one.count] * len(one.rows))))
        return found


@dataclass(slots=True)
class SamplerOutput:
    """What one sampling chose. Reading `row_errors` or logprobs here waits for the device."""

    token_ids: Tensor  # [R] on the device; read-only
    top_logits: Tensor  # [R] each row's best logit: not finite if its logits are not
    raised: dict[int, str] = field(default_factory=dict)  # rows that raised
    scored: list[ScoredRows] = field(default_factory=list)
    maskable_rows: frozenset[int] = frozenset()  # rows whose requests may leave no token

    def copy_to_host(self) -> HostSamplerOutput:
        """Start the copies to the host."""
        scored = [ScoredRows(one.rows, one.count, one.scores.copy_to_host()) for one in self.scored]
        ids, top_logits = to_host_async(self.token_ids), to_host_async(self.top_logits)
        return HostSamplerOutput(ids, top_logits, self.raised, self.maskable_rows, scored)

    @property
    def all_errors(self) -> dict[int, str]:
        """Row -> why its sequence must end. Its token must not be used."""
        return self.row_errors.all

    @property
    def row_errors(self) -> RowErrors:
        """The rows with tokens that must not be used."""
        return find_row_errors(self.top_logits.cpu().numpy(), self.raised, self.maskable_rows)

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Row -> logprobs, of the rows that return them."""
        return HostSamplerOutput(
            self.token_ids, self.top_logits, {}, frozenset(), self.scored
        ).logprobs()


NO_TOKEN_ALLOWED = (
    "no token is allowed: logit_bias, allowed_token_ids, bad_words, min_tokens or a logits "
    "processor leave none"
)


def find_row_errors(
    top_logits: np.ndarray, raised: Mapping[int, str], maskable_rows: AbstractSet[int]
) -> RowErrors:
    """top_logits: each row's best logit. maskable_rows: rows that may be left without a token."""
    made = RowErrors(dict(raised), {}, {})
    finite = np.isfinite(top_logits)
    if finite.all():
        return made
    for row in np.flatnonzero(~finite).tolist():
        if row in raised:
            continue
        if top_logits[row] == -np.inf and row in maskable_rows:
            made.refusals[row] = NO_TOKEN_ALLOWED
        else:
            made.non_finite[row] = (
                f"the model's logits are not finite ({_describe(float(top_logits[row]))})"
            )
    return made


def _describe(top: float) -> str:
    return "every logit is -inf" if top == -np.inf else str(top)

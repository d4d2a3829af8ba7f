"""Batch sampling plan: what sampling one batch of slots needs, without its logits and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from quire.core.params import SamplingParams
from quire.sampling.row_ops import ScratchBuffers
from quire.sampling.steps.base import LogitsEdit, SlotBatch

ChooserRows = Any
"""A batch's rows as a chooser reads them; each chooser has its own type."""


class TokenChooser(Protocol):
    """Chooses tokens on one kind of device. Rows do not affect each other."""

    @property
    def scratch(self) -> ScratchBuffers | None:
        """Buffers for scoring on the host; None: an op scores."""
        ...

    def join(self, slot: int, params: SamplingParams, seed: int) -> None:
        """A sequence takes the slot."""
        ...

    def prepare_rows(
        self, batch: SlotBatch, params: list[SamplingParams], scaled: bool
    ) -> ChooserRows:
        """Prepare a batch, after its slots have joined.

        scaled: logits are already divided by the temperature.
        """
        ...

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and best logits if every row takes the greatest."""
        ...

    def choose(
        self, logits: Tensor, rows: ChooserRows, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor, Any]:
        """Ids and best logits of all rows, and what `processed` needs of this choice."""
        ...

    def processed(self, logits: Tensor, rows: ChooserRows, choice: Any) -> Tensor:
        """What the tokens were chosen from: [R, V] float32, -inf where cut."""
        ...


class LogprobRequest(NamedTuple):
    """The logprobs of a row: of the k best tokens, or of these ids."""

    k: int
    ids: tuple[int, ...] | None


@dataclass(slots=True)
class LogprobGroup:
    """Rows with the same request, scored together so that none pays for another's k."""

    request: LogprobRequest
    rows: list[int]
    at: Tensor | None  # the same on the device; None: all, in order
    ids: Tensor | None  # [1, C]: the ids to score


@dataclass(slots=True)
class BatchSamplingPlan:
    """Made once for a batch and reused while the same slots come back."""

    slots: tuple[int, ...]
    edits: list[LogitsEdit]
    has_random: bool  # some row draws
    chooser_rows: ChooserRows
    logprob_groups: list[LogprobGroup]
    optimistic_rows: frozenset[int]  # rows that may draw before they are masked, and draw again
    scale: Tensor | None  # [R, 1] temperatures, if processors must see scaled logits
    row_errors: dict[int, str]  # rows that could not be joined
    maskable_rows: frozenset[int]  # rows that may leave no token
    rank0_rows: Tensor | None  # rows of which all ranks take rank 0's token

    @property
    def is_all_greedy(self) -> bool:
        return not (self.has_random or self._is_particular)

    @property
    def needs_all_logits(self) -> bool:
        """Some row needs more than its greatest logit and the sums of weights."""
        return self._is_particular or self.scale is not None or self.chooser_rows.needs_all_logits

    @property
    def _is_particular(self) -> bool:
        edited = bool(self.edits or self.logprob_groups or self.row_errors)
        return edited or self.rank0_rows is not None


def logprob_request_of(p: SamplingParams) -> LogprobRequest | None:
    """The logprobs of a request; None: none."""
    if p.logprob_token_ids:
        return LogprobRequest(0, tuple(p.logprob_token_ids))
    return None if p.logprobs is None else LogprobRequest(p.logprobs, None)


def group_logprob_requests(batch: SlotBatch, params: list[SamplingParams]) -> list[LogprobGroup]:
    """The rows with logprobs, by request."""
    groups: dict[LogprobRequest, list[int]] = {}
    for row, p in enumerate(params):
        request = logprob_request_of(p)
        if request is not None:
            groups.setdefault(request, []).append(row)
    return [
        LogprobGroup(
            request,
            rows,
            None if len(rows) == len(params) else batch.tensor(rows),
            None if request.ids is None else batch.tensor([list(request.ids)]),
        )
        for request, rows in groups.items()
    ]

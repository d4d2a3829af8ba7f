"""All that sampling one batch of slots needs, but its logits and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from quire.core.params import SamplingParams
from quire.sampling.row_ops import ScratchBuffers
from quire.sampling.steps.base import LogitsEdit, SlotBatch

ChooserRows = Any
"""What a lane needs to know of a batch's rows."""


class TokenChooser(Protocol):
    """How tokens are chosen on one kind of device. Rows do not touch each other."""

    @property
    def scratch(self) -> ScratchBuffers | None:
        """What the host scores with; None: scored by an op."""
        ...

    def join(self, slot: int, params: SamplingParams, seed: int) -> None:
        """A sequence takes the slot."""
        ...

    def prepare_rows(
        self, batch: SlotBatch, params: list[SamplingParams], scaled: bool
    ) -> ChooserRows:
        """Make ready for a batch, after its slots have joined.

        scaled: logits will come divided by the temperature.
        """
        ...

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and best logits when every row takes the greatest."""
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
    """The logprobs a row wants: of the k best, or of these ids."""

    k: int
    ids: tuple[int, ...] | None


@dataclass(slots=True)
class LogprobGroup:
    """Rows that want the same, scored together so that none pays for another's k."""

    request: LogprobRequest
    rows: list[int]
    at: Tensor | None  # the same on the device; None: all, in order
    ids: Tensor | None  # [1, C]: the ids wanted


@dataclass(slots=True)
class BatchSamplingPlan:
    """Made once for a batch and used while the same slots come back."""

    slots: tuple[int, ...]
    edits: list[LogitsEdit]
    has_random: bool  # some row draws
    chooser_rows: ChooserRows
    logprob_groups: list[LogprobGroup]
    optimistic_rows: frozenset[
        int
    ]  # rows whose tokens are drawn of their logits alone, and may be again
    scale: Tensor | None  # [R, 1] temperatures, if processors must see scaled logits
    row_errors: dict[int, str]  # rows that could not be joined
    maskable_rows: frozenset[int]  # rows that may leave no token

    @property
    def is_all_greedy(self) -> bool:
        return not (self.edits or self.has_random or self.logprob_groups or self.row_errors)


def logprob_request_of(p: SamplingParams) -> LogprobRequest | None:
    """What a request wants; None: no logprobs."""
    if p.logprob_token_ids:
        return LogprobRequest(0, tuple(p.logprob_token_ids))
    return None if p.logprobs is None else LogprobRequest(p.logprobs, None)


def group_logprob_requests(batch: SlotBatch, params: list[SamplingParams]) -> list[LogprobGroup]:
    """The rows that want logprobs, by what they want."""
    groups: dict[LogprobRequest, list[int]] = {}
    for row, p in enumerate(params):
        ask = logprob_request_of(p)
        if ask is not None:
            groups.setdefault(ask, []).append(row)
    return [
        LogprobGroup(
            ask,
            rows,
            None if len(rows) == len(params) else batch.tensor(rows),
            None if ask.ids is None else batch.tensor([list(ask.ids)]),
        )
        for ask, rows in groups.items()
    ]

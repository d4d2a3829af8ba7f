"""All that sampling one batch of slots needs, but its logits and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from quire.core.params import SamplingParams
from quire.sampling.rows import Scratch
from quire.sampling.steps.base import Batch, Edit

Rows = Any
"""What a lane needs to know of a batch's rows."""


class Lane(Protocol):
    """How tokens are chosen on one kind of device. Rows do not touch each other."""

    @property
    def scratch(self) -> Scratch | None:
        """What the host scores with; None: scored by an op."""
        ...

    def join(self, slot: int, params: SamplingParams, seed: int) -> None:
        """A sequence takes the slot."""
        ...

    def rows(self, batch: Batch, params: list[SamplingParams], scaled: bool) -> Rows:
        """Make ready for a batch, after its slots have joined.

        scaled: logits will come divided by the temperature.
        """
        ...

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and best logits when every row takes the greatest."""
        ...

    def choose(
        self, logits: Tensor, rows: Rows, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor, Any]:
        """Ids and best logits of all rows, and what `processed` needs of this choice."""
        ...

    def processed(self, logits: Tensor, rows: Rows, choice: Any) -> Tensor:
        """What the tokens were chosen from: [R, V] float32, -inf where cut."""
        ...


class Ask(NamedTuple):
    """The logprobs a row wants: of the k best, or of these ids."""

    k: int
    ids: tuple[int, ...] | None


@dataclass(slots=True)
class Asking:
    """Rows that want the same, scored together so that none pays for another's k."""

    ask: Ask
    rows: list[int]
    at: Tensor | None  # the same on the device; None: all, in order
    ids: Tensor | None  # [1, C]: the ids wanted


@dataclass(slots=True)
class Recipe:
    """Made once for a batch and used while the same slots come back."""

    slots: tuple[int, ...]
    edits: list[Edit]
    random: bool  # some row draws
    rows: Rows
    asking: list[Asking]
    ventures: frozenset[int]  # rows whose tokens are drawn of their logits alone, and may be again
    scale: Tensor | None  # [R, 1] temperatures, if processors must see scaled logits
    faults: dict[int, str]  # rows that could not be joined
    banning: frozenset[int]  # rows that may leave no token

    @property
    def simple(self) -> bool:
        return not (self.edits or self.random or self.asking or self.faults)


def ask_of(p: SamplingParams) -> Ask | None:
    """What a request wants; None: no logprobs."""
    if p.logprob_token_ids:
        return Ask(0, tuple(p.logprob_token_ids))
    return None if p.logprobs is None else Ask(p.logprobs, None)


def group_asks(batch: Batch, params: list[SamplingParams]) -> list[Asking]:
    """The rows that want logprobs, by what they want."""
    groups: dict[Ask, list[int]] = {}
    for row, p in enumerate(params):
        ask = ask_of(p)
        if ask is not None:
            groups.setdefault(ask, []).append(row)
    return [
        Asking(
            ask,
            rows,
            None if len(rows) == len(params) else batch.tensor(rows),
            None if ask.ids is None else batch.tensor([list(ask.ids)]),
        )
        for ask, rows in groups.items()
    ]

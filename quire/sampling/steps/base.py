"""Contract of a sampling step: changes the logits of the rows that set one parameter.

A `SamplingStep` owns the per-slot state of one parameter. For a batch it makes a `LogitsEdit`,
which holds the device tensors of just the rows concerned and is reused while the batch stays the
same. No row concerned: no edit, no cost. Neutral parameters change nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from quire.sampling.h2d import to_device
from quire.sampling.slot_join import SlotJoin


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """Which slot each row of the logits belongs to."""

    slots: tuple[int, ...]
    vocab: int
    device: torch.device

    def rows_in(self, members: Container[int]) -> list[tuple[int, int]]:
        """(row, slot) of the rows whose slot is one of these."""
        return [(row, slot) for row, slot in enumerate(self.slots) if slot in members]

    def flat_indices(self, row: int, ids: Iterable[int]) -> list[int]:
        """Indices of tokens in the flattened logits. Tokens without a logit are left out: their
        index would be in another row.
        """
        return [row * self.vocab + i for i in ids if i < self.vocab]

    def tensor(self, values: Sequence[int] | Sequence[float] | Sequence[list[int]]) -> Tensor:
        """Values on the device: int64 or float32."""
        return to_device(values, self.device)


class LogitsEdit:
    """One step's work on one batch. Used for every sampling while the batch stays the same."""

    def is_due(self, positions: Sequence[int]) -> bool:
        """Whether there is anything to do now. positions: outputs each row has already."""
        return True

    def apply(self, logits: Tensor, positions: Sequence[int], errors: dict[int, str]) -> None:
        """Change logits [R, V] float32 in place. errors: add row -> why it must end."""
        raise NotImplementedError

    def on_sampled(self, token_ids: Tensor) -> None:
        """Record what was chosen: token_ids [R] int64 on the device."""


class SamplingStep(Protocol):
    """The state of one sampling parameter over all slots."""

    reads_outputs: ClassVar[bool]
    """Whether its edits depend on the outputs before a token, not only on their number."""

    def join(self, joined: SlotJoin) -> None:
        """A sequence takes the slot `joined.slot`."""
        ...

    def leave(self, slot: int) -> None:
        """The slot is empty; unknown slots are ignored."""
        ...

    def applies_to(self, slot: int) -> bool:
        """Whether the slot's sequence sets this parameter."""
        ...

    def build_edit(self, batch: SlotBatch) -> LogitsEdit | None:
        """The work on this batch; None if no row needs any."""
        ...

"""Forced tokens: what a model's generation config forces or bans, at the first or last token.

A row is concerned at few positions, or at all if tokens are banned everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from quire.core.types import ForcedTokens
from quire.sampling.slot_join import SlotJoin
from quire.sampling.steps.base import LogitsEdit, SlotBatch


@dataclass(slots=True)
class ForcedTokenMasks:
    """request.forced: all tokens but forced ones are masked, and banned ones are."""

    reads_outputs: ClassVar = False

    _rules: dict[int, tuple[int, ForcedTokens]] = field(default_factory=dict)

    def join(self, joined: SlotJoin) -> None:
        self._rules.pop(joined.slot, None)
        if joined.forced is not None:
            self._rules[joined.slot] = joined.prompt_len, joined.forced

    def leave(self, slot: int) -> None:
        self._rules.pop(slot, None)

    def applies_to(self, slot: int) -> bool:
        return slot in self._rules

    def build_edit(self, batch: SlotBatch) -> LogitsEdit | None:
        rows = [(row, *self._rules[slot]) for row, slot in batch.rows_in(self._rules)]
        return _ForcedTokensEdit(batch, rows) if rows else None


class _ForcedTokensEdit(LogitsEdit):
    """rows: (row, length of the prompt, rules)."""

    def __init__(self, batch: SlotBatch, rows: list[tuple[int, int, ForcedTokens]]) -> None:
        self._batch, self._rows = batch, rows

    def is_due(self, positions: Sequence[int]) -> bool:
        return any(
            rules.banned_at(at) or rules.allowed_at(at) is not None
            for at, _, rules in self._now(positions)
        )

    def apply(self, logits: Tensor, positions: Sequence[int], errors: dict[int, str]) -> None:
        banned: list[int] = []
        forced: list[int] = []  # rows
        kept: list[int] = []
        for at, row, rules in self._now(positions):
            allowed = rules.allowed_at(at)
            if allowed is None:
                banned += self._batch.flat_indices(row, rules.banned_at(at))
            else:
                forced.append(row)
                kept += self._batch.flat_indices(row, sorted(allowed))
        flat = logits.view(-1)
        flat.index_fill_(0, self._batch.tensor(banned).long(), -torch.inf)
        logits.index_fill_(0, self._batch.tensor(forced).long(), -torch.inf)
        flat.index_fill_(0, self._batch.tensor(kept).long(), 0.0)

    def _now(self, positions: Sequence[int]) -> list[tuple[int, int, ForcedTokens]]:
        return [(length + positions[row], row, rules) for row, length, rules in self._rows]

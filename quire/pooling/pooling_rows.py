"""Pooling rows: which tokens of a step belong to which pooled result. Plain data, made by the core.

Axes: P pooled rows of the step.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import msgspec

from quire.config.engine_config import PoolingTask
from quire.core.types import Pooling

SEQUENCE_TASKS = ("embed", "classify")
"""One result for a sequence; the other tasks have one for each of its tokens."""


class ResultKind(NamedTuple):
    """What is computed of pooled states. Rows of one kind are computed together."""

    task: PoolingTask
    use_activation: bool
    dimensions: int | None
    columns: tuple[int, ...]

    @classmethod
    def of(cls, pooling: Pooling) -> ResultKind:
        return cls(
            cast(PoolingTask, pooling.task),  # those to align are not pooled
            pooling.use_activation,
            pooling.dimensions,
            pooling.returned_token_ids,
        )


class PoolingRows(msgspec.Struct, frozen=True, array_like=True):
    """The pooled rows of one step, each the next tokens of a sequence."""

    kinds: list[ResultKind]  # distinct ones
    kind_of: list[int]  # [P] indexes into kinds
    slots: list[int]  # [P]
    firsts: list[int]  # [P] index of the row's first token among the step's T tokens
    counts: list[int]  # [P] tokens in this step
    starts: list[int]  # [P] tokens of the sequence before this step
    is_last: list[bool]  # [P] whether the sequence ends with this step
    skips: list[int]  # [P] leading tokens of the sequence that do not count
    tagged: dict[int, list[int]]
    """Row -> which of its tokens have a result, counted from its first; without: all of them."""

    def add(self, slot: int, first: int, start: int, count: int, last: bool, of: Pooling) -> None:
        """Add a row."""
        kind = ResultKind.of(of)
        if self.kinds and self.kinds[-1] == kind:
            index = len(self.kinds) - 1
        elif kind in self.kinds:
            index = self.kinds.index(kind)
        else:
            index = len(self.kinds)
            self.kinds.append(kind)
        self.kind_of.append(index)
        self.slots.append(slot)
        self.firsts.append(first)
        self.counts.append(count)
        self.starts.append(start)
        self.is_last.append(last)
        self.skips.append(of.skip_tokens)

    def __len__(self) -> int:
        return len(self.slots)


def no_rows() -> PoolingRows:
    """Return rows to add to."""
    return PoolingRows([], [], [], [], [], [], [], [], {})

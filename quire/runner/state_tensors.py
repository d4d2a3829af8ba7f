"""State tensors of one device: rows of slots, of checkpoints, and one for rows that pad a step.

They are attached to the model, as other memory is that only some models have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from quire.config.memory.state_layout import StateFacts, state_rows
from quire.kernels.state_rows import StateRows
from quire.models.base import LanguageModel, StateStep
from quire.runner.step_batch import StepBatch
from quire.sampling.h2d import to_device


class _DraftRows(NamedTuple):
    """Of the tokens of a step that are drafts, and the groups of StateRows.order."""

    tokens: Tensor  # [n] int64
    sources: Tensor  # [n] int64, the row that each reads
    rows: Tensor  # [n] int64, the row that each writes
    order: tuple[Tensor, ...]


class StateTensors:
    """Owns the states; recurrent layers write those of a step's rows."""

    def __init__(
        self,
        layers: Sequence[StateFacts],
        slots: int,
        checkpoints: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._slots, self._device = slots, device
        self._rows = rows = state_rows(slots, checkpoints)
        self._conv = [torch.zeros((rows, *one.conv), dtype=dtype, device=device) for one in layers]
        self._recurrent = [
            torch.zeros((rows, *one.recurrent), device=device)
            if one.recurrent
            else torch.empty(0, device=device)
            for one in layers
        ]
        self._tensors = [*self._conv, *(one for one in self._recurrent if one.numel())]
        self._spans: tuple[tuple[int, int], ...] = ()
        self._drafts: _DraftRows | None = None
        self._draft_rows: Tensor | None = None  # [2, rows] int64; -1: as without drafts
        self._has_drafts = False
        self._table: Any = None
        sizes = [one[0].nbytes for one in self._tensors]  # of a stage without such layers: none
        if device.type != "cpu" and sizes and not any(size % 16 for size in sizes):
            from quire.kernels.gpu.attention.block_copy import BlockCopyTable

            self._table = BlockCopyTable.build(self._tensors, device)

    def reserve_draft_rows(self, rows: int) -> None:
        """Have steps of up to so many rows read at a fixed address which state each reads and
        writes, as graphs of steps with drafts do."""
        self._draft_rows = torch.full((2, rows), -1, dtype=torch.int64, device=self._device)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(one.nbytes for one in self._tensors)

    def begin(self, slots: Sequence[int], checkpoints: Sequence[int]) -> None:
        """Set the states of slots: copies of checkpoints, or zeros where these are negative."""
        zeros = [slot for slot, row in zip(slots, checkpoints) if row < 0]
        copied = [(slot, row) for slot, row in zip(slots, checkpoints) if row >= 0]
        sources = [self._slots + row for _, row in copied]
        targets = [slot for slot, _ in copied]
        if self._table is not None:  # no GPU kernel writes the row of padding: it has zeros
            self._copy(sources + [self._rows - 1] * len(zeros), targets + zeros)
            return
        if zeros:
            at = to_device(zeros, self._device)
            for tensor in self._tensors:
                tensor.index_fill_(0, at, 0)
        self._copy(sources, targets)

    def save(self, slots: Sequence[int], checkpoints: Sequence[int]) -> None:
        """Copy the states of slots to checkpoints."""
        self._copy(slots, [self._slots + row for row in checkpoints])

    def _copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows to others; none is both read and written."""
        if not sources:
            return
        if self._table is not None:
            from quire.kernels.gpu.attention.block_copy import copy_blocks

            pairs = np.stack([sources, targets], axis=1).astype(np.int32).reshape(-1)
            copy_blocks(self._table, self._table, to_device(pairs, self._device), len(sources))
            return
        source, target = (to_device(list(one), self._device) for one in (sources, targets))
        for tensor in self._tensors:
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    def set_batch(self, batch: StepBatch) -> None:
        """Take what the host knows of a step's rows: those of several tokens."""
        starts, first = batch.q_starts.tolist(), batch.num_decodes
        self._spans = tuple(zip(starts[first:-1], starts[first + 1 :]))
        self._drafts = None
        if self._draft_rows is not None and self._has_drafts:
            self._draft_rows.fill_(-1)
            self._has_drafts = False

    def set_drafts(
        self, batch: StepBatch, slots: Sequence[int], checkpoints: Sequence[Sequence[int]]
    ) -> None:
        """Take where the step keeps the states after drafts, so that none is lost: after the first
        token of a row its slot has the state, and after each draft a checkpoint."""
        if not slots:
            return
        first_of = {slot: i for i, slot in enumerate(batch.slots[: batch.num_decodes].tolist())}
        groups: list[list[int]] = []
        tokens: list[int] = []
        sources: list[int] = []
        rows: list[int] = []
        for slot, own in zip(slots, checkpoints):
            first = first_of[slot] - len(own)
            targets = [self._slots + row for row in own]
            sources += [slot, *targets[:-1]]
            rows += targets
            for j in range(len(own)):
                tokens.append(first + 1 + j)
                if j == len(groups):
                    groups.append([])
                groups[j].append(first + 1 + j)
        at, read, written = (to_device(one, self._device) for one in (tokens, sources, rows))
        if self._draft_rows is not None:
            self._draft_rows.index_copy_(1, at, torch.stack([read, written]))
            self._has_drafts = True
            return
        drafts = set(tokens)
        others = [i for i in range(batch.num_decodes) if i not in drafts]
        order = tuple(to_device(one, self._device) for one in (others, *groups))
        self._drafts = _DraftRows(at, read, written, order)

    @property
    def keeps_drafts(self) -> bool:
        """Whether the step keeps states after drafts, by rows that the host gave."""
        return self._drafts is not None

    def rows_of(self, slots: Tensor) -> Tensor:
        """Return the rows [S] of slots [S] on the device. Negative: padding, whose row is last."""
        return torch.where(slots < 0, self._rows - 1, slots).long()

    def step_of(self, rows: Tensor, decodes: int, starts: Tensor | None = None) -> StateStep:
        """Return the states of a step. rows: as rows_of has them. starts: as StateRows has them."""
        sources = rows
        order: tuple[Tensor, ...] = ()
        if self._draft_rows is not None:
            read, written = self._draft_rows[:, : len(rows)].unbind()
            sources, rows = (
                torch.where(read < 0, rows, read),
                torch.where(written < 0, rows, written),
            )
        elif self._drafts is not None:
            tokens, read, written, order = self._drafts
            sources, rows = rows.index_copy(0, tokens, read), rows.index_copy(0, tokens, written)
        spans = self._spans if len(rows) > decodes else ()
        found = StateRows(rows, decodes, spans, sources=sources, order=order, starts=starts)
        return StateStep(self._conv, self._recurrent, found)


def attach_states(model: LanguageModel, states: StateTensors) -> None:
    """Give a model its states."""
    assert isinstance(model, nn.Module)
    model.__dict__["state_tensors"] = states


def reserve_draft_rows(model: LanguageModel, rows: int) -> None:
    """Prepare a model's states, if it has any, for graphs of steps with drafts; 0 rows: of none."""
    states = find_states(model)
    if states is not None and rows:
        states.reserve_draft_rows(rows)


def set_state_batch(model: LanguageModel, batch: StepBatch) -> None:
    """Tell a model's states of the step that is computed next."""
    states = find_states(model)
    if states is not None:
        states.set_batch(batch)


def state_step(
    model: LanguageModel, token_slots: Tensor, q_starts: Tensor, decodes: int
) -> StateStep | None:
    """Return the states of a step's rows; None: the model has none. token_slots: [T]. q_starts:
    [S + 1]; a row without tokens may be behind the last."""
    states = find_states(model)
    if states is None:
        return None
    first = q_starts[:-1].clamp(max=len(token_slots) - 1)
    return states.step_of(states.rows_of(token_slots.index_select(0, first)), decodes, q_starts)


def find_states(model: LanguageModel) -> StateTensors | None:
    """Return the states of a model; None: it has no recurrent layers."""
    found: StateTensors | None = getattr(model, "state_tensors", None)
    return found

"""State tensors of one device: rows of slots, of checkpoints, and one for rows that pad a step.

They are attached to the model, as other memory is that only some models have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(one.nbytes for one in self._tensors)

    def begin(self, slots: Sequence[int], checkpoints: Sequence[int]) -> None:
        """Set the states of slots: copies of checkpoints, or zeros where these are negative."""
        zeros = [slot for slot, row in zip(slots, checkpoints) if row < 0]
        copied = [(slot, row) for slot, row in zip(slots, checkpoints) if row >= 0]
        if zeros:
            at = to_device(zeros, self._device)
            for tensor in self._tensors:
                tensor.index_fill_(0, at, 0)
        if copied:
            self._copy([self._slots + row for _, row in copied], [slot for slot, _ in copied])

    def save(self, slots: Sequence[int], checkpoints: Sequence[int]) -> None:
        """Copy the states of slots to checkpoints."""
        if slots:
            self._copy(slots, [self._slots + row for row in checkpoints])

    def _copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        source, target = (to_device(list(one), self._device) for one in (sources, targets))
        for tensor in self._tensors:
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    def set_batch(self, batch: StepBatch) -> None:
        """Take what the host knows of a step's rows: those of several tokens."""
        starts, first = batch.q_starts.tolist(), batch.num_decodes
        self._spans = tuple(zip(starts[first:-1], starts[first + 1 :]))
        self._drafts = None

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
        drafts = set(tokens)
        others = [i for i in range(batch.num_decodes) if i not in drafts]
        order = tuple(to_device(one, self._device) for one in (others, *groups))
        at, read, written = (to_device(one, self._device) for one in (tokens, sources, rows))
        self._drafts = _DraftRows(at, read, written, order)

    def rows_of(self, slots: Tensor) -> Tensor:
        """Return the rows [S] of slots [S] on the device. Negative: padding, whose row is last."""
        return torch.where(slots < 0, self._rows - 1, slots).long()

    def step(self, slots: Tensor, decodes: int) -> StateStep:
        """Return the states of a step's rows. slots: as rows_of takes them."""
        return self.step_of(self.rows_of(slots), decodes)

    def step_of(self, rows: Tensor, decodes: int) -> StateStep:
        """Return the states of a step. rows: as rows_of has them."""
        sources = rows
        order: tuple[Tensor, ...] = ()
        if self._drafts is not None:
            tokens, read, written, order = self._drafts
            sources, rows = rows.index_copy(0, tokens, read), rows.index_copy(0, tokens, written)
        spans = self._spans if len(rows) > decodes else ()
        if rows.is_meta:  # all rows need the same kernels
            spans = spans[:1]
        found = StateRows(rows, decodes, spans, sources=sources, order=order)
        return StateStep(self._conv, self._recurrent, found)


def attach_states(model: LanguageModel, states: StateTensors) -> None:
    """Give a model its states."""
    assert isinstance(model, nn.Module)
    model.__dict__["state_tensors"] = states


def set_state_batch(model: LanguageModel, batch: StepBatch) -> None:
    """Tell a model's states of the step that is computed next."""
    states = find_states(model)
    if states is not None:
        states.set_batch(batch)


def state_step(
    model: LanguageModel, token_slots: Tensor, q_starts: Tensor, decodes: int
) -> StateStep | None:
    """Return the states of a step's rows; None: the model has none. token_slots: [T]."""
    states = find_states(model)
    if states is None:
        return None
    return states.step(token_slots.index_select(0, q_starts[:-1]), decodes)


def find_states(model: LanguageModel) -> StateTensors | None:
    """Return the states of a model; None: it has no recurrent layers."""
    found: StateTensors | None = getattr(model, "state_tensors", None)
    return found

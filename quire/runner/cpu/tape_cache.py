"""Tape cache: replays decode steps from recorded tapes instead of running them in Python.

A decode-only step has one token per row and samples every row, so its shape is its number of rows.
Rows are padded to a few sizes; the first step of a size and variant records a tape. Steps write
their inputs into the buffers that the tape reads, and replay it. If a model's forward pass does
something that a tape cannot repeat, its steps of that variant run eagerly; that is logged once.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.attention.base import AttentionMetadata, Backend, CrossMetadata
from quire.core.types import NO_BLOCK
from quire.kernels.native.op_tape import NotRecordableError, OpTape, TapeRecorder
from quire.models.base import HiddenTaps, LanguageModel, StepInputs
from quire.runner.drafters.base import TargetStates
from quire.runner.parts.base import PLAIN, StepVariant
from quire.runner.state_tensors import find_states
from quire.runner.step_batch import StepBatch

log = logging.getLogger(__name__)

_RECORDER_LOCK = threading.Lock()
"""The kernels have one recorder, which the engines of this process share."""


class DecodeOutput(NamedTuple):
    """The results of a decode step. states: what a drafter reads; None: there is none."""

    out: Tensor
    states: TargetStates | None

    def of_rows(self, rows: int) -> DecodeOutput:
        """Return those of the first rows."""
        states = self.states
        if states is not None:
            taps = {layer: one[:rows] for layer, one in states.taps.items()}
            states = TargetStates(states.hidden[:rows], taps)
        return DecodeOutput(self.out[:rows], states)


class TapeCache:
    """Owns the tapes. Runs on the device thread."""

    def __init__(self, forward: DecodeForward) -> None:
        self._forward = forward
        self._recorder = TapeRecorder()
        self._tapes: dict[str, dict[int, OpTape[DecodeOutput]]] = {}  # by variant and size
        self._not_recordable: set[str] = set()  # variants

    def run(
        self,
        inputs: StepBatch,
        batch: AttentionMetadata,
        variant: StepVariant = PLAIN,
        carried: Tensor | None = None,
    ) -> DecodeOutput | None:
        """Return logits [R, V] of a decode-only step, or a strip of them, until the next call. Of a
        stage before the last: hidden states [R, E].

        carried: [R, E] of the pipeline stage before; None: this is the first. Returns None where
        the step must run eagerly.
        """
        name = variant.name
        if name in self._not_recordable:
            return None
        rows = len(inputs.token_ids)
        size = padded_rows(rows)
        if size > self._forward.max_rows:
            return None
        self._forward.fill_inputs(inputs, batch, rows, size, carried)
        tape = self._tapes.setdefault(name, {}).get(size) or self._record(size, variant)
        return None if tape is None else tape.replay().of_rows(rows)

    def _record(self, size: int, variant: StepVariant) -> OpTape[DecodeOutput] | None:
        """Return a new tape; None: the model's forward pass cannot be recorded."""
        try:
            with _RECORDER_LOCK:
                tape = self._recorder.record(partial(self._forward.run, size, variant))
        except NotRecordableError as error:
            self._not_recordable.add(variant.name)
            kind = f" ({variant.name})" if variant.name else ""
            log.info("decode steps%s run eagerly: %s", kind, error)
            return None
        self._tapes[variant.name][size] = tape
        return tape


class DecodeForward:
    """Owns the static input buffers of decode steps, and runs a forward pass over them.

    Tapes keep it alive, so it must not refer to them: collections do not free such a cycle, as the
    objects of a start are frozen.
    """

    def __init__(
        self,
        model: LanguageModel,
        backend: Backend,
        *,
        max_rows: int,
        width: int,
        groups: int,
        has_cross: bool = False,
        whole_logits: bool = True,
        is_last_stage: bool = True,
        taps: frozenset[int] | None = None,
    ) -> None:
        """max_rows: as tape_rows() has them. width: blocks of the longest sequence or source.

        whole_logits: False: of this rank's strip of the vocabulary. is_last_stage: False: there are
        no logits. taps: of a drafter, which reads states; None: there is none.
        """
        rows = self.max_rows = max_rows
        self._model = model
        self._backend = backend
        self._whole_logits = whole_logits
        self._is_last_stage = is_last_stage
        self._taps = taps
        self._width = width
        self._states = find_states(model)
        self._state_rows = torch.zeros(rows, dtype=torch.int64)
        self._carried: Tensor | None = None  # [rows, E]
        self._token_ids = torch.zeros(rows, dtype=torch.int32)
        self._positions = torch.zeros(rows, dtype=torch.int32)
        self._contexts = torch.zeros(rows, dtype=torch.int32)
        self._token_slots = torch.full((rows,), -1, dtype=torch.int32)
        self._starts = torch.arange(rows + 1, dtype=torch.int32)
        self._tables = [
            torch.full((rows, width), NO_BLOCK, dtype=torch.int32) for _ in range(groups)
        ]
        self._kv_slots = [torch.full((rows,), -1, dtype=torch.int64) for _ in range(groups)]
        self._cross_table = self._cross_lengths = None
        if has_cross:
            self._cross_table = torch.full((rows, width), NO_BLOCK, dtype=torch.int32)
            self._cross_lengths = torch.zeros(rows, dtype=torch.int32)

    def fill_inputs(
        self,
        inputs: StepBatch,
        batch: AttentionMetadata,
        rows: int,
        size: int,
        carried: Tensor | None,
    ) -> None:
        """Fill the first `rows` of `size`; a padding row writes nothing and attends to nothing."""
        for buffer, values, blank in (
            (self._token_ids, inputs.token_ids, 0),
            (self._positions, inputs.rotary_positions, 0),
            (self._contexts, inputs.contexts, 0),
            (self._token_slots, inputs.token_slots, -1),
            *((buffer, slots.numpy(), -1) for buffer, slots in zip(self._kv_slots, batch.slots)),
        ):
            array: np.ndarray = buffer.numpy()
            array[:rows] = values
            array[rows:size] = blank
        if self._states is not None:
            self._state_rows[:size] = self._states.rows_of(self._token_slots[:size])
        for buffer, table in zip(self._tables, batch.tables):
            buffer.numpy()[:rows, : table.shape[1]] = table.numpy()
        if self._cross_table is not None and self._cross_lengths is not None:
            assert batch.cross is not None, "a step without sources, of a model with an encoder"
            table = batch.cross.table
            self._cross_table[:rows, : table.shape[1]] = table
            self._cross_lengths[:rows] = batch.cross.lengths
            self._cross_lengths[rows:size] = 0
        if carried is not None:
            if self._carried is None:
                self._carried = carried.new_zeros(len(self._token_ids), carried.shape[1])
            self._carried[:rows] = carried

    def run(self, size: int, variant: StepVariant) -> DecodeOutput:
        """Return the logits or hidden states of the first `size` rows."""
        batch = AttentionMetadata(
            q_starts=self._starts[: size + 1],
            contexts=self._contexts[:size],
            tables=tuple(table[:size] for table in self._tables),
            slots=tuple(slots[:size] for slots in self._kv_slots),
            max_query=1,
            max_context=self._width,
            decodes=size,
            cross=self._cross_metadata(size),
        )
        taps = None if self._taps is None else HiddenTaps(self._taps)
        step = StepInputs(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            attention=self._backend.plan(batch),
            carried=None if self._carried is None else self._carried[:size],
            taps=taps,
            states=None
            if self._states is None
            else self._states.step_of(self._state_rows[:size], size),
        )
        slots = self._token_slots[:size]
        with variant.forward(slots):
            hidden = self._model(step)
        if not self._is_last_stage:
            return DecodeOutput(hidden, None)
        with variant.logits(slots):
            logits = self._model.logits(hidden, whole=self._whole_logits)
        return DecodeOutput(logits, None if taps is None else TargetStates(hidden, taps.hidden))

    def _cross_metadata(self, size: int) -> CrossMetadata | None:
        if self._cross_table is None or self._cross_lengths is None:
            return None
        return CrossMetadata(
            self._cross_table[:size], self._cross_lengths[:size], self._starts[: size + 1]
        )


MAX_TAPE_ROWS = 256
"""With more rows than this, of which many are drafts, Python costs little beside the kernels."""


def tape_rows(max_seqs: int, max_drafts: int, max_tokens: int) -> int:
    """Return how many rows a tape may have. A row with drafts is a row for each of its tokens.

    max_tokens: of a step.
    """
    with_drafts = min(max_seqs * (1 + max_drafts), MAX_TAPE_ROWS, max_tokens)
    return padded_rows(max(max_seqs, with_drafts))


def padded_rows(rows: int) -> int:
    """Return the size at which so many rows run: at most an eighth more, from eight rows on."""
    if rows <= 4:
        return rows
    grain = 2 if rows <= 16 else max(4, 1 << (rows - 1).bit_length() - 4)
    return -(-rows // grain) * grain

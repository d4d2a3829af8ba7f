"""Tape cache: replays steps from recorded tapes instead of running them in Python.

A decode-only step has one token per row and samples every row, so its shape is its number of rows.
Rows are padded to a few sizes; the first step of a size and variant records a tape. Steps with
prompts, or with rows that are not sampled, have one tape per variant for all numbers of tokens and
sequences; it ends with the hidden states of every token. Steps write their inputs into the buffers
that the tape reads, and replay it. If a model's forward pass does something that a tape cannot
repeat, its steps of that variant and kind run eagerly; that is logged once.
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
from quire.kernels.native.op_tape import (
    NotRecordableError,
    OpTape,
    SizedTape,
    Sizes,
    TapeRecorder,
)
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

    def __init__(self, forward: StepForward) -> None:
        self._forward = forward
        self._recorder = TapeRecorder()
        self._tapes: dict[str, dict[int, OpTape[DecodeOutput]]] = {}  # by variant and size
        # by variant, and whether it selects rows
        self._mixed: dict[tuple[str, bool], SizedTape[TargetStates]] = {}
        self._not_recordable: set[tuple[str, str]] = set()  # kinds of steps, and variants

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
        if (DECODE, name) in self._not_recordable:
            return None
        rows = len(inputs.token_ids)
        size = padded_rows(rows)
        if size > self._forward.max_rows or self._forward.keeps_drafts:
            return None
        self._forward.fill_inputs(inputs, batch, rows, size, carried)
        tape = self._tapes.setdefault(name, {}).get(size) or self._record(size, variant)
        return None if tape is None else tape.replay().of_rows(rows)

    def run_mixed(
        self,
        inputs: StepBatch,
        batch: AttentionMetadata,
        variant: StepVariant = PLAIN,
        carried: Tensor | None = None,
        *,
        selects: bool = False,
    ) -> TargetStates | None:
        """Return the hidden states of all T tokens of any step, until the next call. selects: of
        the last of each row alone.

        Returns None where the step must run eagerly.
        """
        sizes = (len(inputs.token_ids), len(inputs.slots))
        forward = self._forward
        if sizes[0] > forward.max_tokens or sizes[1] > forward.max_rows:
            return None
        if (MIXED, variant.name) in self._not_recordable:
            return None
        forward.fill_mixed_inputs(inputs, batch, carried)
        kind = variant.name, selects
        tape = self._mixed.get(kind) or self._record_mixed(variant, selects=selects)
        if tape is None:
            return None
        found = tape.replay(sizes)
        taps = {layer: one[: sizes[0]] for layer, one in found.taps.items()}
        return TargetStates(found.hidden[: sizes[selects]], taps)

    def _record(self, size: int, variant: StepVariant) -> OpTape[DecodeOutput] | None:
        """Return a new tape; None: the model's forward pass cannot be recorded."""
        try:
            with _RECORDER_LOCK:
                tape = self._recorder.record(partial(self._forward.run, size, variant))
        except NotRecordableError as error:
            self._refuse(DECODE, variant, error)
            return None
        self._tapes[variant.name][size] = tape
        return tape

    def _record_mixed(
        self, variant: StepVariant, *, selects: bool
    ) -> SizedTape[TargetStates] | None:
        forward = self._forward
        try:
            with _RECORDER_LOCK:
                tape = self._recorder.record_sized(
                    partial(forward.run_mixed, variant, selects),
                    (forward.max_tokens, forward.max_rows),
                )
        except NotRecordableError as error:
            self._refuse(MIXED, variant, error)
            return None
        self._mixed[variant.name, selects] = tape
        return tape

    def _refuse(self, kind: str, variant: StepVariant, why: NotRecordableError) -> None:
        self._not_recordable.add((kind, variant.name))
        of_variant = f" ({variant.name})" if variant.name else ""
        # not the error: a handler that keeps records would keep the engine, by its frames
        log.info("%s steps%s run eagerly: %s", kind, of_variant, str(why))


class StepForward:
    """Owns the static input buffers of steps, and runs a forward pass over them.

    Tapes keep it alive, so it must not refer to them: collections do not free such a cycle, as the
    objects of a start are frozen.
    """

    def __init__(
        self,
        model: LanguageModel,
        backend: Backend,
        *,
        max_rows: int,
        max_tokens: int,
        width: int,
        groups: int,
        has_cross: bool = False,
        whole_logits: bool = True,
        is_last_stage: bool = True,
        taps: frozenset[int] | None = None,
    ) -> None:
        """max_rows: as tape_rows() has them. max_tokens: of a step with prompts, as mixed_tokens()
        has them. width: blocks of the longest sequence or source.

        whole_logits: False: of this rank's strip of the vocabulary. is_last_stage: False: there are
        no logits. taps: of a drafter, which reads states; None: there is none.
        """
        rows = self.max_rows = max(max_rows, 3)  # sizes of a recording
        tokens = self.max_tokens = max(max_tokens, max_rows)
        self._model = model
        self._backend = backend
        self._whole_logits = whole_logits
        self._is_last_stage = is_last_stage
        self._taps = taps
        self._width = width
        self._states = find_states(model)
        self._state_rows = torch.zeros(rows, dtype=torch.int64)
        self._carried: Tensor | None = None  # [tokens, E]
        self._token_ids = torch.zeros(tokens, dtype=torch.int32)
        self._positions = torch.zeros(tokens, dtype=torch.int32)
        self._contexts = torch.zeros(rows, dtype=torch.int32)
        self._token_slots = torch.full((tokens,), -1, dtype=torch.int32)
        self._starts = torch.arange(rows + 1, dtype=torch.int32)
        self._mixed_starts = torch.zeros(rows + 1, dtype=torch.int32)
        self._ends = torch.zeros(rows, dtype=torch.int32)
        self._tables = [
            torch.full((rows, width), NO_BLOCK, dtype=torch.int32) for _ in range(groups)
        ]
        self._kv_slots = [torch.full((tokens,), -1, dtype=torch.int64) for _ in range(groups)]
        self._cross_table = self._cross_lengths = None
        if has_cross:
            self._cross_table = torch.full((rows, width), NO_BLOCK, dtype=torch.int32)
            self._cross_lengths = torch.zeros(rows, dtype=torch.int32)

    @property
    def keeps_drafts(self) -> bool:
        """Whether the step keeps states after drafts, which no buffer of a tape names."""
        return self._states is not None and self._states.keeps_drafts

    def fill_inputs(
        self,
        inputs: StepBatch,
        batch: AttentionMetadata,
        rows: int,
        size: int,
        carried: Tensor | None,
    ) -> None:
        """Fill the first `rows` of `size`; a padding row writes nothing and attends to nothing."""
        self._write(inputs, batch, carried)
        for buffer, blank in (
            (self._token_ids, 0),
            (self._positions, 0),
            (self._contexts, 0),
            (self._token_slots, -1),
            *((buffer, -1) for buffer in self._kv_slots),
        ):
            buffer.numpy()[rows:size] = blank
        if self._states is not None:
            self._state_rows[:size] = self._states.rows_of(self._token_slots[:size])
        if self._cross_table is not None and self._cross_lengths is not None:
            assert batch.cross is not None, "a step without sources, of a model with an encoder"
            table = batch.cross.table
            self._cross_table[:rows, : table.shape[1]] = table
            self._cross_lengths[:rows] = batch.cross.lengths
            self._cross_lengths[rows:size] = 0

    def fill_mixed_inputs(
        self, inputs: StepBatch, batch: AttentionMetadata, carried: Tensor | None
    ) -> None:
        """Fill as many tokens and sequences as the step has."""
        self._write(inputs, batch, carried)
        self._mixed_starts.numpy()[: len(inputs.q_starts)] = inputs.q_starts
        self._ends.numpy()[: len(inputs.slots)] = inputs.row_ends

    def _write(self, inputs: StepBatch, batch: AttentionMetadata, carried: Tensor | None) -> None:
        for buffer, values in (
            (self._token_ids, inputs.token_ids),
            (self._positions, inputs.rotary_positions),
            (self._contexts, inputs.contexts),
            (self._token_slots, inputs.token_slots),
            *((buffer, slots.numpy()) for buffer, slots in zip(self._kv_slots, batch.slots)),
        ):
            array: np.ndarray = buffer.numpy()
            array[: len(values)] = values
        for buffer, table in zip(self._tables, batch.tables):
            buffer.numpy()[: len(table), : table.shape[1]] = table.numpy()
        if carried is not None:
            if self._carried is None:
                self._carried = carried.new_zeros(len(self._token_ids), carried.shape[1])
            self._carried[: len(carried)] = carried

    def run_mixed(self, variant: StepVariant, selects: bool, sizes: Sizes) -> TargetStates:
        """Return the hidden states of the first tokens, of so many sequences. selects: of the last
        of each sequence alone.

        Raises: NotRecordableError if they depend on what is in no buffer.
        """
        if self._states is not None:
            raise NotRecordableError("recurrent layers read which tokens are of one sequence")
        if self._cross_table is not None:
            raise NotRecordableError("layers read the sources of an encoder")
        if not self._backend.supports_prefill_graphs:
            raise NotRecordableError("attention reads values of the host")
        tokens, rows = sizes
        batch = AttentionMetadata(
            q_starts=self._mixed_starts[: rows + 1],
            contexts=self._contexts[:rows],
            tables=tuple(table[:rows] for table in self._tables),
            slots=tuple(slots[:tokens] for slots in self._kv_slots),
            max_query=self.max_tokens,
            max_context=self._width,
        )
        taps = HiddenTaps(frozenset() if self._taps is None else self._taps)
        step = StepInputs(
            token_ids=self._token_ids[:tokens],
            positions=self._positions[:tokens],
            attention=self._backend.plan(batch),
            carried=None if self._carried is None else self._carried[:tokens],
            taps=None if self._taps is None else taps,
            needed=self._ends[:rows] if selects else None,
        )
        with variant.forward(self._token_slots[:tokens]):
            hidden = self._model(variant.inputs(step))
        return TargetStates(hidden, taps.hidden)

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


DECODE, MIXED = "decode", "mixed"
"""Kinds of steps, each with tapes of its own."""
MAX_MIXED_TOKENS = 2048
"""With more tokens than this, Python costs little beside the kernels, and buffers are large."""
MAX_TAPE_ROWS = 256
"""With more rows than this, of which many are drafts, Python costs little beside the kernels."""


def tape_rows(max_seqs: int, max_drafts: int, max_tokens: int) -> int:
    """Return how many rows a tape may have. A row with drafts is a row for each of its tokens.

    max_tokens: of a step.
    """
    with_drafts = min(max_seqs * (1 + max_drafts), MAX_TAPE_ROWS, max_tokens)
    return padded_rows(max(max_seqs, with_drafts))


def mixed_tokens(max_tokens: int) -> int:
    """Return how many tokens a step with prompts may have that is replayed from a tape."""
    return min(max_tokens, MAX_MIXED_TOKENS)


def padded_rows(rows: int) -> int:
    """Return the size at which so many rows run: at most an eighth more, from eight rows on."""
    if rows <= 4:
        return rows
    grain = 2 if rows <= 16 else max(4, 1 << (rows - 1).bit_length() - 4)
    return -(-rows // grain) * grain

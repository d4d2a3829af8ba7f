"""Pinned I/O: exchanges the integers of decode steps between host and device in pinned memory.

A copy command costs the stream a microsecond or two and the host more, twice a step. Here the
step's first kernel fetches its integers over the bus, and its last one writes tokens back. A
graph has fixed addresses, so boxes are used in turn and the device counts the turns: `state`
has the box of the next step and the box of the current step. Outside graphs the host writes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.runner.gpu.pending_step import DeviceInputs
from quire.runner.gpu.staging_buffer import align_words, pinned_words
from quire.runner.step_batch import Ints, StepBatch

INPUT_FIELDS = 6
"""token ids, rotary positions, contexts, rows, row slots, outputs: see
quire.kernels.gpu.runtime.step_io."""


class PinnedIO:
    """`depth` boxes each way, for steps of up to `rows` rows."""

    def __init__(self, rows: int, depth: int, device: torch.device) -> None:
        self.depth, self.stride = depth, align_words(rows)
        self.state = torch.zeros(2, dtype=torch.int32, device=device)
        self.device_inputs = torch.zeros(
            (INPUT_FIELDS, self.stride), dtype=torch.int32, device=device
        )
        self._row_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._views: dict[int, DeviceInputs] = {}  # by size
        self.inbox = pinned_words(depth * INPUT_FIELDS * self.stride)
        self.outbox = pinned_words(depth * 2 * self.stride)
        self._input_slots = self.inbox.numpy().reshape(depth, INPUT_FIELDS, self.stride)
        self._output_slots = self.outbox.numpy().reshape(depth, 2, self.stride)
        self._done_events: list[torch.cuda.Event | None] = [None] * depth
        self.ahead: Tensor | None = None  # of draft chains, for steps that continue others
        self._slot = 0
        self.out_of_sync = False  # a step failed half way: the device's count may be off

    def write_inputs(self, inputs: StepBatch, size: int) -> None:
        """Write the integers of the next step, which runs at `size` rows."""
        if self.out_of_sync:
            self.resync()
        done = self._done_events[self._slot]
        if done is not None:
            done.synchronize()
        box, rows = self._input_slots[self._slot], len(inputs.slots)
        box[0, :rows] = inputs.token_ids
        box[1, :rows] = inputs.rotary_positions
        box[2, :rows] = inputs.contexts
        box[3, :rows] = inputs.slots
        box[4, :rows] = inputs.slots
        box[5, :rows] = inputs.num_outputs
        if rows < size:
            box[:, rows:size] = 0
            box[4, rows:size] = -1

    def views(self, size: int) -> DeviceInputs:
        """Return the views of a step of so many rows, made once."""
        views = self._views.get(size)
        if views is None:
            token_ids, positions, contexts, rows, row_slots, outputs = self.device_inputs[
                :, :size
            ].unbind()
            views = self._views[size] = DeviceInputs(
                token_ids=token_ids,
                token_slots=row_slots,
                positions=positions,
                q_starts=self._row_starts[: size + 1],
                contexts=contexts,
                rows=rows,
                sampled=self._row_starts[:size],
                row_slots=row_slots,
                outputs=outputs,
                rotary=positions,
            )
        return views

    def resync(self) -> None:
        """Write the index of the next step to the device, whose count may be wrong."""
        self.state.fill_(self._slot)
        self.out_of_sync = False

    def output_view(self, done: torch.cuda.Event) -> Ints:
        """The step is enqueued up to `done`: return where its answer [2, stride] will be."""
        answer = self._output_slots[self._slot]
        self._done_events[self._slot] = done
        self._slot = (self._slot + 1) % self.depth
        return answer

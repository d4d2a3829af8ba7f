"""Mixed inputs: the integers of steps with prompts, and of all that have no decode graph."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.runner.gpu.mixed_batch_graphs import PROMPT_ROWS
from quire.runner.gpu.pending_step import DeviceInputs
from quire.runner.gpu.staging_buffer import StagingBuffer, align_words
from quire.runner.slots import TableShape
from quire.runner.step_batch import Ints, StepBatch
from quire.sampling.h2d import to_device


class MixedInputs:
    """One device buffer; graphs hold its views by their sizes."""

    def __init__(
        self, max_tokens: int, slots: TableShape, depth: int, device: torch.device
    ) -> None:
        """depth: uploads that may be in flight."""
        self._has_rotary = slots.has_rotary
        words = 4 * align_words(max_tokens) + 6 * align_words(slots.max_seqs + PROMPT_ROWS + 1)
        self._staging = StagingBuffer(words, depth, device)

    def upload(self, inputs: StepBatch, sampled: int) -> DeviceInputs:
        """Upload the step's integers. Sampled rows are padded with row 0, in no slot."""
        parts: list[tuple[Ints | tuple[int, ...], int, int]] = [
            (inputs.token_ids, len(inputs.token_ids), 0),
            (inputs.token_slots, len(inputs.token_slots), 0),
            (inputs.positions, len(inputs.positions), 0),
            (inputs.q_starts, len(inputs.q_starts), 0),
            (inputs.contexts, len(inputs.contexts), 0),
            (inputs.slots, len(inputs.slots), 0),
            (inputs.sampled_tokens, sampled, 0),
            (inputs.sampled_slots, sampled, -1),
            (inputs.num_outputs, sampled, 0),
        ]
        if self._has_rotary and not inputs.has_axes:
            parts.append((inputs.rotary_positions, len(inputs.positions), 0))
        words, at = self._staging.acquire(sum(align_words(length) for _, length, _ in parts)), 0
        for part, length, blank in parts:
            words[at : at + len(part)] = part
            words[at + len(part) : at + length] = blank
            at += align_words(length)
        self._staging.send(at)
        views = self.views(len(inputs.token_ids), len(inputs.slots), sampled)
        if inputs.has_axes:
            own = to_device(inputs.rotary_positions, self._staging.on_device.device)
            return replace(views, rotary=own)
        return views

    def views(self, tokens: int, rows: int, sampled: int) -> DeviceInputs:
        """Return what upload() of a step of these sizes sends."""
        sent, at, found = self._staging.on_device, 0, []
        for length in (tokens, tokens, tokens, rows + 1, rows, rows, sampled, sampled, sampled):
            found.append(sent[at : at + length])
            at += align_words(length)
        found.append(sent[at : at + tokens] if self._has_rotary else found[2])
        return DeviceInputs(*found)

"""Mixed inputs: the integers of steps with prompts, and of all that have no decode graph."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.base import CrossMetadata
from quire.runner.gpu.mixed_batch_graphs import MAX_PROMPT_ROWS
from quire.runner.gpu.pending_step import DeviceInputs
from quire.runner.gpu.staging_buffer import StagingBuffer, align_words
from quire.runner.step_batch import Ints, StepBatch


class MixedInputs:
    """One device buffer; graphs hold its views by their sizes."""

    def __init__(
        self,
        max_tokens: int,
        max_rows: int,
        has_rotary: bool,
        depth: int,
        device: torch.device,
        axes: int = 1,
    ) -> None:
        """has_rotary: tokens may have rotary positions of their own, at most `axes` each. depth:
        uploads that may be in flight."""
        self._has_rotary = has_rotary
        words = (
            3 * align_words(max_tokens)
            + align_words(axes * max_tokens)
            + 6 * align_words(max_rows + MAX_PROMPT_ROWS + 1)
        )
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
        rotary = inputs.rotary_positions.reshape(-1)
        if self._has_rotary:
            parts.append((rotary, len(rotary), 0))
        words, at = self._staging.acquire(sum(align_words(length) for _, length, _ in parts)), 0
        for part, length, blank in parts:
            words[at : at + len(part)] = part
            words[at + len(part) : at + length] = blank
            at += align_words(length)
        self._staging.send(at)
        axes = len(rotary) // len(inputs.positions)
        return self.views(len(inputs.token_ids), len(inputs.slots), sampled, axes)

    def views(self, tokens: int, rows: int, sampled: int, axes: int = 1) -> DeviceInputs:
        """Return what upload() of a step of these sizes sends."""
        sent, at, found = self._staging.on_device, 0, []
        for length in (tokens, tokens, tokens, rows + 1, rows, rows, sampled, sampled, sampled):
            found.append(sent[at : at + length])
            at += align_words(length)
        rotary = sent[at : at + axes * tokens] if self._has_rotary else found[2]
        found.append(rotary if axes == 1 else rotary.view(axes, tokens))
        return DeviceInputs(*found)


def cross_metadata(tables: Tensor, token_slots: Tensor, starts: Tensor) -> CrossMetadata:
    """Return the source of each token of a step; padding tokens read that of some slot.

    tables: [2, M, W], of sources and of their lengths. starts: 0, 1, 2, ...
    """
    table, lengths = tables.unbind()
    slots = token_slots.clamp(min=0)
    return CrossMetadata(
        table=table,
        lengths=lengths[:, 0].index_select(0, slots),
        starts=starts[: len(slots) + 1],
        rows=slots,
    )


def empty_step_buffers(tables: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Allocate token ids [T] and KV slots [G, T], for a kernel to fill. tables: [G, M, W]."""
    ids = torch.empty(tokens, dtype=torch.int32, device=tables.device)
    return ids, ids.new_empty((len(tables), tokens), dtype=torch.int64)

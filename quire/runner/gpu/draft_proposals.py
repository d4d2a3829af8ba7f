"""Draft proposals: runs a model drafter behind a step, on the stream of the worker.

The drafter reads hidden states of all the step's tokens, and the tokens that were sampled: the host
waits for these, as it does for the drafts, before the next step is planned.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.attention.base import AttentionMetadata
from quire.kernels.framework import lazy_fusion
from quire.kernels.gpu.runtime import step_io as kernels
from quire.models.base import HiddenTaps
from quire.runner.drafters.base import ModelDrafter, TargetStates
from quire.runner.gpu.pending_step import PendingStep
from quire.runner.gpu.staging_buffer import align_words
from quire.runner.step_batch import StepBatch


class SlotState(NamedTuple):
    """What the device has of all slots."""

    tables: Tensor  # [G, M, W]
    last_token: Tensor  # [M]
    block_size: int


class DraftProposals:
    """A drafter, and the states of the model that it reads.

    taps: of the forward pass that was launched last.
    """

    def __init__(self, drafter: ModelDrafter, slots: SlotState, max_rows: int) -> None:
        """max_rows: of steps whose states are kept for graphs."""
        self._drafter = drafter
        self._slots = slots
        self._max_rows = max_rows
        self._kept: dict[int, Tensor] = {}
        self.taps = HiddenTaps(drafter.taps)

    def new_taps(self) -> HiddenTaps:
        self.taps = HiddenTaps(self._drafter.taps)
        return self.taps

    def keep_taps(self) -> None:
        """Copy the taps to where propose() finds them after a replay."""
        lazy_fusion.flush()
        for layer, one in self.taps.hidden.items():
            if layer not in self._kept:
                shape = (self._max_rows, one.shape[1])
                self._kept[layer] = torch.empty(shape, dtype=one.dtype, device=one.device)
            self._kept[layer][: len(one)].copy_(one)

    def propose(self, step: PendingStep, hidden: Tensor, replayed: bool) -> None:
        """Add the drafts behind the step's tokens to its result. Waits for both.

        hidden: [T or more, E]. replayed: the step may be one whose taps were kept.
        """
        tokens, batch = step.step_tokens(), step.batch
        states = TargetStates(hidden, self._kept if replayed else self.taps.hidden)
        kept = batch.accepted(tokens.ids, tokens.ends)
        lazy_fusion.flush()  # the states are read by torch
        found = self._drafter.propose(batch, tokens.ids, kept, states, self._metadata)
        lazy_fusion.flush()
        step.drafts = {"drafts": found}

    def launch(self, batch: StepBatch, hidden: Tensor) -> None:
        """Launch what propose() launches behind a step of which every token is accepted.

        hidden: [T, E], which takes the place of all states.
        """
        states = TargetStates(hidden, dict.fromkeys(self._drafter.taps, hidden))
        kept = range(len(batch.sampled_rows))
        self._drafter.launch(batch, [0] * len(kept), kept, states, self._metadata)
        lazy_fusion.flush()

    def _metadata(self, batch: StepBatch) -> AttentionMetadata:
        """Return a batch of the drafter as attention reads it. Its tokens are known."""
        parts = (batch.positions, batch.token_slots, batch.contexts, batch.slots, batch.q_starts)
        starts = np.cumsum([0, *(align_words(len(part)) for part in parts)])
        words = np.zeros(starts[-1], dtype=np.int32)
        for at, part in zip(starts, parts):
            words[at : at + len(part)] = part
        tables, last_token, block_size = self._slots
        sent = torch.from_numpy(words).to(tables.device, non_blocking=True)
        positions, token_slots, contexts, rows, q_starts = (
            sent[at : at + len(part)] for at, part in zip(starts.tolist(), parts)
        )
        groups, tokens = tables.shape[0], len(batch.positions)
        kv_slots = torch.empty((groups, tokens), dtype=torch.int64, device=tables.device)
        ids = torch.empty_like(positions)
        kernels.gather_inputs(
            positions, token_slots, positions, last_token, tables, ids, kv_slots, block_size
        )
        return AttentionMetadata(
            q_starts=q_starts,
            contexts=contexts,
            tables=tables.unbind(),
            slots=kv_slots.unbind(),
            max_query=batch.max_query,
            max_context=batch.max_context,
            rows=rows,
            decodes=batch.num_decodes,
            past=batch.max_prior_context,
        )

"""Draft proposals: runs a model drafter behind a step, on the stream of the worker.

The drafter reads hidden states of all the step's tokens, and the tokens that were sampled. What
drafts one token after the other is a chain (draft_chain.py): the host waits once, for both tokens
and drafts. Anything else, and a head that reads media, is launched when the host has the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quire.attention.base import AttentionMetadata
from quire.kernels.framework import lazy_fusion
from quire.kernels.gpu.runtime import step_io as kernels
from quire.models.base import HiddenTaps
from quire.runner.drafters.base import ModelDrafter, TargetStates
from quire.runner.gpu.draft_chain import (
    ChainBuffers,
    ChainGraph,
    ChainResult,
    ChainSizes,
    DraftChain,
    Ran,
    SlotState,
    keep_rows,
)
from quire.runner.gpu.mixed_batch_graphs import GraphShape, without_padding
from quire.runner.gpu.pending_step import DeviceInputs, PendingStep, continued_batch
from quire.runner.gpu.staging_buffer import align_words
from quire.runner.step_batch import StepBatch
from quire.sampling.step_sampling import StepTokens


@dataclass(frozen=True, slots=True)
class FoundDrafts:
    """Drafts behind a step that are on the host, by row of the plan."""

    found: Mapping[int, tuple[int, ...]]

    def of_row(self, row: int) -> tuple[int, ...]:
        return self.found.get(row, ())

    def as_field(self, batch: StepBatch, tokens: StepTokens) -> dict[str, Any]:
        return {"drafts": self.found}


class DraftProposals:
    """A drafter, and the states of the model that it reads.

    taps: of the forward pass that was launched last. chain: of a head, or of a model of its own.
    """

    def __init__(
        self,
        drafter: ModelDrafter,
        slots: SlotState,
        sizes: ChainSizes,
        chain: DraftChain | None,
    ) -> None:
        self._drafter = drafter
        self._slots = slots
        self._sizes = sizes
        self._chain = chain
        self._kept: dict[int, Tensor] = {}
        self._padded: TargetStates | None = None
        self._any_states = False
        self.taps = HiddenTaps(drafter.taps)
        self._last: PendingStep | None = None  # that had drafts

    @contextmanager
    def taking_any_states(self) -> Iterator[None]:
        """Within, the model has few of its layers: its last states pass for those of all layers."""
        self._any_states = True
        try:
            yield
        finally:
            self._any_states = False

    def _tapped(self, hidden: Tensor) -> dict[int, Tensor]:
        """Return the states of each layer that the drafter reads. hidden: the last ones."""
        if self._any_states:
            return dict.fromkeys(self._drafter.taps, hidden)
        return self.taps.hidden

    def new_taps(self) -> HiddenTaps:
        self.taps = HiddenTaps(self._drafter.taps)
        return self.taps

    @property
    def is_chain(self) -> bool:
        """Whether its passes need nothing of the host."""
        return self._chain is not None

    @property
    def models(self) -> list[nn.Module]:
        """What makes drafts pass by pass, if anything does."""
        head = self._drafter.graphed_head
        return [] if head is None else [head.model.module]

    @property
    def ahead(self) -> Tensor | None:
        """[2 + D, m] of load_decode_inputs(); None: there is no chain."""
        return None if self._chain is None else self._chain.ahead

    def graph_groups(
        self, sizes: Sequence[int], shapes: Sequence[GraphShape]
    ) -> list[list[ChainGraph]]:
        """Return the graphs of passes behind decode steps of these sizes, and steps of shapes."""
        return [] if self._chain is None else self._chain.graph_groups(sizes, shapes)

    def prepare_own(self, key: ChainGraph) -> None:
        """Upload what a graph of graph_groups() reads: no rows."""
        assert self._chain is not None, "no graphs"
        self._chain.upload_empty()

    def launch_own(self, key: ChainGraph) -> None:
        assert self._chain is not None, "no graphs"
        self._chain.launch(key)

    def keep_states(self, hidden: Tensor | None) -> None:
        """Copy the taps to where propose() finds them after a replay. hidden: is kept already."""
        assert hidden is not None
        lazy_fusion.flush()
        for layer, one in self._tapped(hidden).items():
            self._kept[layer] = keep_rows(self._kept.get(layer), one, self._sizes.tokens)
        if self._chain is not None:
            self._chain.states = TargetStates(hidden, self._kept)

    def keep_padded_states(self, hidden: Tensor) -> None:
        """Copy the states of a step with prompts, padded as its graph is, for propose()."""
        lazy_fusion.flush()
        last, kept = self._padded or (None, {})
        last = keep_rows(last, hidden, self._sizes.padded)
        taps = {
            layer: keep_rows(kept.get(layer), one, self._sizes.padded)
            for layer, one in self._tapped(hidden).items()
        }
        self._padded = TargetStates(last, taps)
        if self._chain is not None:
            self._chain.padded_states = self._padded

    def place_tokens(self, views: DeviceInputs, count: int) -> None:
        """Give the first tokens of a step with prompts, so many, what they continue with."""
        assert self._chain is not None, "only a chain has it"
        self._chain.place_tokens(views, count)

    def keep_tokens(self, ids: Tensor) -> None:
        """Copy the tokens [T] of a step with prompts to where propose() finds them."""
        if self._chain is not None:
            self._chain.keep_tokens(ids)

    def propose(self, step: PendingStep, hidden: Tensor | None, ran: Ran) -> None:
        """Add the drafts behind the step's tokens to its result. Without a chain, wait for both.

        hidden: [T or more, E]. ran: size of a decode step, whose taps were kept; or a step with
        prompts, whose states were kept if it has a shape.
        """
        assert hidden is not None
        self._last = step
        lazy_fusion.flush()  # the states are read by torch
        decoded = isinstance(ran, int)
        states = TargetStates(hidden, self._kept if decoded else self._tapped(hidden))
        shape = None if isinstance(ran, int) else ran.shape
        if self._chain is not None and (decoded or shape or not self._drafter.reads_media):
            step.drafts = self._chain.launch_behind(step.batch, ran, states)
            step.done.record()
            return
        tokens, batch = step.step_tokens(), step.batch
        if shape is not None:
            assert self._padded is not None, "the step ran"
            last, taps = self._padded
            of = {layer: without_padding(one, batch, shape) for layer, one in taps.items()}
            states = TargetStates(without_padding(last, batch, shape), of)
        kept = batch.accepted(tokens.ids, tokens.ends)
        found = self._drafter.propose(batch, tokens.ids, kept, states, self._metadata)
        lazy_fusion.flush()
        step.drafts = FoundDrafts(found)

    def continued(
        self, batch: StepBatch, *, on_device: bool
    ) -> tuple[StepBatch, PendingStep | None]:
        """Return a batch that continues another as its step reads it, and the step before.

        on_device: its tokens are drawn from device tensors alone. If not, or if no chain has what
        it continues with, this waits for the step before.
        """
        assert self._last is not None, "no step had drafts"
        if on_device and isinstance(self._last.drafts, ChainResult):
            return batch, self._last
        return continued_batch(batch, self._last), None

    def launch(self, batch: StepBatch, hidden: Tensor) -> None:
        """Launch what propose() launches behind a step of which every token is accepted.

        hidden: [T, E], which takes the place of all states.
        """
        states = TargetStates(hidden, dict.fromkeys(self._drafter.taps, hidden))
        kept = range(len(batch.sampled_rows))
        if self._chain is not None:
            self._chain.launch_alone(batch, states)
            if not self._drafter.reads_media:
                return
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


def build_proposals(
    drafter: ModelDrafter | None, slots: SlotState, buffers: ChainBuffers, sizes: ChainSizes
) -> DraftProposals | None:
    """Build what runs a drafter; None: there is none. sizes: of the worker's largest steps."""
    if drafter is None:
        return None
    head, chain = drafter.graphed_head, None
    if head is not None and sizes.rows:
        chain = DraftChain(head, slots, buffers, sizes)
    return DraftProposals(drafter, slots, sizes, chain)

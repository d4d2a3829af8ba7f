"""Drafts as a chain: a first pass over the tokens of the step, then one pass for each more draft.

Axes: n tokens of the first pass, m rows with drafts, E hidden
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.attention.base import Backend
from quire.kernels.framework import lazy_fusion
from quire.models.base import StepInputs
from quire.models.drafters._base import DraftHead
from quire.runner.drafters._passes import (
    FirstPass,
    Indexes,
    PassLimits,
    batch_behind,
    build_first_pass,
)
from quire.runner.drafters.base import ChainModel, GraphedHead, MetadataOf, TargetStates
from quire.runner.media.media_rows import find_media_rows
from quire.runner.step_batch import StepBatch

Chains = list[tuple[Indexes, Tensor]]
"""Of each pass: which of the rows have a draft of it, and these."""


class ChainDrafter:
    """Runs a chain model. slots: of the engine, if the model is given each token in its place."""

    def __init__(
        self,
        model: ChainModel,
        backend: Backend,
        limits: PassLimits,
        device: torch.device,
        slots: int | None = None,
        embed_media: Callable[[StepInputs], StepInputs] | None = None,
    ) -> None:
        """embed_media: gives the first pass embeddings, of a target that reads media."""
        self.taps = frozenset(model.taps)
        self._model = model
        self._backend = backend
        self._limits = limits
        self._device = device
        self._embed_media = embed_media or _without_media
        self.reads_media = embed_media is not None
        self._given = None if slots is None else np.zeros(slots, dtype=np.int32)
        self.graphed_head = GraphedHead(model, backend, limits.max_len, slots is not None)

    def propose(
        self,
        batch: StepBatch,
        ids: Sequence[int],
        kept: Sequence[int],
        states: TargetStates,
        metadata_of: MetadataOf,
    ) -> dict[int, tuple[int, ...]]:
        launched = self.launch(batch, ids, kept, states, metadata_of)
        if launched is None:
            return {}
        rows, chains = launched
        found: dict[int, tuple[int, ...]] = {}
        fetched = torch.cat([one for _, one in chains]).tolist()  # the only wait for the device
        for row, token in zip(np.concatenate([one for one, _ in chains]).tolist(), fetched):
            found[rows[row]] = (*found.get(rows[row], ()), token)
        return found

    def launch(
        self,
        batch: StepBatch,
        ids: Sequence[int],
        kept: Sequence[int],
        states: TargetStates,
        metadata_of: MetadataOf,
    ) -> tuple[tuple[int, ...], Chains] | None:
        """Launch the passes of propose(). Returns the rows of the plan with drafts, and these."""
        first = build_first_pass(batch, ids, kept, self._limits, self._given)
        if first is None:
            return None
        known = self._model.begin(states.hidden, states.taps, self._tensor(first.at))
        tokens = self._tensor(first.batch.token_ids)
        step = self._embed_media(self._step(first.batch, tokens, metadata_of))
        out = self._run(step, known)
        if not first.rows:
            return None
        ends = out.index_select(0, self._tensor(first.ends))
        return first.rows, self._continue(first, ends, metadata_of)

    def _continue(self, first: FirstPass, states: Tensor, metadata_of: MetadataOf) -> Chains:
        """Return the drafts of the rows. states: [m, E] at their last tokens."""
        rows: Indexes = np.arange(len(first.rows))
        chains: Chains = []
        drafts = self._model.drafts(states)
        for count in range(1, int(first.most.max()) + 1):
            chains.append((rows, drafts))
            going = np.flatnonzero(first.most[rows] > count)
            if not len(going):
                break
            if len(going) < len(rows):
                at = self._tensor(going)
                rows, drafts, states = rows[going], drafts[at], states[at]
            step = self._step(batch_behind(first, rows, count), drafts, metadata_of)
            states = self._run(step, states)
            drafts = self._model.drafts(states)
        return chains

    def _step(self, batch: StepBatch, tokens: Tensor, metadata_of: MetadataOf) -> StepInputs:
        return StepInputs(
            token_ids=tokens,
            positions=self._tensor(batch.positions),
            attention=self._backend.plan(metadata_of(batch)),
        )

    def _run(self, step: StepInputs, states: Tensor) -> Tensor:
        found = self._model(step, states)
        lazy_fusion.flush()  # it is read by torch
        return found

    def _tensor(self, values: Indexes) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def _without_media(step: StepInputs) -> StepInputs:
    """Media have id 0 where a model has no rows of them."""
    return replace(step, token_ids=step.token_ids.clamp(min=0))


def build_head_drafter(
    model: DraftHead, backend: Backend, limits: PassLimits, device: torch.device, slots: int
) -> ChainDrafter:
    """Build the drafter of a head, which has no tokens in places of their own."""
    media = find_media_rows(model.target)
    if media is None or model.config.layer.hidden != model.config.target.hidden:
        return ChainDrafter(model, backend, limits, device)
    embed = partial(media.inputs, embed=model.embed_ids)
    return ChainDrafter(model, backend, limits, device, embed_media=embed)

"""Medusa: all drafts of a row come from the target's last state, without keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.attention.base import Backend
from quire.kernels.framework import lazy_fusion
from quire.models.drafters.medusa import Head
from quire.runner.drafters._passes import PassLimits
from quire.runner.drafters.base import MetadataOf, TargetStates
from quire.runner.step_batch import StepBatch


class Drafter:
    """Runs all heads over the states of rows that the step sampled."""

    taps: frozenset[int] = frozenset()

    def __init__(self, heads: Head, device: torch.device) -> None:
        self._heads = heads
        self._device = device

    def propose(
        self,
        batch: StepBatch,
        ids: Sequence[int],
        kept: Sequence[int],
        states: TargetStates,
        metadata_of: MetadataOf,
    ) -> dict[int, tuple[int, ...]]:
        inputs = batch.draft_inputs
        assert inputs is not None, "the batch was built without inputs of drafters"
        most = dict(zip(batch.rows, inputs.most.tolist()))
        last = {row: i for i in kept if most[row := batch.sampled_rows[i]]}  # of each row
        if not last:
            return {}
        at = torch.from_numpy(batch.sampled_tokens[list(last.values())]).to(self._device)
        lazy_fusion.flush()  # the states are read by torch
        count = max(most[row] for row in last)
        chosen = self._heads.drafts_of(states.hidden.index_select(0, at), count).tolist()
        return {row: tuple(one[: most[row]]) for row, one in zip(last, chosen)}


def build(
    model: Head, backend: Backend, limits: PassLimits, device: torch.device, slots: int
) -> Drafter:
    """Build the drafter of loaded heads."""
    return Drafter(model, device)

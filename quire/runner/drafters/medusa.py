"""Medusa: all drafts of a row come from the target's last state, without keys and values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from quire.attention.base import Backend
from quire.kernels.framework import lazy_fusion
from quire.models.drafters.medusa import Head
from quire.runner.drafters._passes import PassLimits
from quire.runner.drafters.base import MetadataOf, TargetStates
from quire.runner.step_batch import StepBatch


class Drafter:
    """Runs all heads over the states of rows that the step sampled."""

    taps: frozenset[int] = frozenset()
    graphed_head = None
    reads_media = False

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
        launched = self.launch(batch, ids, kept, states, metadata_of)
        if launched is None:
            return {}
        last, most, chosen = launched
        return {row: tuple(one[: most[row]]) for row, one in zip(last, chosen.tolist())}

    def launch(
        self,
        batch: StepBatch,
        ids: Sequence[int],
        kept: Sequence[int],
        states: TargetStates,
        metadata_of: MetadataOf,
    ) -> tuple[Collection[int], Mapping[int, int], Tensor] | None:
        """Launch the heads. Returns rows of the plan, how many drafts each has at most, and
        these."""
        inputs = batch.draft_inputs
        assert inputs is not None, "the batch was built without inputs of drafters"
        most = dict(zip(batch.rows, inputs.most.tolist()))
        last = {row: i for i in kept if most[row := batch.sampled_rows[i]]}  # of each row
        if not last:
            return None
        at = torch.from_numpy(batch.sampled_tokens[list(last.values())]).to(self._device)
        lazy_fusion.flush()  # the states are read by torch
        count = max(most[row] for row in last)
        return last, most, self._heads.drafts_of(states.hidden.index_select(0, at), count)


def build(
    model: Head, backend: Backend, limits: PassLimits, device: torch.device, slots: int
) -> Drafter:
    """Build the drafter of loaded heads."""
    return Drafter(model, device)

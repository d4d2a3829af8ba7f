"""Alignment part: which positions of its source each token of a sequence looks at.

Of chosen heads of cross attention, the weights of each token over the leading positions of the
source are normed over the tokens, smoothed over the positions, and averaged over the heads. The
result of a sequence is a pooled one: [tokens, positions].

Axes: H heads, k tokens of a row, F positions, D head size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from quire.attention.base import AttentionLayer, AttentionStep
from quire.core.types import ALIGN, Pooled, StepPlan
from quire.kernels.framework import lazy_fusion
from quire.models.base import LanguageModel, StepInputs
from quire.runner.parts.base import ForwardOutput, StepPart, StepVariant
from quire.runner.step_batch import StepBatch
from quire.sampling.h2d import to_host_async


class AlignedRow(msgspec.Struct, frozen=True, array_like=True):
    """One row of a sequence that is aligned."""

    plan_row: int
    slot: int
    first_token: int  # index of the row's first token among the step's tokens
    start: int  # its position in the sequence
    count: int
    skipped: int  # leading tokens of the sequence that do not count
    positions: int  # leading ones of the source that count
    is_last: bool


@dataclass(eq=False)
class Alignment:
    """What a model's alignment needs: its heads, and weights of sequences whose rows are chunks.

    heads: (layer of cross attention, head). width: positions of the smoothing, an odd number.
    """

    heads: Sequence[tuple[int, int]]
    width: int
    places: dict[int, list[int]]  # place of a layer's cache -> its heads
    weights: dict[int, list[Tensor]] = field(default_factory=dict)  # slot -> [H, k, F] of each row

    def matrix(self, weights: Tensor) -> Tensor:
        """Weights [H, k, F] -> [k, F]."""
        deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
        smoothed, half = (weights - mean) / deviation, self.width // 2
        if weights.shape[-1] > half:
            padded = functional.pad(smoothed, (half, half), mode="reflect")
            smoothed = padded.unfold(-1, self.width, 1).sort()[0][..., half]
        return smoothed.mean(dim=0)


def attach_alignment(model: LanguageModel, heads: Sequence[tuple[int, int]], width: int) -> None:
    """Let a model align, by these heads of its cross attention."""
    places: dict[int, list[int]] = {}
    layers = cast(Any, model).layers
    for layer, head in heads:
        places.setdefault(layers[layer].encoder_attn.attn.place, []).append(head)
    cast(Any, model).alignment = Alignment(heads, width, places)


@dataclass(frozen=True)
class RecordingStep:
    """A step's attention that keeps weights of the alignment heads."""

    step: Any  # CrossAttentionStep
    rows: Sequence[AlignedRow]
    alignment: Alignment
    found: dict[int, dict[int, list[Tensor]]]  # index of row -> place -> [k, F] of each head

    def run_cross(self, q: Tensor, layer: AttentionLayer) -> Tensor:
        heads = self.alignment.places.get(layer.place)
        if heads:
            lazy_fusion.flush()
            for i, row in enumerate(self.rows):
                self.found[i][layer.place] = self._weights(q, layer, row, heads)
        out: Tensor = self.step.run_cross(q, layer)
        return out

    def _weights(
        self, q: Tensor, layer: AttentionLayer, row: AlignedRow, heads: Sequence[int]
    ) -> list[Tensor]:
        """Weights [k, F] of each head, which are normed over all positions of the source."""
        cross, cache = self.step.metadata.cross, self.step.cache[layer.place]
        at = row.first_token
        place = cross.rows[at : at + 1] if cross.rows is not None else slice(at, at + 1)
        blocks = cross.table[place][0].long()
        # [blocks, K, B, D] -> [K, blocks * B, D]; what is behind the source has no weight
        keys = cache[blocks, 0].transpose(0, 1).flatten(1, 2)
        beyond = torch.arange(keys.shape[1], device=q.device) >= cross.lengths[at]
        queries = q[at : at + row.count].to(torch.float32)
        made = []
        for head in heads:
            scores = queries[:, head] @ keys[head].to(torch.float32).T * layer.scale
            weights = scores.masked_fill(beyond, float("-inf")).softmax(-1)
            made.append(weights[:, : row.positions])
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)


class AlignmentPart(StepPart, frozen=True, array_like=True):
    """The rows of one step that are aligned."""

    rows: tuple[AlignedRow, ...]

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> AlignmentPart | None:
        """Copy from the plan; None if no row is aligned."""
        if batch.decode_only:
            return None
        found = []
        for at, i in enumerate(batch.rows):
            seq, start, count, _, _ = plan.rows[i]
            pooling = seq.request.pooling
            if pooling is None or pooling.task != ALIGN:
                continue
            first, last = int(batch.q_starts[at]), start + count == len(seq.tokens)
            positions = pooling.dimensions or len(seq.request.encoder_prompt)
            found.append(
                AlignedRow(i, seq.slot, first, start, count, pooling.skip_tokens, positions, last)
            )
        return cls(tuple(found)) if found else None

    def before_forward(
        self, model: LanguageModel, step: StepInputs, variant: StepVariant
    ) -> StepInputs:
        """Have the attention keep weights."""
        alignment = _alignment_of(model)
        found: dict[int, dict[int, list[Tensor]]] = {i: {} for i in range(len(self.rows))}
        for row in self.rows:
            if not row.start:
                alignment.weights[row.slot] = []
        attention = RecordingStep(step.attention, self.rows, alignment, found)
        alignment.found = found  # type: ignore[attr-defined]
        return replace(step, attention=cast(AttentionStep, attention))

    def apply(self, forward: ForwardOutput) -> PendingAlignment:
        """Start the results of sequences that end here."""
        alignment = _alignment_of(forward.model)
        found = alignment.found  # type: ignore[attr-defined]
        made = {}
        for i, row in enumerate(self.rows):
            heads = [one for place in alignment.places for one in found[i][place]]
            skipped = max(row.skipped - row.start, 0)
            rows = alignment.weights[row.slot]
            rows.append(torch.stack(heads)[:, skipped:])
            if row.is_last:
                whole = torch.cat(alignment.weights.pop(row.slot), dim=1)
                made[row.plan_row] = to_host_async(alignment.matrix(whole))
        return PendingAlignment(made)


@dataclass(frozen=True, slots=True)
class PendingAlignment:
    """Results whose copy to the host has started."""

    by_row: dict[int, Tensor]

    def result(self) -> dict[str, dict[int, Any]]:
        """Return the results by row of the plan."""
        return {
            "pooled": {
                row: Pooled(tuple(one.shape), np.ascontiguousarray(one.numpy()).tobytes())
                for row, one in self.by_row.items()
            }
        }


def _alignment_of(model: LanguageModel) -> Alignment:
    found = getattr(model, "alignment", None)
    assert isinstance(found, Alignment), "an aligned row in an engine that does not align"
    return found


PART = AlignmentPart

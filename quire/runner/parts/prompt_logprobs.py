"""Prompt logprobs part: scores the tokens of prompts whose requests have prompt_logprobs.

A row that computes prompt positions [start, end) can score the tokens at [start + 1, end + 1), as
far as the prompt reaches. Positions are scored a few hundred at a time: [P, V] in float32 is large.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

from quire.core.types import StepPlan, TokenLogprobs
from quire.kernels.framework import lazy_fusion
from quire.runner.parts.base import ForwardOutput, StepPart
from quire.runner.step_batch import StepBatch
from quire.sampling.h2d import to_device
from quire.sampling.logprobs import LogprobScores, prompt_scores

CHUNK_POSITIONS = 256
"""Positions whose logits are in memory at once."""


class PromptRow(msgspec.Struct, frozen=True, array_like=True):
    """The positions of one row."""

    plan_row: int
    first_token: int  # index of the row's first token among the step's T tokens
    slot: int  # of the sequence
    targets: tuple[int, ...]  # the tokens to score, one per position from `first_token`
    num_top: int  # how many of the best tokens to report; -1: all


class PromptLogprobsPart(StepPart, frozen=True, array_like=True):
    """The rows of one step that return prompt logprobs."""

    rows: tuple[PromptRow, ...]

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> PromptLogprobsPart | None:
        """Copy from the plan; None if no row returns any: that check costs one attribute per
        row."""
        if not batch.may_have_prompts:
            return None
        rows = []
        for at, i in enumerate(batch.rows):
            row = plan.rows[i]
            request = row.seq.request
            top = request.params.prompt_logprobs
            if top is None or row.start >= len(request.prompt) or row.seq.index != 0:
                continue
            targets = tuple(request.prompt[row.start + 1 : row.start + row.count + 1])
            rows.append(PromptRow(i, int(batch.q_starts[at]), row.seq.slot, targets, int(top)))
        return cls(tuple(rows)) if rows else None

    def apply(self, forward: ForwardOutput) -> PendingPromptLogprobs:
        """Start the scoring, and the copies of its results to the host."""
        return PendingPromptLogprobs(
            {row.plan_row: (row.num_top, _score_row(forward, row)) for row in self.rows}
        )


@dataclass(frozen=True, slots=True)
class PendingPromptLogprobs:
    """Scores whose copies to the host have started."""

    scores_by_row: dict[int, tuple[int, list[LogprobScores]]]  # row -> top tokens, chunks

    def result(self) -> dict[str, dict[int, list[TokenLogprobs]]]:
        """Return row -> one entry per scored token."""
        found = {
            row: [one for chunk in chunks for one in chunk.to_lists([top] * len(chunk.chosen))]
            for row, (top, chunks) in self.scores_by_row.items()
        }
        return {"prompt_logprobs": found}


def _score_row(forward: ForwardOutput, row: PromptRow) -> list[LogprobScores]:
    found: list[LogprobScores] = []
    for at in range(0, len(row.targets), CHUNK_POSITIONS):
        targets = to_device(row.targets[at : at + CHUNK_POSITIONS], forward.hidden.device)
        first = row.first_token + at
        hidden = forward.hidden[first : first + len(targets)]
        slots = torch.full((len(targets),), row.slot, dtype=torch.int32, device=hidden.device)
        with forward.variant.logits(slots):
            logits = forward.model.logits(hidden)
        lazy_fusion.flush()
        targets = targets.clamp(max=logits.shape[1] - 1)  # marks of images may be behind it
        scores = prompt_scores(logits, targets, row.num_top, mode=forward.logprobs_mode)
        found.append(scores.copy_to_host())
    return found


PART = PromptLogprobsPart

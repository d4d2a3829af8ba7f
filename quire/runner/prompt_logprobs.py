"""Log-probabilities of the prompt's own tokens, for rows that ask.

A row that computes prompt positions [start, end) can judge the tokens at [start + 1, end + 1), as
far as the prompt goes. Positions are done a few hundred at a time: [P, V] in float32 is large.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.core.types import StepPlan, TokenLogprobs
from quire.kernels.framework import lazy_fusion
from quire.models.base import LanguageModel
from quire.runner.step_batch import StepBatch
from quire.sampling.h2d import to_device
from quire.sampling.logprobs import LogprobScores, Mode, prompt_scores

CHUNK_POSITIONS = 256
"""Positions whose logits are held at once."""


@dataclass(frozen=True, slots=True)
class _PromptRow:
    plan_row: int
    first_token: int  # index of the row's first token among the step's T tokens
    targets: tuple[int, ...]  # the tokens to judge, one per position from `first`
    num_top: int  # how many of the best to report; -1: all


@dataclass(frozen=True, slots=True)
class PromptLogprobsInput:
    """What the rows of one step ask for."""

    rows: tuple[_PromptRow, ...]

    @classmethod
    def from_plan(cls, plan: StepPlan, inputs: StepBatch | None) -> PromptLogprobsInput | None:
        """None if no row asks, which costs one attribute a prompt row."""
        if inputs is None or (inputs.decode_only and inputs.num_outputs.min() > 0):
            return None  # nobody computes a prompt's position
        rows = []
        for at, i in enumerate(inputs.rows):
            seq, start, count, _ = plan.rows[i]
            top = seq.request.params.prompt_logprobs
            if top is None or start >= seq.prompt_len or seq.index != 0:
                continue
            targets = tuple(seq.request.prompt[start + 1 : start + count + 1])
            rows.append(_PromptRow(i, int(inputs.q_starts[at]), targets, int(top)))
        return cls(tuple(rows)) if rows else None

    def start(self, model: LanguageModel, hidden: Tensor, mode: Mode) -> PendingPromptLogprobs:
        """Launch the work, and the copies of its results to the host."""
        return PendingPromptLogprobs(
            {
                ask.plan_row: (ask.num_top, _score_prompt_row(model, hidden, ask, mode))
                for ask in self.rows
            }
        )


@dataclass(frozen=True, slots=True)
class PendingPromptLogprobs:
    """What was found, on its way to the host."""

    scores_by_row: dict[
        int, tuple[int, list[LogprobScores]]
    ]  # row -> tokens to list, pieces of the row

    def lists(self) -> dict[int, list[TokenLogprobs]]:
        """Row -> one entry per judged token. On a GPU the copies must have come to their end."""
        return {
            row: [one for piece in pieces for one in piece.to_lists([top] * len(piece.chosen))]
            for row, (top, pieces) in self.scores_by_row.items()
        }


def _score_prompt_row(
    model: LanguageModel, hidden: Tensor, ask: _PromptRow, mode: Mode
) -> list[LogprobScores]:
    found: list[LogprobScores] = []
    for at in range(0, len(ask.targets), CHUNK_POSITIONS):
        targets = to_device(ask.targets[at : at + CHUNK_POSITIONS], hidden.device)
        first = ask.first_token + at
        logits = model.logits(hidden[first : first + len(targets)])
        lazy_fusion.flush()
        found.append(prompt_scores(logits, targets, ask.num_top, mode=mode).copy_to_host())
    return found

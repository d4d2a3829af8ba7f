"""Log-probabilities of the prompt's own tokens, for rows that ask.

A row that computes prompt positions [start, end) can judge the tokens at [start + 1, end + 1), as
far as the prompt goes. Positions are done a few hundred at a time: [P, V] in float32 is large.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.core.types import StepPlan, TokenLogprobs
from quire.kernels import fuse
from quire.models.base import LanguageModel
from quire.runner.inputs import Inputs
from quire.sampling.logprobs import Mode, Scores, prompt_scores
from quire.sampling.transfer import sent

CHUNK = 256
"""Positions whose logits are held at once."""


@dataclass(frozen=True, slots=True)
class _Ask:
    row: int
    first: int  # index of the row's first token among the step's T tokens
    targets: tuple[int, ...]  # the tokens to judge, one per position from `first`
    top: int  # how many of the best to report; -1: all


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """What the rows of one step ask for."""

    asks: tuple[_Ask, ...]

    @classmethod
    def of(cls, plan: StepPlan, inputs: Inputs | None) -> PromptLogprobs | None:
        """None if no row asks, which costs one attribute a prompt row."""
        if inputs is None or (inputs.decode_only and inputs.outputs.min() > 0):
            return None  # nobody computes a prompt's position
        asks = []
        for at, i in enumerate(inputs.rows):
            seq, start, count, _ = plan.rows[i]
            top = seq.request.params.prompt_logprobs
            if top is None or start >= seq.prompt_len or seq.index != 0:
                continue
            targets = tuple(seq.request.prompt[start + 1 : start + count + 1])
            asks.append(_Ask(i, int(inputs.q_starts[at]), targets, int(top)))
        return cls(tuple(asks)) if asks else None

    def start(self, model: LanguageModel, hidden: Tensor, mode: Mode) -> Judged:
        """Launch the work, and the copies of its results to the host."""
        return Judged({ask.row: (ask.top, _judge(model, hidden, ask, mode)) for ask in self.asks})


@dataclass(frozen=True, slots=True)
class Judged:
    """What was found, on its way to the host."""

    found: dict[int, tuple[int, list[Scores]]]  # row -> tokens to list, pieces of the row

    def lists(self) -> dict[int, list[TokenLogprobs]]:
        """Row -> one entry per judged token. On a GPU the copies must have come to their end."""
        return {
            row: [one for piece in pieces for one in piece.lists([top] * len(piece.chosen))]
            for row, (top, pieces) in self.found.items()
        }


def _judge(model: LanguageModel, hidden: Tensor, ask: _Ask, mode: Mode) -> list[Scores]:
    found: list[Scores] = []
    for at in range(0, len(ask.targets), CHUNK):
        targets = sent(ask.targets[at : at + CHUNK], hidden.device)
        first = ask.first + at
        logits = model.logits(hidden[first : first + len(targets)])
        fuse.flush()
        found.append(prompt_scores(logits, targets, ask.top, mode=mode).fetch())
    return found

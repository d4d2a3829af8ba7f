"""Log-probabilities of the prompt's own tokens, for rows that ask.

A row that computes prompt positions [start, end) can judge the tokens at [start + 1, end + 1), as
far as the prompt goes. Positions are done a few hundred at a time: [P, V] in float32 is large.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.types import StepPlan, TokenLogprobs
from quire.models.base import LanguageModel
from quire.runner.inputs import Inputs
from quire.sampling.logprobs import Mode, prompt_logprobs

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

    def compute(
        self, model: LanguageModel, hidden: Tensor, mode: Mode
    ) -> dict[int, list[TokenLogprobs]]:
        """Row -> one entry per judged token."""
        return {ask.row: _judge(model, hidden, ask, mode) for ask in self.asks}


def _judge(model: LanguageModel, hidden: Tensor, ask: _Ask, mode: Mode) -> list[TokenLogprobs]:
    found: list[TokenLogprobs] = []
    for at in range(0, len(ask.targets), CHUNK):
        targets = torch.tensor(ask.targets[at : at + CHUNK], dtype=torch.int64)
        first = ask.first + at
        logits = model.logits(hidden[first : first + len(targets)])
        found += prompt_logprobs(logits, targets, ask.top, mode=mode)
    return found

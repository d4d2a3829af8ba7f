"""A step in line: what the device reads of it, and where its results will be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.core.types import StepResult
from quire.runner.inputs import Inputs, Ints
from quire.runner.lane import result_of
from quire.runner.prompt_logprobs import Judged
from quire.sampling.sampled import Fetched, verdicts_of
from quire.sampling.steps.grammar import Binding


@dataclass(frozen=True, slots=True)
class Views:
    """A step's integers on the device."""

    token_ids: Tensor  # [T]; negative: the slot's last token
    token_slots: Tensor  # [T]; negative: padding
    positions: Tensor  # [T]
    q_starts: Tensor  # [S + 1]
    contexts: Tensor  # [S]
    rows: Tensor  # [S]
    sampled: Tensor  # [R]
    row_slots: Tensor  # [R]; negative: padding
    outputs: Tensor  # [R]


@dataclass(slots=True)
class Launched:
    """A step in line. Its numbers are in pinned memory once `done` has come to pass."""

    inputs: Inputs
    done: torch.cuda.Event
    answer: Ints | None  # [2, at least R]: ids, then the bits of the tops
    fetched: Fetched | None
    judged: Judged | None
    binding: Binding | None = None

    def tokens(self) -> tuple[list[int], np.ndarray]:
        """Ids and tops of the rows that were sampled; waits for them."""
        self.done.synchronize()
        if self.fetched is not None:
            return self.fetched.token_ids(), self.fetched.tops
        if self.answer is None:
            return [], np.zeros(0, np.float32)
        rows = len(self.inputs.sampled_rows)
        return self.answer[0, :rows].tolist(), self.answer[1, :rows].view(np.float32)

    def wait(self) -> StepResult:
        ids, tops = self.tokens()
        if self.binding is not None:
            self.binding.settle()
        judged = self.judged.lists() if self.judged is not None else {}
        if self.fetched is None:  # rows in a graph: what may leave no token is sampled outside
            logprobs, verdicts = {}, verdicts_of(tops, {}, frozenset())
        else:
            logprobs, verdicts = self.fetched.logprobs(), self.fetched.verdicts
        return result_of(self.inputs, ids, logprobs, judged, verdicts, self.binding)

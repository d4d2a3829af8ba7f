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
from quire.sampling.sampled import Fetched, faults_of


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

    def wait(self) -> StepResult:
        self.done.synchronize()
        judged = self.judged.lists() if self.judged is not None else {}
        rows = len(self.inputs.sampled_rows)
        if self.fetched is not None:
            ids, logprobs = self.fetched.token_ids(), self.fetched.logprobs()
            return result_of(self.inputs, ids, logprobs, judged, self.fetched.errors)
        if self.answer is None:
            return result_of(self.inputs, (), {}, judged, {})
        ids, tops = self.answer[0, :rows].tolist(), self.answer[1, :rows].view(np.float32)
        return result_of(self.inputs, ids, {}, judged, faults_of(tops))

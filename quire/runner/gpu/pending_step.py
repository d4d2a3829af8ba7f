"""Pending step: a step enqueued on the device, its inputs there and where its results will be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.core.types import StepResult
from quire.runner.device_worker import build_step_result
from quire.runner.parts.base import PendingPart
from quire.runner.step_batch import Ints, StepBatch
from quire.sampling.sampler_output import HostSamplerOutput, find_row_errors
from quire.sampling.step_sampling import StepTokens
from quire.sampling.steps.grammar_masks import GrammarMasks


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """A step's integers on the device."""

    token_ids: Tensor  # [T]; -1: the slot's last token
    token_slots: Tensor  # [T]; negative: padding
    positions: Tensor  # [T]
    q_starts: Tensor  # [S + 1]
    contexts: Tensor  # [S]
    rows: Tensor  # [S]
    sampled: Tensor  # [R]
    row_slots: Tensor  # [R]; negative: padding
    outputs: Tensor  # [R]
    rotary: Tensor  # [T], or [axes, T]


@dataclass(slots=True)
class PendingStep:
    """An enqueued step. Its numbers are in pinned memory after `done`."""

    batch: StepBatch
    done: torch.cuda.Event
    graph_output: Ints | None  # [2, at least R]: ids, then the bits of the tops
    sampler_output: HostSamplerOutput | None
    parts: Sequence[PendingPart]
    masks: GrammarMasks | None = None

    def __post_init__(self) -> None:
        if self.masks is not None:
            self.masks.set_fetch(self.tokens)

    def tokens(self) -> tuple[list[int], np.ndarray]:
        """Ids and tops of the rows that were sampled; waits for them."""
        self.done.synchronize()
        if self.sampler_output is not None:
            return self.sampler_output.token_ids(), self.sampler_output.top_logits
        if self.graph_output is None:
            return [], np.zeros(0, np.float32)
        rows = len(self.batch.sampled_rows)
        return self.graph_output[0, :rows].tolist(), self.graph_output[1, :rows].view(np.float32)

    def wait(self) -> StepResult:
        ids, tops = self.tokens()
        if self.masks is not None:
            self.masks.commit_tokens()
        extras = [part.result() for part in self.parts]
        if (
            self.sampler_output is None
        ):  # rows in a graph: rows that may leave no token are sampled outside
            logprobs, errors = {}, find_row_errors(tops, {}, frozenset())
        else:
            logprobs, errors = self.sampler_output.logprobs(), self.sampler_output.row_errors
        sampled = StepTokens.of(ids, logprobs, errors, self.masks)
        return build_step_result(self.batch, sampled, extras)

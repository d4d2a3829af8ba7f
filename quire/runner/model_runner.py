"""The worker's part of an executor: runs each ModelInput with one forward pass and one sampling.

    launch(input)   slots left and joined, tables written, blocks moved, forward and sampling begun
    .wait()         the StepResult

On the CPU launch() runs the whole step; on a GPU it returns when the kernels are enqueued. The
DeviceWorker decides which. A feature is a part (quire.runner.parts), never a branch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.core.types import UNKNOWN, StepResult
from quire.distributed.stage_link import StageLink
from quire.distributed.stage_tokens import StageTokens
from quire.models.base import LanguageModel
from quire.runner.device_worker import CompletedStep, DeviceWorker, StepHandle
from quire.runner.expert_steps import ExpertSteps
from quire.runner.media.media_rows import find_media_rows
from quire.runner.model_input import ModelInput
from quire.runner.profiler import span
from quire.runner.step_batch import EMPTY_BATCH
from quire.sampling.sampler import Sampler


class ModelRunner:
    """One rank: a model, a sampler and the worker of its device."""

    def __init__(
        self,
        model: LanguageModel,
        sampler: Sampler,
        worker: DeviceWorker,
        link: StageLink | None = None,
        experts: ExpertSteps | None = None,
        tokens: StageTokens | None = None,
    ) -> None:
        """link: to other pipeline stages; None: there are none. experts: of the rows of other
        data-parallel ranks, with which the worker was made; None: there are none. tokens: from the
        last stage to the first; None: they go through the host, or there is one stage."""
        self.experts = experts or ExpertSteps()
        self.tokens = tokens or StageTokens()
        self.model = model
        self.worker = worker
        self.sampler = sampler
        self.link = link or StageLink()

    @torch.inference_mode()
    def launch(self, step: ModelInput) -> StepHandle:
        """Start the step. One thread, in plan order."""
        with span("launch"), self._exchanges(step):
            if self.link.is_last:  # the others sample nothing
                for slot in step.leaves:
                    self.sampler.leave(slot)
                for joined in step.joins:
                    self.sampler.join(joined)
                self.sampler.set_masks(step.masks)
            if step.block_table_updates:
                self.worker.write_tables(step.block_table_updates)
            self._move_blocks(step)
            padded = self.worker.padded_shape(step.shared)
            if step.batch is None and padded is None:
                return CompletedStep(StepResult(()))
            return self.worker.compute(step.batch or EMPTY_BATCH, step.parts.values(), padded)

    @torch.inference_mode()
    def skip(self, step: ModelInput) -> None:
        """Compute nothing of a step, because one before it failed. Other ranks may not have failed,
        and wait for what this one hands on to the next stage, or adds to rows of others."""
        with self._exchanges(step):
            pass

    @contextmanager
    def _exchanges(self, step: ModelInput) -> Iterator[None]:
        """The context of a step, which takes part in all that other ranks wait for."""
        batch, unknown = step.batch or EMPTY_BATCH, ()
        if self.tokens.receives:
            unknown = batch.token_slots[batch.token_ids == UNKNOWN].tolist()
        tokens = len(batch.token_ids)
        with self.worker.execution_context():
            if tokens or step.shared.counts:
                self.worker.restore_kv_memory()
            padded = self.worker.padded_shape(step.shared)
            rows = 0 if padded is None else padded.tokens
            with (
                self.tokens.step(unknown, batch.sampled_slots),
                self.link.step(tokens),
                self.experts.step(step.shared.counts, rows),
            ):
                yield

    def recover(self) -> None:
        """Drop the partial results of a failed step. Nothing may be in flight.

        Raises EngineDead if the device is lost.
        """
        self.sampler.recover()
        self.worker.recover()

    def release_kv_memory(self) -> None:
        """Return the KV memory to the system; every block's content is lost."""
        self.worker.release_kv_memory()
        media = find_media_rows(self.model)
        if media is not None:
            media.pool.release()

    def _move_blocks(self, step: ModelInput) -> None:
        """Swap out, swap in, copy: one plan may free a block, refill it, and copy from it."""
        if step.swap_out_copies:
            self.worker.swap_out(step.swap_out_copies)
        if step.swap_in_copies:
            self.worker.swap_in(step.swap_in_copies)
        if step.block_copies:
            self.worker.copy(step.block_copies)

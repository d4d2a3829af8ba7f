"""The engine's hands: obeys a plan with one forward pass and one sampling.

    prepare(plan)   engine thread: what the step needs is copied from the scheduler's objects
    launch(work)    slots joined and left, tables written, blocks moved, forward and sampling begun
    .wait()         the StepResult

On the CPU launch() does the step, in a thread of its own under overlap; on a GPU it returns when
the kernels are in line. Which it is, is the lane's business. A feature is a part with a place in
this pipeline, never a branch in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.core.types import BlockCopy, Sequence, StepPlan, StepResult
from quire.models.base import LanguageModel
from quire.runner.device_worker import CompletedStep, DeviceWorker, StepHandle
from quire.runner.profiler import span
from quire.runner.prompt_logprobs import PromptLogprobsInput
from quire.runner.slots import BlockTableUpdate, SlotTables
from quire.runner.step_batch import StepBatch, build_step_batch
from quire.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A plan made ready: nothing in it refers to state that the scheduler may change."""

    leaves: tuple[int, ...]
    joins: tuple[tuple[int, Sequence], ...]
    block_table_updates: list[BlockTableUpdate]
    swap_out_copies: tuple[BlockCopy, ...]
    swap_in_copies: tuple[BlockCopy, ...]
    block_copies: tuple[BlockCopy, ...]
    batch: StepBatch | None
    prompt_logprobs: PromptLogprobsInput | None


class ModelRunner:
    """Owns what is known of the device's rows: slots, sampler rows; the lane owns the rest."""

    def __init__(
        self,
        model: LanguageModel,
        sampler: Sampler,
        slots: SlotTables,
        lane: DeviceWorker,
    ) -> None:
        self.model = model
        self.worker = lane
        self._sampler = sampler
        self._slots = slots

    def prepare(self, plan: StepPlan) -> ModelInput:
        """Copy what the step needs from the plan's live objects. Engine thread, in plan order."""
        with span("prepare"):
            return self._prepare(plan)

    def _prepare(self, plan: StepPlan) -> ModelInput:
        changes = self._slots.collect_updates(plan)
        inputs = build_step_batch(plan) if plan.rows else None
        return ModelInput(
            leaves=plan.leaves,
            joins=tuple((seq.slot, seq) for seq in plan.joins),
            block_table_updates=changes,
            swap_out_copies=plan.swap_out,
            swap_in_copies=plan.swap_in,
            block_copies=plan.copies,
            batch=inputs,
            prompt_logprobs=PromptLogprobsInput.from_plan(plan, inputs),
        )

    @torch.inference_mode()
    def launch(self, work: ModelInput) -> StepHandle:
        """Begin the work. One thread, in plan order."""
        with span("launch"), self.worker.execution_context():
            for slot in work.leaves:
                self._sampler.leave(slot)
            for slot, seq in work.joins:
                self._sampler.join(slot, seq)
            if work.block_table_updates:
                self.worker.write_tables(work.block_table_updates)
            self._move_blocks(work)
            if work.batch is None:
                return CompletedStep(StepResult(()))
            return self.worker.compute(work.batch, work.prompt_logprobs)

    def recover(self) -> None:
        """A step raised, and nothing is under way: forget what it left half done.

        Raises EngineDead if the device is lost.
        """
        self._sampler.recover()
        self.worker.recover()

    def release_kv_memory(self) -> None:
        """Give the KV memory back to the system; every block's content is gone."""
        self.worker.release_kv_memory()

    def _move_blocks(self, work: ModelInput) -> None:
        """In this order, because one plan may free a block, refill it, and copy from it."""
        if work.swap_out_copies:
            self.worker.swap_out(work.swap_out_copies)
        if work.swap_in_copies:
            self.worker.swap_in(work.swap_in_copies)
        if work.block_copies:
            self.worker.copy(work.block_copies)

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

from quire.core.types import Copy, Sequence, StepPlan, StepResult
from quire.models.base import LanguageModel
from quire.runner.inputs import Inputs, gather
from quire.runner.lane import Computed, Done, Lane
from quire.runner.profile import span
from quire.runner.prompt_logprobs import PromptLogprobs
from quire.runner.slots import Change, Slots
from quire.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Work:
    """A plan made ready: nothing in it refers to state that the scheduler may change."""

    leaves: tuple[int, ...]
    joins: tuple[tuple[int, Sequence], ...]
    changes: list[Change]
    swap_out: tuple[Copy, ...]
    swap_in: tuple[Copy, ...]
    copies: tuple[Copy, ...]
    inputs: Inputs | None
    prompts: PromptLogprobs | None


class Runner:
    """Owns what is known of the device's rows: slots, sampler rows; the lane owns the rest."""

    def __init__(
        self,
        model: LanguageModel,
        sampler: Sampler,
        slots: Slots,
        lane: Lane,
    ) -> None:
        self.model = model
        self.lane = lane
        self._sampler = sampler
        self._slots = slots

    def prepare(self, plan: StepPlan) -> Work:
        """Copy what the step needs from the plan's live objects. Engine thread, in plan order."""
        with span("prepare"):
            return self._prepare(plan)

    def _prepare(self, plan: StepPlan) -> Work:
        changes = self._slots.update(plan)
        inputs = gather(plan) if plan.rows else None
        return Work(
            leaves=plan.leaves,
            joins=tuple((seq.slot, seq) for seq in plan.joins),
            changes=changes,
            swap_out=plan.swap_out,
            swap_in=plan.swap_in,
            copies=plan.copies,
            inputs=inputs,
            prompts=PromptLogprobs.of(plan, inputs),
        )

    @torch.inference_mode()
    def launch(self, work: Work) -> Computed:
        """Begin the work. One thread, in plan order."""
        with span("launch"), self.lane.scope():
            for slot in work.leaves:
                self._sampler.leave(slot)
            for slot, seq in work.joins:
                self._sampler.join(slot, seq)
            if work.changes:
                self.lane.write_tables(work.changes)
            self._move_blocks(work)
            if work.inputs is None:
                return Done(StepResult(()))
            return self.lane.compute(work.inputs, work.prompts)

    def mend(self) -> None:
        """A step raised, and nothing is under way: forget what it left half done.

        Raises EngineDead if the device is lost.
        """
        self._sampler.mend()
        self.lane.mend()

    def forget_kv(self) -> None:
        """Give the KV memory back to the system; every block's content is gone."""
        self.lane.forget_kv()

    def _move_blocks(self, work: Work) -> None:
        """In this order, because one plan may free a block, refill it, and copy from it."""
        if work.swap_out:
            self.lane.swap_out(work.swap_out)
        if work.swap_in:
            self.lane.swap_in(work.swap_in)
        if work.copies:
            self.lane.copy(work.copies)

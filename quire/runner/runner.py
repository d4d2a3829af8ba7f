"""The engine's hands: obeys a plan with one forward pass and one sampling.

    prepare(plan)   engine thread: slots and inputs are copied from the scheduler's objects
    execute(work)   device thread: blocks moved, forward, sampled -> StepResult

A feature is a part with a place in this pipeline, never a branch in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attention.base import Backend
from quire.core.types import Copy, Sequence, StepPlan, StepResult, TokenLogprobs
from quire.kernels.copy_blocks import copy_blocks
from quire.kernels.native import library
from quire.models.base import LanguageModel, StepInputs
from quire.runner.graphs import Graphs
from quire.runner.inputs import Inputs, gather
from quire.runner.memory import give_back
from quire.runner.prompt_logprobs import PromptLogprobs
from quire.runner.slots import Slots
from quire.sampling.logprobs import Mode
from quire.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Work:
    """A plan made ready: nothing in it refers to state that the scheduler may change."""

    leaves: tuple[int, ...]
    joins: tuple[tuple[int, Sequence], ...]
    swap_out: tuple[Copy, ...]
    swap_in: tuple[Copy, ...]
    copies: tuple[Copy, ...]
    inputs: Inputs | None
    rows: int
    prompts: PromptLogprobs | None


class Runner:
    """Owns the device's state: slots, KV tensors (through the backend), sampler rows."""

    def __init__(
        self,
        model: LanguageModel,
        backend: Backend,
        sampler: Sampler,
        slots: Slots,
        *,
        cache: list[Tensor],
        host_cache: list[Tensor],
        block_size: int,
        logprobs_mode: Mode,
        graphs: Graphs | None,
    ) -> None:
        self.model = model
        self._backend = backend
        self._sampler = sampler
        self._slots = slots
        self._cache = cache
        self._host_cache = host_cache
        self._block_size = block_size
        self._logprobs_mode = logprobs_mode
        self._graphs = graphs
        self._last_token = torch.zeros(slots.tables[0].shape[0], dtype=torch.int32)

    def prepare(self, plan: StepPlan) -> Work:
        """Copy what the step needs from the plan's live objects. Engine thread, in plan order."""
        self._slots.update(plan)
        inputs = gather(plan, self._slots, self._block_size) if plan.rows else None
        return Work(
            leaves=plan.leaves,
            joins=tuple((seq.slot, seq) for seq in plan.joins),
            swap_out=plan.swap_out,
            swap_in=plan.swap_in,
            copies=plan.copies,
            inputs=inputs,
            rows=len(plan.rows),
            prompts=PromptLogprobs.of(plan, inputs),
        )

    def forget_kv(self) -> None:
        """Give the KV memory back to the system; every block's content is gone."""
        give_back([*self._cache, *self._host_cache])

    @torch.inference_mode()
    def execute(self, work: Work) -> StepResult:
        """Do the work. Device thread, in plan order."""
        for slot in work.leaves:
            self._sampler.leave(slot)
        for slot, seq in work.joins:
            self._sampler.join(slot, seq)
        self._move_blocks(work)
        if work.inputs is None:
            return StepResult(())
        with _one_torch_thread():
            return self._compute(work, work.inputs)

    def _move_blocks(self, work: Work) -> None:
        """In this order, because one plan may free a block, refill it, and copy from it."""
        if work.swap_out:
            copy_blocks(self._cache, self._host_cache, work.swap_out)
        if work.swap_in:
            copy_blocks(self._host_cache, self._cache, work.swap_in)
        if work.copies:
            copy_blocks(self._cache, self._cache, work.copies)

    def _compute(self, work: Work, inputs: Inputs) -> StepResult:
        if len(inputs.late):
            inputs.token_ids[inputs.late] = self._last_token.numpy()[inputs.late_slots]
        if inputs.decode_only and self._graphs is not None:
            logits = self._graphs.logits(inputs)
            if logits is not None:
                return self._sampled(work, inputs, logits, {})
        hidden = self._forward(inputs)
        judged = {}
        if work.prompts is not None:
            judged = work.prompts.compute(self.model, hidden, self._logprobs_mode)
        if not inputs.sampled_rows:
            return StepResult(_nothing(work.rows), prompt_logprobs=judged)
        chosen = hidden if inputs.decode_only else hidden[torch.from_numpy(inputs.sampled)]
        return self._sampled(work, inputs, self.model.logits(chosen), judged)

    def _forward(self, inputs: Inputs) -> Tensor:
        """Hidden states of the step's tokens: [T, E]."""
        step = StepInputs(
            token_ids=torch.from_numpy(inputs.token_ids),
            positions=torch.from_numpy(inputs.positions),
            attention=self._backend.plan(inputs.batch()),
        )
        return self.model(step)

    def _sampled(
        self,
        work: Work,
        inputs: Inputs,
        logits: Tensor,
        judged: dict[int, list[TokenLogprobs]],
    ) -> StepResult:
        """One token for each of the rows that logits [R, V] speaks of."""
        rows, slots = inputs.sampled_rows, inputs.sampled_slots
        sampled = self._sampler.sample(logits, slots, inputs.outputs)
        ids = sampled.token_ids.tolist()
        self._last_token.numpy()[list(slots)] = ids
        tokens = _nothing(work.rows)
        for row, token in zip(rows, ids, strict=True):
            tokens[row] = (token,)
        return StepResult(
            tokens,
            logprobs={rows[i]: [value] for i, value in sampled.logprobs().items()},
            prompt_logprobs=judged,
            errors={rows[i]: message for i, message in sampled.errors.items()},
        )


def _nothing(rows: int) -> list[tuple[int, ...]]:
    return [()] * rows


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Torch's own pool spins after each op and takes a core from the native kernels' pool."""
    before = torch.get_num_threads()
    if before == 1 or not library.active():
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

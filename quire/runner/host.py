"""Steps on the CPU: numpy arrays that torch tensors share, tapes for decode steps, no waiting.

`compute` returns when the step is done. Under overlap the executor calls it in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from torch import Tensor

from quire.attention.base import Backend, Batch
from quire.core.types import NO_BLOCK, UNKNOWN, Copy, StepResult, TokenLogprobs
from quire.kernels.copy_blocks import copy_blocks
from quire.kernels.native import library
from quire.models.base import LanguageModel, StepInputs
from quire.platform import cpu
from quire.runner.graphs import Graphs
from quire.runner.inputs import Inputs
from quire.runner.lane import Done, result_of
from quire.runner.memory import give_back
from quire.runner.prompt_logprobs import PromptLogprobs
from quire.runner.slots import Change, Slots
from quire.sampling.logprobs import Mode
from quire.sampling.sampled import Verdicts
from quire.sampling.sampler import Sampler
from quire.sampling.steps.grammar import Binding


class Lane:
    """Owns the block tables and last tokens of every slot, and the tapes."""

    def __init__(
        self,
        model: LanguageModel,
        backend: Backend,
        sampler: Sampler,
        slots: Slots,
        *,
        cache: list[Tensor],
        host_cache: list[Tensor],
        max_tokens: int,
        logprobs_mode: Mode,
        eager: bool,
    ) -> None:
        """eager: no tapes."""
        self._model = model
        self._backend = backend
        self._sampler = sampler
        self._cache = cache
        self._host_cache = host_cache
        self._block_size = slots.block_size
        self._logprobs_mode: Mode = logprobs_mode
        shape = (slots.max_seqs, slots.width)
        self.tables = [np.full(shape, NO_BLOCK, dtype=np.int32) for _ in range(slots.groups)]
        self._last_token = np.zeros(slots.max_seqs, dtype=np.int32)
        # else masks filled beside the kernels would hold one of their threads up, and so all
        native = library.library()
        self._has_spare_core = native is not None and cpu.threads() > native.threads
        self._graphs = None
        if not eager:
            self._graphs = Graphs(
                model, backend, max_rows=slots.max_seqs, width=slots.width, groups=slots.groups
            )

    def scope(self) -> AbstractContextManager[object]:
        return _one_torch_thread()

    def settle(self) -> None:
        """A step is done when compute() returns."""

    def mend(self) -> None:
        """Nothing of a step lasts but what joins write anew."""

    def write_tables(self, changes: Sequence[Change]) -> None:
        for group, slot, at, blocks in changes:
            self.tables[group][slot, at : at + len(blocks)] = blocks

    def forget_kv(self) -> None:
        give_back([*self._cache, *self._host_cache])

    def swap_out(self, pairs: Sequence[Copy]) -> None:
        copy_blocks(self._cache, self._host_cache, pairs)

    def swap_in(self, pairs: Sequence[Copy]) -> None:
        copy_blocks(self._host_cache, self._cache, pairs)

    def copy(self, pairs: Sequence[Copy]) -> None:
        copy_blocks(self._cache, self._cache, pairs)

    def compute(self, inputs: Inputs, prompts: PromptLogprobs | None) -> Done:
        return Done(self._compute(inputs, prompts))

    def _compute(self, inputs: Inputs, prompts: PromptLogprobs | None) -> StepResult:
        late = np.nonzero(inputs.token_ids == UNKNOWN)[0]
        inputs.token_ids[late] = self._last_token[inputs.token_slots[late]]
        binding = self._sampler.binding(inputs.sampled_slots, inputs.outputs)
        if binding is not None and self._has_spare_core:
            binding.begin()
        batch = self.batch(inputs)
        if inputs.decode_only and self._graphs is not None:
            logits = self._graphs.logits(inputs, batch)
            if logits is not None:
                return self._sampled(inputs, logits, {}, binding)
        step = StepInputs(
            token_ids=torch.from_numpy(inputs.token_ids),
            positions=torch.from_numpy(inputs.positions),
            attention=self._backend.plan(batch),
        )
        hidden = self._model(step)
        judged = {}
        if prompts is not None:
            judged = prompts.start(self._model, hidden, self._logprobs_mode).lists()
        if not inputs.sampled_rows:
            return result_of(inputs, (), {}, judged, Verdicts({}, {}, {}))
        chosen = hidden if inputs.decode_only else hidden[torch.from_numpy(inputs.sampled)]
        return self._sampled(inputs, self._model.logits(chosen), judged, binding)

    def batch(self, inputs: Inputs) -> Batch:
        """The attention backend's view of the step."""
        width = -(-inputs.max_context // self._block_size)
        blocks = inputs.positions // self._block_size
        offsets = inputs.positions % self._block_size
        kv_slots = []
        for table in self.tables:
            block = table[inputs.token_slots, blocks].astype(np.int64)
            assert block.min() > NO_BLOCK, "a token to compute has no block"
            kv_slots.append(block * self._block_size + offsets)
        return Batch(
            q_starts=torch.from_numpy(inputs.q_starts),
            contexts=torch.from_numpy(inputs.contexts),
            tables=tuple(torch.from_numpy(table[inputs.slots, :width]) for table in self.tables),
            slots=tuple(torch.from_numpy(slots) for slots in kv_slots),
            max_query=inputs.max_query,
            max_context=inputs.max_context,
            decodes=inputs.decodes,
            past=inputs.past,
        )

    def _sampled(
        self,
        inputs: Inputs,
        logits: Tensor,
        judged: dict[int, list[TokenLogprobs]],
        binding: Binding | None,
    ) -> StepResult:
        """One token for each of the rows that logits [R, V] speaks of."""
        slots = inputs.sampled_slots
        sampled = self._sampler.sample(logits, slots, inputs.outputs.tolist(), binding)
        ids = sampled.token_ids.tolist()
        self._last_token[list(slots)] = ids
        if binding is not None:
            binding.tell(lambda: (ids, sampled.tops.numpy()))
            binding.settle()
        return result_of(inputs, ids, sampled.logprobs(), judged, sampled.verdicts, binding)


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

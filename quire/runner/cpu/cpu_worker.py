"""CPU worker: runs steps on numpy arrays that torch tensors share, from tapes where it can.

`compute` returns when the step is done. To overlap, the executor calls it in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.attention.base import AttentionMetadata, Backend, CrossMetadata
from quire.core.types import NO_BLOCK, UNKNOWN, BlockCopy, DataParallelTokens, StepResult
from quire.distributed.stage_link import StageLink
from quire.kernels.copy_blocks import copy_blocks
from quire.kernels.native import library
from quire.models.base import HiddenTaps, LanguageModel, StepInputs
from quire.platform import cpu
from quire.pooling.pooler import Pooler
from quire.runner.cpu.tape_cache import StepForward, TapeCache, mixed_tokens, tape_rows
from quire.runner.device_worker import CompletedStep, StepShape, build_step_result
from quire.runner.drafters.base import ModelDrafter, TargetStates
from quire.runner.expert_steps import ExpertSteps
from quire.runner.kv_tensors import release_pages
from quire.runner.parts.base import (
    ForwardOutput,
    StepPart,
    StepVariant,
    keep_graphs,
    split_variant,
)
from quire.runner.slots import BlockTableUpdate, TableShape
from quire.runner.state_tensors import set_state_batch, state_step
from quire.runner.step_batch import StepBatch
from quire.sampling.logprobs import Mode
from quire.sampling.sampler import Sampler
from quire.sampling.step_sampling import StepSampling, StepTokens


class CpuWorker:
    """Owns the block tables and last tokens of every slot, and the tapes."""

    def __init__(
        self,
        model: LanguageModel,
        backend: Backend,
        sampler: Sampler,
        slots: TableShape,
        *,
        cache: list[Tensor],
        host_cache: list[Tensor],
        max_tokens: int,
        logprobs_mode: Mode,
        eager: bool,
        pooler: Pooler | None = None,
        generates: bool = True,
        max_drafts: int = 0,
        link: StageLink | None = None,
        drafter: ModelDrafter | None = None,
        experts: ExpertSteps | None = None,
    ) -> None:
        """eager: record no tapes. generates: steps have sampled rows. max_drafts: of a row. link:
        to other pipeline stages; None: there are none. experts: of other data-parallel ranks' rows;
        None: there are none."""
        self._drafter = drafter
        self._link = link = link or StageLink()
        alone = generates and link.is_last and drafter is None and experts is None
        self._selects = alone and getattr(model, "selects_rows", False)
        self._model = model
        self._backend = backend
        self._sampler = sampler
        self._cache = cache
        self._host_cache = host_cache
        self._block_size = slots.block_size
        self._logprobs_mode: Mode = logprobs_mode
        self._pooler = pooler
        shape = (slots.max_seqs, slots.width)
        self._groups = slots.groups
        self.tables = [np.full(shape, NO_BLOCK, dtype=np.int32) for _ in range(slots.tables)]
        self.last_tokens = torch.zeros(slots.max_seqs, dtype=torch.int32)
        self._last_token = self.last_tokens.numpy()
        # without a spare core, filling masks would delay one of the kernels' threads, and so all
        native = library.load_library()
        self._has_spare_core = native is not None and cpu.available_cores() > native.threads
        self._tapes = None
        if model.is_recordable and not eager and generates:
            forward = StepForward(
                model,
                backend,
                max_rows=tape_rows(slots.max_seqs, max_drafts, max_tokens),
                max_tokens=mixed_tokens(max_tokens),
                width=slots.width,
                groups=slots.groups,
                has_cross=slots.has_cross,
                whole_logits=sampler.strips is None,
                is_last_stage=link.is_last,
                taps=None if drafter is None else drafter.taps,
            )
            self._tapes = TapeCache(forward)

    def execution_context(self) -> AbstractContextManager[object]:
        return _one_torch_thread()

    def synchronize(self) -> None:
        """Do nothing: a step is done when compute() returns."""

    def recover(self) -> None:
        """Do nothing: joins overwrite all state of a slot."""

    def write_tables(self, changes: Sequence[BlockTableUpdate]) -> None:
        for group, slot, at, blocks in changes:
            self.tables[group][slot, at : at + len(blocks)] = blocks

    def release_kv_memory(self) -> None:
        release_pages([*self._cache, *self._host_cache])

    def swap_out(self, pairs: Sequence[BlockCopy]) -> None:
        copy_blocks(self._cache, self._host_cache, pairs)

    def swap_in(self, pairs: Sequence[BlockCopy]) -> None:
        copy_blocks(self._host_cache, self._cache, pairs)

    def copy(self, pairs: Sequence[BlockCopy]) -> None:
        copy_blocks(self._cache, self._cache, pairs)

    def restore_kv_memory(self) -> None:
        """Do nothing: the system gives pages back when they are written."""

    def padded_shape(self, shared: DataParallelTokens) -> None:
        return None

    def compute(
        self, batch: StepBatch, parts: Collection[StepPart], padded: StepShape | None = None
    ) -> CompletedStep:
        return CompletedStep(self._compute(batch, parts))

    def _compute(self, inputs: StepBatch, parts: Collection[StepPart]) -> StepResult:
        late = np.nonzero(inputs.token_ids == UNKNOWN)[0]
        inputs.token_ids[late] = self._last_token[inputs.token_slots[late]]
        sampling = None
        if self._link.is_last:
            sampling = StepSampling(
                self._sampler,
                inputs.sampled_slots,
                inputs.num_outputs,
                inputs.next_drafts,
                inputs.agrees,
            )
            if sampling.masks is not None and self._has_spare_core:
                sampling.masks.start_fill()
        attention_metadata = self.attention_metadata(inputs)
        set_state_batch(self._model, inputs)
        variant, others = split_variant(self._model, parts)
        for part in parts:
            part.write_inputs(self._model, inputs)
        carried = self._link.receive(len(inputs.token_ids))
        is_plain = inputs.decode_only and variant.decodes and not inputs.has_axes
        has_tape = is_plain and keep_graphs(others)
        if has_tape and self._tapes is not None:
            found = self._tapes.run(inputs, attention_metadata, variant, carried)
            for part in others if found is not None else ():
                part.after_forward(self._model)
            if found is not None and sampling is None:
                return self._hand_on(found.out)
            if found is not None and sampling is not None:
                return self._sample(inputs, sampling, found.out, (), found.states)
        target, selects = None, self._selects and not (parts or variant.name or inputs.decode_only)
        is_alike = variant.has_prompts and not inputs.has_axes
        if self._tapes is not None and is_alike and keep_graphs(others, all_hidden=True):
            target = self._tapes.run_mixed(
                inputs, attention_metadata, variant, carried, selects=selects
            )
        if target is None:
            target = self._run_eagerly(
                inputs, attention_metadata, parts, variant, carried, selects=selects
            )
        for part in parts:
            part.after_forward(self._model)
        hidden = target.hidden
        if sampling is None:
            return self._hand_on(hidden)
        forward = ForwardOutput(self._model, hidden, self._logprobs_mode, self._pooler, variant)
        extras = [part.apply(forward).result() for part in parts]
        states = None if self._drafter is None else target
        if not inputs.sampled_rows:
            self._propose(inputs, (), (), states)
            return build_step_result(inputs, StepTokens(()), extras)
        at = inputs.sampled_row_indexes if selects else inputs.sampled_tokens
        chosen = hidden if inputs.decode_only else hidden[torch.from_numpy(at)]
        with variant.logits(torch.tensor(inputs.sampled_slots, dtype=torch.int32)):
            logits = self._model.logits(chosen, whole=self._sampler.strips is None)
        return self._sample(inputs, sampling, logits, extras, states)

    def _run_eagerly(
        self,
        inputs: StepBatch,
        attention_metadata: AttentionMetadata,
        parts: Collection[StepPart],
        variant: StepVariant,
        carried: Tensor | None,
        *,
        selects: bool,
    ) -> TargetStates:
        """Return the hidden states [T, E] of all tokens; selects: [S, E], of the last of each
        row."""
        taps = HiddenTaps(frozenset() if self._drafter is None else self._drafter.taps)
        step = StepInputs(
            token_ids=torch.from_numpy(inputs.token_ids),
            positions=torch.from_numpy(inputs.rotary_positions),
            attention=self._backend.plan(attention_metadata),
            carried=carried,
            taps=None if self._drafter is None else taps,
            states=state_step(
                self._model,
                torch.from_numpy(inputs.token_slots),
                torch.from_numpy(inputs.q_starts),
                inputs.num_decodes,
            ),
            needed=torch.from_numpy(inputs.row_ends) if selects else None,
        )
        for part in parts:
            step = part.before_forward(self._model, step, variant)
        with variant.forward(torch.from_numpy(inputs.token_slots)):
            hidden = self._model(variant.inputs(step))
        return TargetStates(hidden, taps.hidden)

    def _hand_on(self, hidden: Tensor) -> StepResult:
        self._link.send(hidden)
        return StepResult(())

    def attention_metadata(self, inputs: StepBatch) -> AttentionMetadata:
        """Return the step as the attention backend reads it."""
        width = -(-inputs.max_context // self._block_size)
        blocks = inputs.positions // self._block_size
        offsets = inputs.positions % self._block_size
        kv_slots = []
        own = self.tables[: self._groups]
        for table in own:
            block = table[inputs.token_slots, blocks].astype(np.int64)
            assert block.min() > NO_BLOCK, "a token to compute has no block"
            kv_slots.append(block * self._block_size + offsets)
        return AttentionMetadata(
            q_starts=torch.from_numpy(inputs.q_starts),
            contexts=torch.from_numpy(inputs.contexts),
            tables=tuple(torch.from_numpy(table[inputs.slots, :width]) for table in own),
            slots=tuple(torch.from_numpy(slots) for slots in kv_slots),
            max_query=inputs.max_query,
            max_context=inputs.max_context,
            decodes=inputs.num_decodes,
            past=inputs.max_prior_context,
            cross=self._cross_metadata(inputs) if len(self.tables) > self._groups else None,
        )

    def _cross_metadata(self, inputs: StepBatch) -> CrossMetadata:
        cross, lengths = self.tables[self._groups :]
        tokens = inputs.token_slots
        length = lengths[tokens, 0]
        width = -(-int(length.max(initial=1)) // self._block_size)
        return CrossMetadata(
            table=torch.from_numpy(cross[tokens, :width]),
            lengths=torch.from_numpy(length),
            starts=torch.arange(len(tokens) + 1, dtype=torch.int32),
        )

    def _sample(
        self,
        inputs: StepBatch,
        sampling: StepSampling,
        logits: Tensor,
        extras: Sequence[Mapping[str, Any]],
        states: TargetStates | None,
    ) -> StepResult:
        """Sample a token for each row of logits [R, V]."""
        sampled, slots = sampling.run(logits), inputs.sampled_slots
        kept = inputs.accepted(sampled.ids, sampled.ends)
        self._last_token[[slots[i] for i in kept]] = [sampled.ids[i] for i in kept]
        extras = [*extras, self._propose(inputs, sampled.ids, kept, states)]
        return build_step_result(inputs, sampled, extras)

    def _propose(
        self,
        inputs: StepBatch,
        ids: Sequence[int],
        kept: Sequence[int],
        states: TargetStates | None,
    ) -> Mapping[str, Any]:
        """Return the drafts that a model proposes, as fields of the result."""
        if self._drafter is None or states is None or inputs.draft_inputs is None:
            return {}
        drafts = self._drafter.propose(inputs, ids, kept, states, self.attention_metadata)
        return {"drafts": drafts}


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Torch's own pool spins after each op and takes a core from the native kernels' pool."""
    before = torch.get_num_threads()
    if before == 1 or not library.available():
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

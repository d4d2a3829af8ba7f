"""CUDA worker: launches each step on one stream; nothing waits but `PendingStep.wait`.

The state of the slots is on the device: block tables and last tokens. A step uploads a few integers
per row and gathers its inputs there; a token goes from one step to the next without the host, so
step n + 1 is enqueued before step n is done. A decode-only step is one graph or two: forward pass,
and logits, sampling and write-back. The forward pass of a step with few tokens of prompts is one,
padded to one of a few shapes; any other is launched kernel by kernel. A step with drafts is like
any other, with several rows of one slot; rows that are sampled draft by draft wait for the tokens.
A pipeline stage receives and sends hidden states before and behind its graphs (stage_states.py).

Axes: T tokens in the step, S rows, R sampled rows, M slots, W table width, G layer groups.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from quire.attention.base import Backend
from quire.config.memory.captured_steps import CAPTURED_TOKENS
from quire.config.memory.draft_rows import draft_rows
from quire.core.types import BlockCopy, DataParallelTokens
from quire.distributed.stage_link import StageLink
from quire.errors import EngineDead
from quire.kernels.framework import late_work, lazy_fusion
from quire.kernels.gpu.runtime import step_io as kernels
from quire.models.base import LanguageModel, StepInputs
from quire.pooling.pooler import Pooler
from quire.runner.drafters.base import ModelDrafter
from quire.runner.expert_steps import ExpertSteps
from quire.runner.gpu.cuda_graphs import (
    CudaGraphCache,
    DecodeGraph,
    capture_sizes,
    decode_graphs,
    draft_sizes,
    padded_sample_rows,
    variant_sizes,
    weak_method,
)
from quire.runner.gpu.draft_chain import ChainBuffers, ChainSizes, PromptStep, Ran, SlotState
from quire.runner.gpu.draft_proposals import build_proposals
from quire.runner.gpu.gemm_warmup import warm_up_gemms
from quire.runner.gpu.graph_groups import (
    GraphKey,
    OwnedGraph,
    StepGraphs,
    find_graph_groups,
    find_owners,
    variant_of,
)
from quire.runner.gpu.kv_memory import KVMemory, touch_memory
from quire.runner.gpu.mixed_batch_graphs import (
    GraphShape,
    graph_shapes,
    pad_to_shape,
    select_graph_shape,
    select_shared_shape,
    without_padding,
)
from quire.runner.gpu.mixed_inputs import MixedInputs, cross_metadata, empty_step_buffers
from quire.runner.gpu.pending_step import DeviceInputs, PendingStep, SamplingWay, StepBounds
from quire.runner.gpu.pinned_io import PinnedIO
from quire.runner.gpu.result_buffers import ResultBuffers
from quire.runner.gpu.stage_states import HandedOnStep, StageStates
from quire.runner.gpu.staging_buffer import StagingBuffer, align_words
from quire.runner.gpu.table_changes import write_table_changes
from quire.runner.parts.base import (
    ForwardOutput,
    PendingPart,
    StepPart,
    StepVariant,
    find_variants,
    keep_graphs,
    split_variant,
)
from quire.runner.profiler import span
from quire.runner.slots import BlockTableUpdate, TableShape
from quire.runner.state_tensors import reserve_draft_rows, set_state_batch, state_step
from quire.runner.step_batch import EMPTY_BATCH, StepBatch
from quire.sampling.logprobs import Mode
from quire.sampling.sampler import Sampler
from quire.sampling.sampler_output import HostSamplerOutput
from quire.sampling.step_sampling import StepTokens
from quire.sampling.steps.grammar_masks import GrammarMasks

NUM_STAGING_BUFFERS = 5
"""Host buffers per upload and per result: more than an engine of one stage has steps in flight."""


class CudaWorker:
    """Owns the stream, the rows on the device and the graphs."""

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
        captured_tokens: int = CAPTURED_TOKENS,
        pooler: Pooler | None = None,
        generates: bool = True,
        max_drafts: int = 0,
        link: StageLink | None = None,
        drafter: ModelDrafter | None = None,
        experts: ExpertSteps | None = None,
    ) -> None:
        """max_tokens: of the largest step. eager: no graphs. captured_tokens: of the largest graph
        with prompts. generates: steps have sampled rows. max_drafts: of a row. link: to other
        stages; None: there are none. drafter: None: no model drafts. experts: of other
        data-parallel ranks' rows; None: there are none. With these, only steps whose rows decode
        on every rank are graphs."""
        device = sampler.device
        link, self._experts = link or StageLink(), experts or ExpertSteps()
        depth = max(NUM_STAGING_BUFFERS, link.mesh.pp + 2)
        rows = slots.max_seqs
        drafts = draft_rows(rows, max_drafts, max_tokens) if generates else 0
        self._max_rows = rows + drafts  # more than a step has, whatever joins beside drafts
        self._model, self._backend, self._sampler = model, backend, sampler
        self._logprobs_mode: Mode = logprobs_mode
        self._pooler = pooler
        self._stream = torch.cuda.Stream(device)
        self._width = align_words(slots.width)
        self._groups, self._block_size = slots.groups, slots.block_size
        self._tables = torch.zeros(
            (slots.tables, rows, self._width), dtype=torch.int32, device=device
        )
        self.last_tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._kv_memory = KVMemory(cache, host_cache, device)
        self._pinned_io = PinnedIO(self._max_rows, depth, device)
        most = max(max_tokens, self._max_rows)
        self._token_starts: Tensor | None = None  # of a model with an encoder: 0, 1, 2, ...
        if slots.has_cross:
            self._token_starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._variants = find_variants(model)
        axes = max(one.rotary_axes for one in self._variants)
        self._mixed_inputs = MixedInputs(
            most, self._max_rows, slots.has_rotary, depth, device, axes
        )
        self._table_staging = StagingBuffer(4 * align_words(rows + most), depth, device)
        self._results = ResultBuffers(self.last_tokens, self._max_rows, depth)
        self._hidden: Tensor | None = None  # [M, E] of a forward graph, sampled after it
        self._max_tokens, self._eager, self._graph_bytes = most, eager, 0
        shares = self._experts.are_shared
        self._sizes, self._draft_sizes = capture_sizes(rows), draft_sizes(0 if shares else drafts)
        self._variant_sizes = {one.name: variant_sizes(self._sizes, one) for one in self._variants}
        self._generates, self._samples = generates, generates and link.is_last
        decodes, has_graphs = rows if generates else 0, backend.supports_prefill_graphs
        self._shapes = graph_shapes(max_tokens, decodes, captured_tokens) if has_graphs else []
        longest_graph = max([self._max_rows, *(shape.tokens for shape in self._shapes)])
        reserve_draft_rows(model, longest_graph if drafts else 0)
        self._stage = StageStates(link, longest_graph)
        self._graphs = CudaGraphCache[GraphKey](weak_method(self._launch), device)
        state = SlotState(self._tables, self.last_tokens, self._block_size)
        sizes = ChainSizes(
            self._max_rows, min(rows, drafts), max_drafts, depth, most, longest_graph
        )
        buffers = ChainBuffers(
            self._results.ids, self._pinned_io.views, self._mixed_inputs, self._graphs
        )
        self.proposals = build_proposals(drafter, state, buffers, sizes)
        self._pinned_io.ahead = None if self.proposals is None else self.proposals.ahead
        self._owners = find_owners(self._variants, self.proposals)
        self._selects = self._samples and self.proposals is None and not shares
        self._selects &= getattr(model, "selects_rows", False)
        self._stream.wait_stream(torch.cuda.current_stream(device))

    # -- the runner's calls ---------------------------------------------------------------------

    def execution_context(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def recover(self) -> None:
        """A CUDA context that is lost raises its error from every later call."""
        try:
            self.synchronize()
        except RuntimeError as error:
            raise EngineDead(f"the device is lost: {error}") from error
        self._pinned_io.out_of_sync = True
        self._stage.forget()

    def reserve_memory(self, size: int, pieces: int, piece: int) -> None:
        """Allocate from the driver what steps will need, and leave it in torch's pool of this
        stream. size: of the largest step, in one piece. pieces: small ones, kept apart there."""
        with self.execution_context():
            touch_memory(self.last_tokens.device, [size], [piece] * pieces)

    @torch.inference_mode()
    def warm_up_kernels(self) -> None:
        """Load the library's kernels for the sizes of steps, before steps need them; and those of
        our own that no dummy step runs: masks of constrained rows."""
        with self.execution_context():
            tokens = sorted({shape.tokens for shape in self._shapes})
            sizes = sorted({*self._sizes, *self._draft_sizes})
            models = self._model, *(() if self.proposals is None else self.proposals.models)
            dtype, *_ = [warm_up_gemms(one, sizes, tokens, self._max_tokens) for one in models]
            if self._samples:
                self._sampler.warm_up(dtype)

    @torch.inference_mode()
    def launch_graph_bodies(self) -> list[list[GraphKey]]:
        """Launch, kernel by kernel and without rows, the largest of each group of graphs.

        No state of a slot changes; earlier steps must be done. Returns the groups that can be
        captured: up to the first that waits for the device.
        """
        found = []
        with self.execution_context():
            for group in self.graph_groups():
                self._upload_empty(group[0])
                if not self._graphs.launch_without_waits(group[0]):
                    break
                found.append(group)
            self.synchronize()
        self._pinned_io.out_of_sync = True
        return found

    @torch.inference_mode()
    def capture_graphs(self, reserved_bytes: int) -> None:
        """Capture the graphs of all steps that have some; no later step captures. reserved_bytes:
        of memory that the graphs share."""
        self._graph_bytes = reserved_bytes
        for variant in self._variants:
            variant.reset()
        groups = [] if self._eager else self.launch_graph_bodies()
        with self.execution_context():
            self._graphs.capture([key for group in groups for key in group], reserved_bytes)

    def graph_groups(self) -> list[list[GraphKey]]:
        """Return all graphs that steps may run. Each group begins with its largest."""
        rows = self._sizes[-1] if self._generates else 0
        steps = StepGraphs(self._shapes, rows, self._draft_sizes, self._samples)
        return find_graph_groups(self._graphs, self._variants, steps, self.proposals)

    def release_kv_memory(self) -> None:
        self.synchronize()
        self._graphs.clear()
        self._kv_memory.release()

    def write_tables(self, changes: Sequence[BlockTableUpdate]) -> None:
        write_table_changes(changes, self._tables, self._table_staging)

    def swap_out(self, pairs: Sequence[BlockCopy]) -> None:
        self._kv_memory.swap_out(pairs, self._table_staging)

    def swap_in(self, pairs: Sequence[BlockCopy]) -> None:
        self._kv_memory.swap_in(pairs, self._table_staging)

    def copy(self, pairs: Sequence[BlockCopy]) -> None:
        self._kv_memory.copy(pairs, self._table_staging)

    def restore_kv_memory(self) -> None:
        if self._kv_memory.is_released:
            self._kv_memory.restore()
            with late_work.uncounted():
                self.capture_graphs(self._graph_bytes)

    def padded_shape(self, shared: DataParallelTokens) -> GraphShape | None:
        return None if self._eager else select_shared_shape(shared, self._sizes, self._shapes)

    def compute(
        self, batch: StepBatch, parts: Collection[StepPart], padded: GraphShape | None = None
    ) -> PendingStep | HandedOnStep:
        try:
            variant, others = split_variant(self._model, parts)
            sizes = self._draft_sizes if batch.uses_drafts else self._sizes
            fits = len(batch.rows) <= max(sizes, default=0) and not batch.has_axes
            keeps, before = keep_graphs(others), None
            if batch.continued and self.proposals is not None:
                alone = self._sampler.draws_alone(batch.sampled_slots)
                on_device = alone and keeps and not batch.has_axes
                batch, before = self.proposals.continued(batch, on_device=on_device)
            set_state_batch(self._model, batch)
            for part in parts:
                part.write_inputs(self._model, batch)
            self._stage.receive(len(batch.token_ids))
            alone = batch.decode_only and not self._experts.are_shared
            decodes = alone if padded is None else not padded.has_prompts
            if decodes and fits and variant.decodes and keeps:
                step = self._decode(batch, variant, padded.tokens if padded else 0, before)
                for part in others:
                    part.after_forward(self._model)
                return step
            has_shape = padded is not None and padded.has_prompts
            return self._mixed(batch, others, variant, padded if has_shape else None, before)
        except BaseException:
            self._pinned_io.out_of_sync = True
            lazy_fusion.discard()
            raise

    # -- graphs ---------------------------------------------------------------------------------

    def _launch(self, graph: GraphKey) -> None:
        """Launch the kernels of a graph, whose integers are where the device reads them."""
        if isinstance(graph, OwnedGraph):
            return self._owners[graph.owner].launch_own(graph.key)
        variant = variant_of(self._variants, graph)
        if isinstance(graph, GraphShape):
            self._store_hidden(self._mixed_forward(graph, variant))
        elif graph.part == "sampling":
            assert self._hidden is not None
            self._sample_decode(self._hidden[: graph.size], graph, variant)
        else:
            hidden = self._decode_forward(graph, variant)
            if graph.part == "forward":
                self._store_hidden(hidden)
                if graph.drafts and self.proposals is not None:
                    self.proposals.keep_states(self._hidden)
            else:
                self._sample_decode(hidden, graph, variant)

    def _upload_empty(self, graph: GraphKey) -> None:
        """Upload the integers of a step without rows: it reads and writes no slot."""
        if isinstance(graph, OwnedGraph):
            self._owners[graph.owner].prepare_own(graph.key)
        elif isinstance(graph, GraphShape):
            padded = pad_to_shape(EMPTY_BATCH, graph, variant_of(self._variants, graph).rotary_axes)
            self._mixed_inputs.upload(padded, self._stored_rows(graph))
        else:
            self._pinned_io.out_of_sync = True
            self._pinned_io.write_inputs(EMPTY_BATCH, graph.size)

    def _store_hidden(self, hidden: Tensor) -> None:
        """Keep what is read after the forward graph: [R, E] of sampled rows; if none is, [T, E]."""
        if self._hidden is None:
            most = 0 if self._samples or not self._shapes else self._shapes[-1].tokens
            shape = (max(most, self._max_rows), hidden.shape[1])
            self._hidden = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
        lazy_fusion.flush()
        self._hidden[: len(hidden)].copy_(hidden)

    # -- decode steps ---------------------------------------------------------------------------

    def _decode(
        self, inputs: StepBatch, variant: StepVariant, padded: int, before: PendingStep | None
    ) -> PendingStep | HandedOnStep:
        """padded: rows at which the step runs; 0: as few as will do. before: PendingStep.before."""
        how, rows, drafts = self._begin_sampling(inputs), len(inputs.slots), inputs.uses_drafts
        sizes = self._draft_sizes if drafts else self._variant_sizes.get(variant.name, self._sizes)
        size = padded or (rows if self._eager else sizes[bisect_left(sizes, rows)])
        graphs = decode_graphs(size, how.graph_kind, variant, drafts=drafts)
        if graphs[0] not in self._graphs:
            self._pinned_io.out_of_sync = True  # a trace skips the kernel that counts steps
        with span("post"):
            self._pinned_io.write_inputs(inputs, size)
        self._stage.place()
        with span("graph"):
            for graph in graphs:
                self._graphs.run(graph)
        self._experts.finish()
        if not rows or not self._stage.is_last:
            assert self._hidden is not None
            handed = self._stage.hand_on(self._hidden[:rows])
            self._pinned_io.output_view(handed.done)
            return handed
        if how.graph_kind is not None:
            done = torch.cuda.Event()
            done.record()
            view = self._pinned_io.output_view(done)
            step = PendingStep(inputs, done, view, None, (), how.masks, before=before)
            return self._propose(step, self._hidden, size)
        assert self._hidden is not None
        views, hidden = self._pinned_io.views(size), self._hidden[:size]
        pending = self._sample(hidden, views.row_slots, views.outputs, inputs, how, (), variant)
        self._pinned_io.output_view(pending.done)
        return self._propose(pending, hidden, size)

    def _decode_forward(self, graph: DecodeGraph, variant: StepVariant) -> Tensor:
        """Launch a decode step's forward pass, from the host's integers to hidden states [R, E]."""
        mail, views = self._pinned_io, self._pinned_io.views(graph.size)
        ids, kv_slots = empty_step_buffers(self._tables, graph.size)
        kernels.load_decode_inputs(
            mail.state, mail.inbox, mail.device_inputs, self.last_tokens, self._tables, ids,
            kv_slots, mail.depth, self._block_size, mail.ahead,
        )  # fmt: skip
        longest = self._width * self._block_size
        bounds = StepBounds(graph.size, 1, longest, 0, graph.drafts, graph.drafts)
        with self._experts.equal_rows(views.row_slots):
            return self._forward(views, ids, kv_slots, bounds, (), variant)

    def _sample_decode(self, hidden: Tensor, graph: DecodeGraph, variant: StepVariant) -> None:
        """Launch a decode step's logits, sampling and write-back."""
        mail, views = self._pinned_io, self._pinned_io.views(graph.size)
        logits = self._logits(hidden, views.row_slots, variant)
        assert graph.kind is not None
        ids, tops = self._sampler.choose(logits, views.row_slots, views.outputs, graph.kind)
        lazy_fusion.flush()
        if self.proposals is not None:
            self._results.ids[: len(ids)].copy_(ids)
        kernels.store_decode_results(
            mail.state, ids, tops, views.row_slots, self.last_tokens, mail.outbox, mail.stride
        )

    def _mixed(
        self,
        inputs: StepBatch,
        parts: Collection[StepPart],
        variant: StepVariant,
        shape: GraphShape | None,
        before: PendingStep | None,
    ) -> PendingStep | HandedOnStep:
        """parts: those without the variant. shape: of all data-parallel ranks, if there is one.
        before: PendingStep.before."""
        how = self._begin_sampling(inputs)
        sampled = max(padded_sample_rows(len(inputs.sampled_slots), self._max_rows), 1)
        graphs = keep_graphs(parts, all_hidden=not self._samples) and variant in self._variants
        has_place = variant.rotary_axes > 1 or not inputs.has_axes
        if not self._experts.are_shared:
            shape = select_graph_shape(inputs, self._shapes)
        if self._eager or not graphs or not has_place:
            shape = None
        pending_parts: list[PendingPart] = []
        ahead = None if before is None or self.proposals is None else self.proposals.ahead
        bounds = StepBounds.of(inputs, 0 if ahead is None else len(ahead))
        if self._selects and not parts and not variant.name:
            bounds = bounds._replace(selects=True)
        if shape is not None:
            padded = pad_to_shape(inputs, shape, variant.rotary_axes)
            views = self._upload(padded, max(sampled, self._stored_rows(shape)), before)
            self._stage.place(inputs.num_decodes, shape.decodes)
            with span("graph"):
                self._graphs.run(shape._replace(variant=variant.name))
            self._experts.finish()
            hidden = self._hidden
        else:
            views = self._upload(inputs, sampled, before)
            with span("forward"):
                hidden = self._gather_and_forward(views, bounds, parts, variant)
        assert hidden is not None
        for part in parts:
            part.after_forward(self._model)
        if not inputs.rows or not self._stage.is_last:
            return self._stage.hand_on(without_padding(hidden, inputs, shape) if shape else hidden)
        if parts:
            forward = ForwardOutput(self._model, hidden, self._logprobs_mode, self._pooler, variant)
            pending_parts = [part.apply(forward) for part in parts]
        prompts = PromptStep(views, bounds, shape)
        if not inputs.sampled_rows:
            step = self._build_pending_step(inputs, pending_parts)
            return self._propose(step, hidden, prompts)
        whole = not shape and not bounds.selects
        chosen = hidden.index_select(0, views.sampled) if whole else hidden[:sampled]
        row_slots, outputs = views.row_slots[:sampled], views.outputs[:sampled]
        step = self._sample(chosen, row_slots, outputs, inputs, how, pending_parts, variant)
        step.before = before
        return self._propose(step, hidden, prompts)

    def _upload(self, inputs: StepBatch, sampled: int, before: PendingStep | None) -> DeviceInputs:
        """Upload a step with prompts. sampled: rows, padded. before: PendingStep.before."""
        with span("upload"):
            views = self._mixed_inputs.upload(inputs, sampled)
            if before is not None and self.proposals is not None:
                self.proposals.place_tokens(views, inputs.continued)
        return views

    def _mixed_forward(self, shape: GraphShape, variant: StepVariant) -> Tensor:
        """Launch the forward pass of a step of this shape, up to what _store_hidden() keeps."""
        stored = self._stored_rows(shape)
        views = self._mixed_inputs.views(shape.tokens, shape.rows, stored, variant.rotary_axes)
        longest = self._width * self._block_size
        taps, selects = self.proposals is not None, self._selects and not variant.name
        bounds = StepBounds.of_shape(shape, longest, taps=taps, selects=selects)
        with self._experts.equal_rows(views.token_slots):
            hidden = self._gather_and_forward(views, bounds, (), variant)
        if self.proposals is not None:
            self.proposals.keep_padded_states(hidden)
        return hidden.index_select(0, views.sampled) if self._samples and not selects else hidden

    def _stored_rows(self, shape: GraphShape) -> int:
        """Return how many hidden states a shape's graph stores: enough for all that is sampled."""
        return min(shape.rows, self._max_rows) if self._samples else 0

    def _gather_and_forward(
        self,
        views: DeviceInputs,
        bounds: StepBounds,
        parts: Collection[StepPart],
        variant: StepVariant,
    ) -> Tensor:
        """Gather the inputs of an uploaded step, and run the model: [T, E]."""
        ids, kv_slots = empty_step_buffers(self._tables, len(views.token_ids))
        kernels.gather_inputs(
            views.token_ids, views.token_slots, views.positions, self.last_tokens, self._tables,
            ids, kv_slots, self._block_size,
        )  # fmt: skip
        hidden = self._forward(views, ids, kv_slots, bounds, parts, variant)
        lazy_fusion.flush()
        if bounds.taps and self.proposals is not None:
            self.proposals.keep_tokens(ids)
        return hidden

    def _forward(
        self,
        views: DeviceInputs,
        ids: Tensor,
        kv_slots: Tensor,
        bounds: StepBounds,
        parts: Collection[StepPart],
        variant: StepVariant,
    ) -> Tensor:
        """Return hidden states of the step's tokens: [T, E]."""
        cross = None
        if self._token_starts is not None:
            sources = self._tables[self._groups :]
            cross = cross_metadata(sources, views.token_slots, self._token_starts)
        tables = self._tables.unbind()[: self._groups]
        batch = views.metadata(tables, kv_slots, bounds, cross)
        states = state_step(self._model, views.token_slots, views.q_starts, bounds.decodes)
        taps = None
        if bounds.taps and self.proposals is not None:
            taps = self.proposals.new_taps()
        plan = self._backend.plan(batch)
        needed = views.sampled if bounds.selects else None
        step = StepInputs(ids, views.rotary, plan, carried=self._stage.carried(len(ids)),
                          states=states, taps=taps, needed=needed)  # fmt: skip
        for part in parts:
            step = part.before_forward(self._model, step, variant)
        with variant.forward(views.token_slots):
            return self._model(variant.inputs(step))

    def _logits(self, hidden: Tensor, row_slots: Tensor, variant: StepVariant) -> Tensor:
        with variant.logits(row_slots):
            logits = self._model.logits(hidden)
        lazy_fusion.flush()
        return logits

    def _begin_sampling(self, inputs: StepBatch) -> SamplingWay:
        """Choose how to sample a step, before its forward pass."""
        samples = self._stage.is_last and inputs.rows
        return SamplingWay.choose(self._sampler, inputs) if samples else SamplingWay()

    def _sample(
        self,
        hidden: Tensor,
        row_slots: Tensor,
        outputs: Tensor,
        inputs: StepBatch,
        how: SamplingWay,
        pending_parts: Sequence[PendingPart],
        variant: StepVariant,
    ) -> PendingStep:
        """Sample rows from their last hidden states: [R or more, E], padded at the end."""
        logits, rows = self._logits(hidden, row_slots, variant), len(inputs.sampled_slots)
        if how.passes is not None:
            with span("sample"):
                tokens = how.passes.run(logits[:rows])
                lazy_fusion.flush()
            ids = torch.tensor(tokens.ids, dtype=torch.int32, device=logits.device)
            self._results.store(ids, logits[:rows, 0].float(), row_slots[:rows])
            return self._build_pending_step(inputs, pending_parts, tokens=tokens)
        if how.kind is not None:
            if how.masks is not None and how.masks.needs_masks:
                with span("masks"):
                    how.masks.apply_masks(logits)
            ids, tops = self._sampler.choose(logits, row_slots, outputs, how.kind)
            lazy_fusion.flush()
            self._results.store(ids, tops, row_slots)
            return self._build_pending_step(inputs, pending_parts, masks=how.masks)
        with span("sample"):
            counts = inputs.num_outputs.tolist()
            sampled = self._sampler.sample(logits[:rows], inputs.sampled_slots, counts, how.masks)
            lazy_fusion.flush()
        self._results.store(sampled.token_ids, sampled.top_logits, row_slots[:rows])
        fetched = sampled.copy_to_host()
        return self._build_pending_step(inputs, pending_parts, fetched, how.masks)

    def _propose(self, step: PendingStep, hidden: Tensor | None, ran: Ran) -> PendingStep:
        """Let a model draft behind a step. hidden, ran: of DraftProposals.propose()."""
        if self.proposals is not None and step.batch.draft_inputs is not None:
            self.proposals.propose(step, hidden, ran)
        return step

    def _build_pending_step(
        self,
        inputs: StepBatch,
        pending_parts: Sequence[PendingPart],
        fetched: HostSamplerOutput | None = None,
        masks: GrammarMasks | None = None,
        tokens: StepTokens | None = None,
    ) -> PendingStep:
        """Start the copies to the host, and record their end."""
        are_sent = inputs.sampled_rows and fetched is None and tokens is None
        answer = self._results.copy_to_host() if are_sent else None
        done = torch.cuda.Event()
        done.record()
        return PendingStep(inputs, done, answer, fetched, pending_parts, masks, tokens)

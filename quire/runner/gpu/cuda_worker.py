"""CUDA worker: launches each step on one stream; nothing waits but `PendingStep.wait`.

The state of the slots is on the device: block tables and last tokens. A step uploads a few integers
per row and gathers its inputs there; a token goes from one step to the next without the host, so
step n + 1 is enqueued before step n is done. A decode-only step is one graph with model, logits,
sampling and write-back in it, and so is a step with few tokens of prompts, padded to a shape that
has occurred before; any other is launched kernel by kernel.

Axes: T tokens in the step, S rows, R sampled rows, M slots, W table width, G layer groups.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from quire.attention.base import AttentionMetadata, Backend
from quire.core.types import BlockCopy
from quire.errors import EngineDead
from quire.kernels.framework import lazy_fusion
from quire.kernels.gpu.runtime import step_io as kernels
from quire.models.base import LanguageModel, StepInputs
from quire.runner.gpu.cuda_graphs import CudaGraphCache, capture_sizes, padded_sample_rows
from quire.runner.gpu.gemm_warmup import warm_up_gemms
from quire.runner.gpu.kv_memory import KVMemory
from quire.runner.gpu.mixed_batch_graphs import (
    MAX_GRAPHS,
    STEPS_BEFORE_CAPTURE,
    GraphShape,
    pad_to_shape,
    select_graph_shape,
)
from quire.runner.gpu.pending_step import DeviceInputs, PendingStep
from quire.runner.gpu.pinned_io import PinnedIO
from quire.runner.gpu.staging_buffer import StagingBuffer, align_words, pinned_words
from quire.runner.parts.base import ForwardOutput, PendingPart, StepPart
from quire.runner.profiler import span
from quire.runner.slots import BlockTableUpdate, TableShape
from quire.runner.step_batch import Ints, StepBatch
from quire.sampling.logprobs import Mode
from quire.sampling.sampler import ChooserKind, Sampler
from quire.sampling.sampler_output import HostSamplerOutput
from quire.sampling.steps.grammar_masks import GrammarMasks

NUM_STAGING_BUFFERS = 5
"""Host buffers per upload and per result: more than any engine has steps in flight."""


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
    ) -> None:
        """max_tokens: of the largest step. eager: no graphs."""
        device = sampler.device
        rows = slots.max_seqs
        self._model = model
        self._backend = backend
        self._sampler = sampler
        self._block_size = slots.block_size
        self._logprobs_mode: Mode = logprobs_mode
        self._stream = torch.cuda.Stream(device)
        self._width = align_words(slots.width)
        self._tables = torch.zeros(
            (slots.groups, rows, self._width), dtype=torch.int32, device=device
        )
        self._last_token = torch.zeros(rows, dtype=torch.int32, device=device)
        self._row_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._kv_memory = KVMemory(cache, host_cache, device)
        self._pinned_io = PinnedIO(rows, NUM_STAGING_BUFFERS, device)
        most = max(max_tokens, rows)
        self._mixed_staging = StagingBuffer(
            3 * align_words(most) + 6 * align_words(rows + 1), NUM_STAGING_BUFFERS, device
        )
        self._table_staging = StagingBuffer(
            4 * align_words(rows + most), NUM_STAGING_BUFFERS, device
        )
        self._results = torch.empty((2, align_words(rows)), dtype=torch.int32, device=device)
        self._result_buffers = [
            pinned_words(2 * align_words(rows)).view(2, -1) for _ in range(NUM_STAGING_BUFFERS)
        ]
        self._result_index = 0
        self._last_submit_time = 0.0  # when the last decode step was submitted
        self._last_done_event: torch.cuda.Event | None = None  # of the step launched last
        self._hidden: Tensor | None = None  # [M, E] of a decode step that is sampled outside
        self._decode_device_inputs: dict[int, DeviceInputs] = {}  # of decode steps, by size
        self._max_tokens = most
        self._decode_graphs = CudaGraphCache(self._decode_body, rows, eager=eager)
        self._mixed_graphs = CudaGraphCache(
            self._mixed_graph_body,
            rows,
            eager=eager or not backend.supports_prefill_graphs,
            pool=self._decode_graphs.pool,
        )
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

    def reserve_memory(self, size: int, pieces: int, piece: int) -> None:
        """Allocate from the driver what steps will need, and leave it in torch's pool of this
        stream.

        size: of the largest step, in one piece. pieces of `piece` bytes: torch keeps small ones
        apart.
        """
        device = self._last_token.device
        with self.execution_context():
            torch.empty(size, dtype=torch.uint8, device=device)
            held = [torch.empty(piece, dtype=torch.uint8, device=device) for _ in range(pieces)]
            del held
            self._decode_graphs.reserve_memory(pieces, piece)

    @torch.inference_mode()
    def warm_up_kernels(self) -> None:
        """Load the library's kernels for the sizes of steps, before steps need them.

        Also kernels of our own that no dummy step runs: masks of constrained rows.
        """
        with self.execution_context():
            rows = capture_sizes(len(self._last_token))
            self._sampler.warm_up(warm_up_gemms(self._model, rows, self._max_tokens))

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Within, no step is captured or replayed."""
        with self._decode_graphs.disabled(), self._mixed_graphs.disabled():
            yield

    def release_kv_memory(self) -> None:
        self.synchronize()
        self._decode_graphs.clear()
        self._mixed_graphs.clear()
        self._kv_memory.release()

    def write_tables(self, changes: Sequence[BlockTableUpdate]) -> None:
        at: list[int] = []
        blocks: list[int] = []
        slots, width = self._tables.shape[1], self._width
        for group, slot, start, added in changes:
            first = (group * slots + slot) * width + start
            at.extend(range(first, first + len(added)))
            blocks.extend(added)
        count = len(at)
        stride = align_words(count)
        words = self._table_staging.acquire(2 * stride)
        words[:count] = at
        words[stride : stride + count] = blocks
        self._table_staging.send(stride + count)
        sent = self._table_staging.on_device
        kernels.write_tables(sent[:count], sent[stride : stride + count], self._tables)

    def swap_out(self, pairs: Sequence[BlockCopy]) -> None:
        self._kv_memory.swap_out(pairs, self._table_staging)

    def swap_in(self, pairs: Sequence[BlockCopy]) -> None:
        self._kv_memory.swap_in(pairs, self._table_staging)

    def copy(self, pairs: Sequence[BlockCopy]) -> None:
        self._kv_memory.copy(pairs, self._table_staging)

    def compute(self, batch: StepBatch, parts: Collection[StepPart]) -> PendingStep:
        assert not batch.next_drafts, "drafts are verified on the CPU only"
        if self._kv_memory.is_released:
            self._kv_memory.restore()
        try:
            alone = batch.decode_only and not parts
            pending = self._decode(batch) if alone else self._mixed(batch, parts)
        except BaseException:
            lazy_fusion.discard()
            raise
        self._last_done_event = pending.done
        return pending

    # -- decode steps ---------------------------------------------------------------------------

    def _decode(self, inputs: StepBatch) -> PendingStep:
        try:
            return self._enqueue_decode(inputs)
        except BaseException:
            self._pinned_io.out_of_sync = True
            raise

    def _enqueue_decode(self, inputs: StepBatch) -> PendingStep:
        kind = self._sampler.kind(inputs.sampled_slots)
        grammar_masks = self._sampler.prepare_masks(inputs.sampled_slots, inputs.num_outputs)
        # masks arrive late from the host: then the graph ends before the sampling
        graph_kind = None if grammar_masks is not None and grammar_masks.needs_masks else kind
        size = self._decode_graphs.size_for(
            len(inputs.slots), graph_kind, self._estimate_busy_seconds()
        )
        with span("post"):
            self._pinned_io.write_inputs(inputs, size)
        with span("graph"):
            self._decode_graphs.run(size, graph_kind)
        if graph_kind is not None:
            done = torch.cuda.Event()
            done.record()
            return _attach_masks(
                PendingStep(
                    inputs, done, self._pinned_io.output_view(done), None, (), grammar_masks
                )
            )
        assert self._hidden is not None
        views, hidden = self._get_decode_device_inputs(size), self._hidden[:size]
        pending = self._sample(
            hidden, views.row_slots, views.outputs, inputs, kind, grammar_masks, ()
        )
        self._pinned_io.output_view(pending.done)
        return pending

    def _estimate_busy_seconds(self) -> float:
        """Estimate how long the GPU has work: the duration of the previous step.

        Under full load decode steps are submitted one step's time apart.
        """
        now = time.perf_counter()
        before, self._last_submit_time = self._last_submit_time, now
        busy = self._last_done_event is not None and not self._last_done_event.query()
        return now - before if busy else 0.0

    def _get_decode_device_inputs(self, size: int) -> DeviceInputs:
        """Return the views of a size, made once."""
        views = self._decode_device_inputs.get(size)
        if views is None:
            token_ids, positions, contexts, rows, row_slots, outputs = (
                self._pinned_io.device_inputs[:, :size].unbind()
            )
            views = self._decode_device_inputs[size] = DeviceInputs(
                token_ids=token_ids,
                token_slots=row_slots,
                positions=positions,
                q_starts=self._row_starts[: size + 1],
                contexts=contexts,
                rows=rows,
                sampled=self._row_starts[:size],
                row_slots=row_slots,
                outputs=outputs,
            )
        return views

    def _decode_body(self, size: int, kind: ChooserKind | None) -> None:
        """Launch all kernels of a decode step, from its integers to tokens, or to hidden states."""
        mail, views = self._pinned_io, self._get_decode_device_inputs(size)
        if not self._decode_graphs.capturing:
            mail.resync()
        ids, kv_slots = self._empty_step_buffers(size)
        kernels.load_decode_inputs(
            mail.state,
            mail.inbox,
            mail.device_inputs,
            self._last_token,
            self._tables,
            ids,
            kv_slots,
            mail.depth,
            self._block_size,
        )
        hidden = self._forward(views, ids, kv_slots, size, 1, self._width * self._block_size, 0)
        if kind is None:
            self._store_hidden(hidden)
            return
        logits = self._logits(hidden)
        ids, tops = self._sampler.choose(logits, views.row_slots, views.outputs, kind)
        lazy_fusion.flush()
        kernels.store_decode_results(
            mail.state, ids, tops, views.row_slots, self._last_token, mail.outbox, mail.stride
        )

    # -- other steps ----------------------------------------------------------------------------

    def _mixed(self, inputs: StepBatch, parts: Collection[StepPart]) -> PendingStep:
        kind = self._sampler.kind(inputs.sampled_slots)
        grammar_masks = None
        if inputs.sampled_rows:
            grammar_masks = self._sampler.prepare_masks(inputs.sampled_slots, inputs.num_outputs)
        graph_kind = None if grammar_masks is not None and grammar_masks.needs_masks else kind
        busy = self._estimate_busy_seconds()
        most = (self._max_tokens, len(self._last_token))
        shape = None if parts else select_graph_shape(inputs, *most, waits=not busy)
        if shape and self._mixed_graphs.should_use_graph(
            shape, graph_kind, busy, STEPS_BEFORE_CAPTURE, MAX_GRAPHS
        ):
            return self._mixed_from_graph(inputs, shape, kind, graph_kind, grammar_masks)
        return self._mixed_eager(inputs, parts, kind, grammar_masks)

    def _mixed_eager(
        self,
        inputs: StepBatch,
        parts: Collection[StepPart],
        kind: ChooserKind | None,
        grammar_masks: GrammarMasks | None,
    ) -> PendingStep:
        """Launch kernel by kernel."""
        with span("upload"):
            views = self._upload_mixed(
                inputs, padded_sample_rows(len(inputs.sampled_slots), len(self._last_token))
            )
        with span("forward"):
            bounds = (
                inputs.num_decodes,
                inputs.max_query,
                inputs.max_context,
                inputs.max_prior_context,
            )
            hidden = self._gather_and_forward(views, *bounds, parts)
        forward = ForwardOutput(self._model, hidden, self._logprobs_mode)
        pending_parts = [part.apply(forward) for part in parts]
        if not inputs.sampled_rows:
            return self._build_pending_step(inputs, None, pending_parts, None)
        chosen = hidden.index_select(0, views.sampled)
        return self._sample(
            chosen, views.row_slots, views.outputs, inputs, kind, grammar_masks, pending_parts
        )

    def _mixed_from_graph(
        self,
        inputs: StepBatch,
        shape: GraphShape,
        kind: ChooserKind | None,
        graph_kind: ChooserKind | None,
        grammar_masks: GrammarMasks | None,
    ) -> PendingStep:
        """Run as a graph of a shape. graph_kind: of the sampling in the graph; None: after it."""
        with span("upload"):
            views = self._upload_mixed(pad_to_shape(inputs, shape), shape.rows)
        with span("graph"):
            self._mixed_graphs.run(shape, graph_kind)
        if graph_kind is not None or not inputs.sampled_rows:
            return self._build_pending_step(inputs, None, (), grammar_masks)
        assert self._hidden is not None
        hidden = self._hidden[: shape.rows]
        return self._sample(hidden, views.row_slots, views.outputs, inputs, kind, grammar_masks, ())

    def _mixed_graph_body(self, shape: GraphShape, kind: ChooserKind | None) -> None:
        """Launch all kernels of a step of this shape, whose integers are on the device."""
        views = self._mixed_device_inputs(shape.tokens, shape.rows, shape.rows)
        longest = self._width * self._block_size
        hidden = self._gather_and_forward(views, shape.decodes, shape.tokens, longest, None)
        chosen = hidden.index_select(0, views.sampled)
        if kind is None:
            self._store_hidden(chosen)
            return
        ids, tops = self._sampler.choose(self._logits(chosen), views.row_slots, views.outputs, kind)
        lazy_fusion.flush()
        self._write_back(ids, tops, views.row_slots)

    def _store_hidden(self, hidden: Tensor) -> None:
        """Keep the hidden states [R, E] that are sampled outside the graph."""
        if self._hidden is None:
            shape = (self._tables.shape[1], hidden.shape[1])
            self._hidden = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
        lazy_fusion.flush()
        self._hidden[: len(hidden)].copy_(hidden)

    def _gather_and_forward(
        self,
        views: DeviceInputs,
        decodes: int,
        max_query: int,
        max_context: int,
        past: int | None,
        parts: Collection[StepPart] = (),
    ) -> Tensor:
        """Gather the inputs of an uploaded step, and run the model: [T, E]."""
        ids, kv_slots = self._empty_step_buffers(len(views.token_ids))
        kernels.gather_inputs(
            views.token_ids,
            views.token_slots,
            views.positions,
            self._last_token,
            self._tables,
            ids,
            kv_slots,
            self._block_size,
        )
        hidden = self._forward(views, ids, kv_slots, decodes, max_query, max_context, past, parts)
        lazy_fusion.flush()
        return hidden

    def _upload_mixed(self, inputs: StepBatch, sampled: int) -> DeviceInputs:
        """Upload the step's integers. Sampled rows are padded with row 0, in no slot."""
        parts: tuple[tuple[Ints | tuple[int, ...], int, int], ...] = (
            (inputs.token_ids, len(inputs.token_ids), 0),
            (inputs.token_slots, len(inputs.token_slots), 0),
            (inputs.positions, len(inputs.positions), 0),
            (inputs.q_starts, len(inputs.q_starts), 0),
            (inputs.contexts, len(inputs.contexts), 0),
            (inputs.slots, len(inputs.slots), 0),
            (inputs.sampled_tokens, sampled, 0),
            (inputs.sampled_slots, sampled, -1),
            (inputs.num_outputs, sampled, 0),
        )
        words, at = (
            self._mixed_staging.acquire(sum(align_words(length) for _, length, _ in parts)),
            0,
        )
        for part, length, blank in parts:
            words[at : at + len(part)] = part
            words[at + len(part) : at + length] = blank
            at += align_words(length)
        self._mixed_staging.send(at)
        return self._mixed_device_inputs(len(inputs.token_ids), len(inputs.slots), sampled)

    def _mixed_device_inputs(self, tokens: int, rows: int, sampled: int) -> DeviceInputs:
        """Return views of the integers that _upload_mixed() sends."""
        sent, at, found = self._mixed_staging.on_device, 0, []
        for length in (tokens, tokens, tokens, rows + 1, rows, rows, sampled, sampled, sampled):
            found.append(sent[at : at + length])
            at += align_words(length)
        return DeviceInputs(*found)

    # -- both -----------------------------------------------------------------------------------

    def _empty_step_buffers(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Allocate token ids [T] and KV slots [G, T], for a kernel to fill."""
        groups, device = self._tables.shape[0], self._tables.device
        ids = torch.empty(tokens, dtype=torch.int32, device=device)
        return ids, torch.empty((groups, tokens), dtype=torch.int64, device=device)

    def _forward(
        self,
        views: DeviceInputs,
        ids: Tensor,
        kv_slots: Tensor,
        decodes: int,
        max_query: int,
        max_context: int,
        past: int | None,
        parts: Collection[StepPart] = (),
    ) -> Tensor:
        """Return hidden states of the step's tokens: [T, E]."""
        batch = AttentionMetadata(
            q_starts=views.q_starts,
            contexts=views.contexts,
            tables=self._tables.unbind(),
            slots=kv_slots.unbind(),
            max_query=max_query,
            max_context=max_context,
            rows=views.rows,
            decodes=decodes,
            past=past,
        )
        step = StepInputs(ids, views.positions, self._backend.plan(batch))
        for part in parts:
            step = part.before_forward(self._model, step)
        return self._model(step)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._model.logits(hidden)
        lazy_fusion.flush()
        return logits

    def _sample(
        self,
        hidden: Tensor,
        row_slots: Tensor,
        outputs: Tensor,
        inputs: StepBatch,
        kind: ChooserKind | None,
        grammar_masks: GrammarMasks | None,
        pending_parts: Sequence[PendingPart],
    ) -> PendingStep:
        """Sample rows from their last hidden states: [R or more, E], padded at the end."""
        logits = self._logits(hidden)
        if kind is not None:
            if grammar_masks is not None and grammar_masks.needs_masks:
                with span("masks"):
                    grammar_masks.apply_masks(logits)
            ids, tops = self._sampler.choose(logits, row_slots, outputs, kind)
            lazy_fusion.flush()
            self._write_back(ids, tops, row_slots)
            return self._build_pending_step(inputs, None, pending_parts, grammar_masks)
        with span("sample"):
            rows = len(inputs.sampled_slots)
            counts = inputs.num_outputs.tolist()
            sampled = self._sampler.sample(
                logits[:rows], inputs.sampled_slots, counts, grammar_masks
            )
            lazy_fusion.flush()
        self._write_back(sampled.token_ids, sampled.top_logits, row_slots[:rows])
        return self._build_pending_step(
            inputs, sampled.copy_to_host(), pending_parts, grammar_masks
        )

    def _write_back(self, ids: Tensor, tops: Tensor, row_slots: Tensor) -> None:
        kernels.store_results(ids, tops, row_slots, self._last_token, self._results)

    def _build_pending_step(
        self,
        inputs: StepBatch,
        fetched: HostSamplerOutput | None,
        pending_parts: Sequence[PendingPart],
        grammar_masks: GrammarMasks | None,
    ) -> PendingStep:
        """Start the copies to the host, and record their end."""
        answer = None
        if inputs.sampled_rows and fetched is None:
            self._result_index = (self._result_index + 1) % NUM_STAGING_BUFFERS
            copy = self._result_buffers[self._result_index]
            copy.copy_(self._results, non_blocking=True)
            answer = copy.numpy()
        done = torch.cuda.Event()
        done.record()
        return _attach_masks(
            PendingStep(inputs, done, answer, fetched, pending_parts, grammar_masks)
        )


def _attach_masks(pending: PendingStep) -> PendingStep:
    """Give the grammar masks the tokens of the step."""
    if pending.masks is not None:
        pending.masks.set_fetch(pending.tokens)
    return pending

"""Draft chain: a drafter's passes behind a step, as graphs, without the host in between.

    first    one pass over the T tokens of the step. A head is given what was sampled behind each
    prompts  the same of a step with prompts, where a head is given the known tokens too
    ends     the rows' last accepted tokens, which the device finds. Of a head: the first draft
    next     one token of each row: one draft more, as often as drafts are wanted

The first pass has the inputs of the step itself: rejected tokens are in it, whose keys the next
step writes again. So the host waits once, for the step's tokens and the drafts behind them. A step
with prompts that has no graph has its first pass launched kernel by kernel.

Axes: T tokens of the step, R sampled ones, m rows of the plan, D drafts of a row, E hidden of the
head
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.attention.base import AttentionMetadata
from quire.kernels.framework import lazy_fusion
from quire.kernels.gpu.runtime import chain_io, step_io
from quire.kernels.gpu.runtime.chain_io import PassInputs
from quire.models.base import StepInputs
from quire.runner.drafters.base import GraphedHead, TargetStates
from quire.runner.gpu.cuda_graphs import CudaGraphCache, draft_sizes, padded_sample_rows
from quire.runner.gpu.graph_groups import drafter_graphs
from quire.runner.gpu.mixed_batch_graphs import GraphShape, pad_tokens
from quire.runner.gpu.mixed_inputs import MixedInputs, empty_step_buffers
from quire.runner.gpu.pending_step import DeviceInputs, StepBounds
from quire.runner.gpu.staging_buffer import StagingBuffer, align_words, pinned_words
from quire.runner.step_batch import Ints, StepBatch
from quire.sampling.step_sampling import StepTokens

ROW_FIELDS = 4
"""first token, number of tokens, room, slot: see quire.kernels.gpu.runtime.chain_io."""


class ChainGraph(NamedTuple):
    """The key of a graph. size: T of "first" and "prompts", else m, padded. decodes: of a shape
    with prompts."""

    part: Literal["first", "prompts", "ends", "next"]
    size: int
    decodes: int = 0


class PromptStep(NamedTuple):
    """A step with prompts, as it ran. shape: of its graph; None: it had none."""

    views: DeviceInputs
    bounds: StepBounds
    shape: GraphShape | None


Ran = int | PromptStep
"""How a step ran: at the size of a decode step, or with prompts."""


class SlotState(NamedTuple):
    """What the device has of all slots."""

    tables: Tensor  # [G, M, W]
    last_token: Tensor  # [M]
    block_size: int


class ChainBuffers(NamedTuple):
    """What a worker shares with a chain."""

    chosen: Tensor  # [R or more] int32, sampled tokens of a step
    views: Callable[[int], DeviceInputs]  # the inputs of a decode step of so many tokens
    mixed: MixedInputs
    graphs: CudaGraphCache[Any]


class ChainSizes(NamedTuple):
    """Of the largest steps."""

    tokens: int  # that are sampled: R
    rows: int  # with drafts
    drafts: int  # of a row
    depth: int  # more than steps that may be in flight
    longest: int  # tokens of a step
    padded: int  # tokens of the largest graph of steps with prompts


@dataclass(frozen=True, slots=True)
class ChainResult:
    """The drafts behind a step, on their way to the host: there after the step's event."""

    rows: Ints  # of the plan, those that yield tokens
    most: Ints  # drafts of each
    room: Ints  # positions that each has blocks for
    drafts: Ints  # [D, m or more]

    def of_row(self, row: int) -> list[int]:
        drafts: list[int] = self.drafts[:, row].tolist()
        return drafts

    def as_field(
        self, batch: StepBatch, tokens: StepTokens
    ) -> dict[str, dict[int, tuple[int, ...]]]:
        found = {}
        last = {batch.sampled_rows[i]: i for i in batch.accepted(tokens.ids, tokens.ends)}
        ends = batch.sampled_tokens[[last[row] for row in self.rows.tolist()]]
        behind = self.room - batch.positions[ends]
        counts = np.minimum(np.minimum(self.most, behind), len(self.drafts)).tolist()
        columns = self.drafts[:, self.rows].T.tolist()
        for row, count, drafts in zip(self.rows.tolist(), counts, columns):
            if count > 0:
                found[row] = tuple(drafts[:count])
        return {"drafts": found}


class DraftChain:
    """The graphs of a drafter, and the buffers that they share.

    states, padded_states: of the model, at fixed addresses, behind steps without and with prompts:
    set before the first launch.
    """

    def __init__(
        self, head: GraphedHead, slots: SlotState, buffers: ChainBuffers, sizes: ChainSizes
    ) -> None:
        self._head, self._slots = head, slots
        self._chosen, self._views, self._mixed = buffers.chosen, buffers.views, buffers.mixed
        self._run = drafter_graphs(buffers.graphs).run
        self._max_tokens, max_rows, self._max_drafts, depth, longest, padded = sizes
        self.states: TargetStates | None = None
        self.padded_states: TargetStates | None = None
        device, groups = slots.tables.device, slots.tables.shape[0]
        self._sizes = sorted({1, *draft_sizes(max_rows)})
        stride = align_words(max_rows)
        wide = align_words(self._max_tokens)
        self._staging = StagingBuffer(wide + ROW_FIELDS * stride, depth, device)
        sent = self._staging.on_device
        self._expected, self._rows = sent[:wide], sent[wide:].view(ROW_FIELDS, stride)
        most = max(longest, padded, self._max_tokens)
        self._every = torch.arange(most + 1, dtype=torch.int32, device=device)
        # of a step with prompts: the tokens that a head is given, or those of the step
        self._known = StagingBuffer(0 if head.is_whole else most, depth, device)
        self._tokens = self._every.new_zeros(most if head.is_whole else 0)
        self._contexts = self._every.new_zeros(self._max_tokens)
        self._pass = torch.zeros(1, dtype=torch.int32, device=device)
        # ends, places, tokens, positions, contexts, table rows
        self._words = torch.zeros((6, stride), dtype=torch.int32, device=device)
        self._kv_slots = torch.zeros(groups * stride, dtype=torch.int64, device=device)
        # accepted drafts and last token of each row, and drafts behind it
        self.ahead = torch.zeros((2 + self._max_drafts, stride), dtype=torch.int32, device=device)
        self._drafts = self.ahead[2:]
        shape = self._max_drafts, stride
        self._ring = [pinned_words(self._drafts.numel()).view(shape) for _ in range(depth)]
        self._turn = 0
        self._first: Tensor | None = None  # [T, E] of the first pass
        self._last: Tensor | None = None  # [m, E] of the rows

    # -- a step -------------------------------------------------------------------------------

    def place_tokens(self, views: DeviceInputs, count: int) -> None:
        """Give the first tokens of a step with prompts, so many, what they continue with."""
        rotary = None if views.rotary is views.positions else views.rotary
        chain_io.place_tokens(
            views.token_ids, views.positions, views.contexts, views.outputs, rotary, self.ahead,
            count,
        )  # fmt: skip

    def keep_tokens(self, ids: Tensor) -> None:
        """Keep the tokens [T] of a step with prompts, for a drafter that reads them."""
        if self._head.is_whole:
            self._tokens[: len(ids)].copy_(ids)

    def launch_behind(self, batch: StepBatch, ran: Ran, states: TargetStates) -> ChainResult | None:
        """Launch the passes behind a step. None: no drafts.

        ran: size of a decode step, or a step with prompts. states: of its tokens, if it had no
        graph.
        """
        inputs = batch.draft_inputs
        assert inputs is not None, "the batch was built without inputs of drafters"
        plan_rows = np.asarray(batch.sampled_rows, dtype=np.int32)
        first = np.flatnonzero(np.diff(plan_rows, prepend=-1)).astype(np.int32)
        of = batch.sampled_row_indexes[first]
        room = np.minimum(inputs.blocks[of] * self._slots.block_size, self._head.max_len)
        most = inputs.most[of]
        last = int(plan_rows.max(initial=-1))
        count = int(most.max(initial=0)) if last < self._sizes[-1] else 0
        if count or isinstance(ran, int):
            counts, rows = np.diff(first, append=len(plan_rows)), plan_rows[first]
            table = np.zeros((ROW_FIELDS, last + 1), dtype=np.int32)
            table[3] = -1  # rows that yield nothing
            table[:, rows] = first, counts, room, batch.slots[of]
            self._upload(_expected_tokens(batch), table)
        if isinstance(ran, int):
            self._run(ChainGraph("first", ran))
        else:
            self._run_prompts(batch, ran, states)
        if not count:
            return None
        padded = self._sizes[bisect_left(self._sizes, last + 1)]
        self._run(ChainGraph("ends", padded))
        for _ in range(count if self._head.is_whole else count - 1):
            self._run(ChainGraph("next", padded))
        self._turn = (self._turn + 1) % len(self._ring)
        host = self._ring[self._turn][:count]
        host.copy_(self._drafts[:count], non_blocking=True)
        return ChainResult(plan_rows[first], most, room, host.numpy())

    def launch_alone(self, batch: StepBatch, states: TargetStates) -> None:
        """Launch what is launched behind a step with prompts, and what places its tokens."""
        sampled = max(padded_sample_rows(len(batch.sampled_slots), self._max_tokens), 1)
        views = self._mixed.upload(batch, sampled)
        self.place_tokens(views, 1)
        self.launch_behind(batch, PromptStep(views, StepBounds.of(batch), None), states)

    def _run_prompts(self, batch: StepBatch, ran: PromptStep, states: TargetStates) -> None:
        views, bounds, shape = ran
        if not self._head.is_whole:
            known = _known_tokens(batch)
            if shape is not None:
                known = pad_tokens(known, batch, shape)
            self._known.acquire(len(known))[: len(known)] = known
            self._known.send(len(known))
        if shape is None:
            self._launch_prompts(views, bounds, states)
        else:
            self._run(ChainGraph("prompts", shape.tokens, shape.decodes))

    def upload_empty(self) -> None:
        """Upload a step without rows."""
        none = np.zeros((ROW_FIELDS, 0), dtype=np.int32)
        self._upload(none[0], none)
        words = len(self._known.on_device)
        self._known.acquire(words)[:] = 0
        self._known.send(words)

    def _upload(self, expected: Ints, rows: Ints) -> None:
        """expected: [R] of _expected_tokens(). rows: [ROW_FIELDS, m]."""
        words, count = len(self._staging.on_device), rows.shape[1]
        buffer = self._staging.acquire(words)
        buffer[: len(expected)] = expected
        table = buffer[-self._rows.numel() :].reshape(self._rows.shape)
        table[:, :count] = rows
        table[:, count:] = 0
        table[3, count:] = -1
        self._staging.send(words)

    # -- graphs -------------------------------------------------------------------------------

    def graph_groups(
        self, sizes: Sequence[int], shapes: Sequence[GraphShape]
    ) -> list[list[ChainGraph]]:
        """Return all graphs, those of one part together, the largest first. sizes: T of decode
        steps. shapes: of steps with prompts, ascending."""
        return [
            [ChainGraph("first", size) for size in sorted(sizes, reverse=True)],
            [ChainGraph("prompts", one.tokens, one.decodes) for one in reversed(shapes)],
            [ChainGraph("ends", size) for size in reversed(self._sizes)],
            [ChainGraph("next", size) for size in reversed(self._sizes)],
        ]

    def launch(self, graph: ChainGraph) -> None:
        """Launch the kernels of a graph, which read and write fixed addresses."""
        if graph.part == "first":
            self._launch_first(graph.size)
        elif graph.part == "prompts":
            assert self.padded_states is not None, "the model's pass has run"
            shape = GraphShape(graph.size, graph.decodes)
            stored = min(shape.rows, self._max_tokens)
            views = self._mixed.views(shape.tokens, shape.rows, stored)
            longest = self._slots.tables.shape[2] * self._slots.block_size
            bounds = StepBounds.of_shape(shape, longest, taps=True)
            self._launch_prompts(views, bounds, self.padded_states)
        elif graph.part == "ends":
            self._launch_ends(graph.size)
        else:
            self._launch_next(graph.size)

    def _launch_first(self, size: int) -> None:
        assert self.states is not None, "the model's pass has run"
        views, (tables, last_token, block_size) = self._views(size), self._slots
        positions = (views.contexts - 1).clamp(min=0)
        given = views.token_ids
        if not self._head.is_whole:
            given = self._chosen[:size].clamp(min=0)  # behind a rejected draft there may be none
        ids, kv_slots = empty_step_buffers(tables, size)
        step_io.gather_inputs(
            given, views.row_slots, positions, last_token, tables, ids, kv_slots, block_size
        )
        positions = positions.clamp(max=self._head.max_len - 1)  # further ones have no drafts
        inputs = PassInputs(ids, positions, views.contexts, views.rows, kv_slots)
        self._contexts[:size].copy_(views.contexts)
        known = self._begin(self.states, size)
        self._first = self._run_head(self._first, inputs, known, drafts=True)

    def _launch_prompts(
        self, views: DeviceInputs, bounds: StepBounds, states: TargetStates
    ) -> None:
        """Launch the first pass behind a step with prompts. Keeps the states of sampled tokens."""
        (tables, last_token, block_size), size = self._slots, len(views.token_ids)
        if self._head.is_whole:
            given = self._tokens[:size].clamp(min=0)
        else:
            known = self._known.on_device[:size]
            chosen = self._chosen.index_select(0, (-1 - known).clamp(min=0)).clamp(min=0)
            given = torch.where(known < 0, chosen, known)
        ids, kv_slots = empty_step_buffers(tables, size)
        step_io.gather_inputs(
            given, views.token_slots, views.positions, last_token, tables, ids, kv_slots, block_size
        )
        attention = self._head.backend.plan(views.metadata(tables.unbind(), kv_slots, bounds))
        positions = views.positions.clamp(max=self._head.max_len - 1)
        begun = self._begin(states, size)
        ends = views.sampled
        needed = ends if self._head.model.selects_rows else None
        found = self._head.model(StepInputs(ids, positions, attention, needed=needed), begun)
        lazy_fusion.flush()  # it is read by torch
        self._contexts[: len(ends)].copy_(views.positions.index_select(0, ends) + 1)
        kept = found.index_select(0, ends) if needed is None else found
        self._first = keep_rows(self._first, kept, self._max_tokens)

    def _begin(self, states: TargetStates, size: int) -> Tensor:
        """Return what the first pass over so many tokens reads of the model's states."""
        hidden, taps = states
        taps = {layer: one[:size] for layer, one in taps.items()}
        return self._head.model.begin(hidden[:size], taps, self._every[:size])

    def _launch_ends(self, size: int) -> None:
        first = self._first
        assert first is not None, "the first pass has run"
        ends, places = self._words[0, :size], self._words[1, :size]
        whole = self._head.is_whole
        chain_io.find_ends(
            self._chosen,
            self._expected,
            self._contexts,
            self._rows,
            ends,
            places,
            self._pass,
            self.ahead,
            1 + self._max_drafts,
            -1 if whole else 0,
        )
        self._last = keep_rows(self._last, first.index_select(0, ends), len(self._words[0]))
        if whole:
            self._advance(self._chosen.index_select(0, ends))
        else:
            self._draft(size)

    def _launch_next(self, size: int) -> None:
        assert self._last is not None, "the rows' ends are known"
        known = self._last[:size]
        self._last = self._run_head(self._last, self._next_inputs(size), known, drafts=False)
        self._draft(size)

    def _next_inputs(self, size: int) -> PassInputs:
        kv_slots = self._kv_slots[: len(self._slots.tables) * size].view(-1, size)
        tokens, positions, contexts, rows = self._words[2:, :size].unbind()
        return PassInputs(tokens, positions, contexts, rows, kv_slots)

    def _run_head(
        self, out: Tensor | None, inputs: PassInputs, known: Tensor, *, drafts: bool
    ) -> Tensor:
        """Run a pass, and keep its states in `out`. drafts: rows may be of one sequence."""
        tables, _, block_size = self._slots
        size = len(inputs.tokens)
        metadata = AttentionMetadata(
            q_starts=self._every[: size + 1],
            contexts=inputs.contexts,
            tables=tables.unbind(),
            slots=inputs.kv_slots.unbind(),
            max_query=1,
            max_context=tables.shape[2] * block_size,
            rows=inputs.rows,
            decodes=size,
            past=0,
            drafts=drafts,
        )
        attention = self._head.backend.plan(metadata)
        found = self._head.model(StepInputs(inputs.tokens, inputs.positions, attention), known)
        lazy_fusion.flush()  # it is read by torch
        return keep_rows(out, found, self._max_tokens)

    def _draft(self, size: int) -> None:
        """Draft behind the rows' states, and fill the inputs of the next pass."""
        assert self._last is not None
        ids = self._head.model.drafts(self._last[:size])
        lazy_fusion.flush()
        self._advance(ids)

    def _advance(self, ids: Tensor) -> None:
        """Fill the inputs of a pass over `ids` [m], which are drafts but for those of "ends"."""
        size = len(ids)
        chain_io.advance_rows(
            self._pass,
            ids,
            self._rows,
            self._slots.tables,
            self._words[1, :size],
            self._next_inputs(size),
            self._drafts,
            self._slots.block_size,
        )


def _known_tokens(batch: StepBatch) -> Ints:
    """Return [T] the token behind each; -1 - i: it is the sampled token i. Media have id 0."""
    known, sampled = np.maximum(batch.following_tokens, 0), batch.sampled_tokens
    known[sampled] = -1 - np.arange(len(sampled), dtype=np.int32)
    return known


def _expected_tokens(batch: StepBatch) -> Ints:
    """Return [R] the draft behind each sampled token, as chain_io.find_ends() reads it."""
    if not batch.next_drafts:
        return np.full(len(batch.sampled_tokens), -1, dtype=np.int32)
    drafts = np.asarray(batch.next_drafts, dtype=np.int32)
    if not batch.agreement:
        return drafts
    agrees = np.asarray(batch.agreement) & (drafts != -1)
    return np.where(agrees, chain_io.ANY_TOKEN, -1).astype(np.int32)


def keep_rows(out: Tensor | None, found: Tensor, rows: int) -> Tensor:
    """Copy states [n, E] into a buffer of so many rows at a fixed address, and return it."""
    if out is None:
        out = found.new_empty((rows, found.shape[1]))
    out[: len(found)].copy_(found)
    return out

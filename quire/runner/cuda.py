"""Steps on a CUDA GPU: everything is launched on one stream, nothing waits but `Launched.wait`.

The rows live on the device: block tables and the last token of every slot. A step uploads a few
integers a row and gathers its inputs there; a token goes from one step to the next without a visit
to the host, so step n + 1 can be in line before step n is done. A decode-only step is one graph
with model, logits, sampling and write-back in it, and so is a step with few enough tokens of
prompts, filled up to a mould that has come before; any other is launched kernel by kernel.

Axes: T tokens in the step, S rows, R sampled rows, M slots, W table width, G layer groups.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from quire.attention.base import Backend, Batch
from quire.core.types import Copy
from quire.errors import EngineDead
from quire.kernels import fuse
from quire.kernels.gpu import step as kernels
from quire.models.base import LanguageModel, StepInputs
from quire.runner.cuda_graphs import Graphs, roomy, sizes
from quire.runner.cuda_memory import KVMemory
from quire.runner.inputs import Inputs, Ints
from quire.runner.launched import Launched, Views
from quire.runner.mailbox import Mailbox
from quire.runner.mixed import MOST_GRAPHS, PATIENCE, Mould, filled, mould_of
from quire.runner.products import load_products
from quire.runner.profile import span
from quire.runner.prompt_logprobs import Judged, PromptLogprobs
from quire.runner.slots import Change, Slots
from quire.runner.upload import Upload, aligned, pinned
from quire.sampling.logprobs import Mode
from quire.sampling.sampled import Fetched
from quire.sampling.sampler import Kind, Sampler
from quire.sampling.steps.grammar import Binding

IN_FLIGHT = 5
"""Host buffers per upload and per result: more than any engine has steps in flight."""


class Lane:
    """Owns the stream, the rows on the device and the graphs."""

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
        """max_tokens: of the largest step. eager: no graphs."""
        device = sampler.device
        rows = slots.max_seqs
        self._model = model
        self._backend = backend
        self._sampler = sampler
        self._block_size = slots.block_size
        self._logprobs_mode: Mode = logprobs_mode
        self._stream = torch.cuda.Stream(device)
        self._width = aligned(slots.width)
        self._tables = torch.zeros(
            (slots.groups, rows, self._width), dtype=torch.int32, device=device
        )
        self._last_token = torch.zeros(rows, dtype=torch.int32, device=device)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._memory = KVMemory(cache, host_cache, device)
        self._mail = Mailbox(rows, IN_FLIGHT, device)
        most = max(max_tokens, rows)
        self._mixed_upload = Upload(3 * aligned(most) + 6 * aligned(rows + 1), IN_FLIGHT, device)
        self._table_upload = Upload(4 * aligned(rows + most), IN_FLIGHT, device)
        self._results = torch.empty((2, aligned(rows)), dtype=torch.int32, device=device)
        self._fetched = [pinned(2 * aligned(rows)).view(2, -1) for _ in range(IN_FLIGHT)]
        self._turn = 0
        self._asked_at = 0.0  # when the last decode step was
        self._last_done: torch.cuda.Event | None = None  # of the step launched last
        self._hidden: Tensor | None = None  # [M, E] of a decode step that is sampled outside
        self._views: dict[int, Views] = {}  # of decode steps, by size
        self._max_tokens = most
        self._graphs = Graphs(self._decode_body, rows, eager=eager)
        self._moulds = Graphs(
            self._moulded_body,
            rows,
            eager=eager or not backend.captures_prompts,
            pool=self._graphs.pool,
        )
        self._stream.wait_stream(torch.cuda.current_stream(device))

    # -- the runner's calls ---------------------------------------------------------------------

    def scope(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def settle(self) -> None:
        self._stream.synchronize()

    def mend(self) -> None:
        """An error that the context keeps is raised by whatever is asked of it from then on."""
        try:
            self.settle()
        except RuntimeError as error:
            raise EngineDead(f"the device is lost: {error}") from error
        self._mail.torn = True

    def set_aside(self, size: int, pieces: int, piece: int) -> None:
        """Take from the driver what steps will need, and leave it with torch, for this stream.

        size: of the largest step, in one. pieces of `piece` bytes: torch keeps small ones apart.
        """
        device = self._last_token.device
        with self.scope():
            torch.empty(size, dtype=torch.uint8, device=device)
            held = [torch.empty(piece, dtype=torch.uint8, device=device) for _ in range(pieces)]
            del held
            self._graphs.set_aside(pieces, piece)

    @torch.inference_mode()
    def load_products(self) -> None:
        """Have the library load its kernels for the sizes of steps, before steps need them.

        And our own that no made-up step runs: those of bound rows.
        """
        with self.scope():
            rows = sizes(len(self._last_token))
            self._sampler.rehearse(load_products(self._model, rows, self._max_tokens))

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Within, no step is captured or replayed."""
        with self._graphs.paused(), self._moulds.paused():
            yield

    def forget_kv(self) -> None:
        self.settle()
        self._graphs.forget()
        self._moulds.forget()
        self._memory.give_back()

    def write_tables(self, changes: Sequence[Change]) -> None:
        at: list[int] = []
        blocks: list[int] = []
        slots, width = self._tables.shape[1], self._width
        for group, slot, start, added in changes:
            first = (group * slots + slot) * width + start
            at.extend(range(first, first + len(added)))
            blocks.extend(added)
        count = len(at)
        stride = aligned(count)
        words = self._table_upload.take(2 * stride)
        words[:count] = at
        words[stride : stride + count] = blocks
        self._table_upload.send(stride + count)
        sent = self._table_upload.on_device
        kernels.write_tables(sent[:count], sent[stride : stride + count], self._tables)

    def swap_out(self, pairs: Sequence[Copy]) -> None:
        self._memory.swap_out(pairs, self._table_upload)

    def swap_in(self, pairs: Sequence[Copy]) -> None:
        self._memory.swap_in(pairs, self._table_upload)

    def copy(self, pairs: Sequence[Copy]) -> None:
        self._memory.copy(pairs, self._table_upload)

    def compute(self, inputs: Inputs, prompts: PromptLogprobs | None) -> Launched:
        if self._memory.given_back:
            self._memory.restore()
        try:
            alone = inputs.decode_only and prompts is None
            made = self._decode(inputs) if alone else self._mixed(inputs, prompts)
        except BaseException:
            fuse.drop()
            raise
        self._last_done = made.done
        return made

    # -- decode steps ---------------------------------------------------------------------------

    def _decode(self, inputs: Inputs) -> Launched:
        try:
            return self._decode_in_line(inputs)
        except BaseException:
            self._mail.torn = True
            raise

    def _decode_in_line(self, inputs: Inputs) -> Launched:
        kind = self._sampler.kind(inputs.sampled_slots)
        binding = self._sampler.binding(inputs.sampled_slots, inputs.outputs)
        # masks come from the host, and late: then the graph ends before the sampling
        inside = None if binding is not None and binding.masks else kind
        size = self._graphs.size_for(len(inputs.slots), inside, self._busy_for())
        with span("post"):
            self._mail.post(inputs, size)
        with span("graph"):
            self._graphs.run(size, inside)
        if inside is not None:
            done = torch.cuda.Event()
            done.record()
            return _bound(Launched(inputs, done, self._mail.posted(done), None, None, binding))
        assert self._hidden is not None
        views, hidden = self._decode_views(size), self._hidden[:size]
        made = self._sample(hidden, views.row_slots, views.outputs, inputs, kind, binding, None)
        self._mail.posted(made.done)
        return made

    def _busy_for(self) -> float:
        """For how long the GPU has work, at a guess: what the step before this one took.

        At full steam decode steps are submitted one step's time apart.
        """
        now = time.perf_counter()
        before, self._asked_at = self._asked_at, now
        busy = self._last_done is not None and not self._last_done.query()
        return now - before if busy else 0.0

    def _decode_views(self, size: int) -> Views:
        """The views of a size are made once."""
        views = self._views.get(size)
        if views is None:
            token_ids, positions, contexts, rows, row_slots, outputs = self._mail.words[
                :, :size
            ].unbind()
            views = self._views[size] = Views(
                token_ids=token_ids,
                token_slots=row_slots,
                positions=positions,
                q_starts=self._starts[: size + 1],
                contexts=contexts,
                rows=rows,
                sampled=self._starts[:size],
                row_slots=row_slots,
                outputs=outputs,
            )
        return views

    def _decode_body(self, size: int, kind: Kind | None) -> None:
        """All kernels of a decode step. Fetches its integers, delivers tokens or leaves hidden."""
        mail, views = self._mail, self._decode_views(size)
        if not self._graphs.capturing:
            mail.mend()
        ids, kv_slots = self._blank(size)
        kernels.begin(
            mail.state,
            mail.inbox,
            mail.words,
            self._last_token,
            self._tables,
            ids,
            kv_slots,
            mail.depth,
            self._block_size,
        )
        hidden = self._forward(views, ids, kv_slots, size, 1, self._width * self._block_size, 0)
        if kind is None:
            self._keep(hidden)
            return
        logits = self._logits(hidden)
        ids, tops = self._sampler.choose(logits, views.row_slots, views.outputs, kind)
        fuse.flush()
        kernels.end(
            mail.state, ids, tops, views.row_slots, self._last_token, mail.outbox, mail.stride
        )

    # -- other steps ----------------------------------------------------------------------------

    def _mixed(self, inputs: Inputs, prompts: PromptLogprobs | None) -> Launched:
        kind = self._sampler.kind(inputs.sampled_slots)
        binding = None
        if inputs.sampled_rows:
            binding = self._sampler.binding(inputs.sampled_slots, inputs.outputs)
        inside = None if binding is not None and binding.masks else kind
        busy = self._busy_for()
        most = (self._max_tokens, len(self._last_token))
        mould = None if prompts else mould_of(inputs, *most, waits=not busy)
        if mould and self._moulds.worth(mould, inside, busy, PATIENCE, MOST_GRAPHS):
            return self._moulded(inputs, mould, kind, inside, binding)
        return self._one_by_one(inputs, prompts, kind, binding)

    def _one_by_one(
        self,
        inputs: Inputs,
        prompts: PromptLogprobs | None,
        kind: Kind | None,
        binding: Binding | None,
    ) -> Launched:
        """Launch kernel by kernel."""
        with span("upload"):
            views = self._send_mixed(
                inputs, roomy(len(inputs.sampled_slots), len(self._last_token))
            )
        with span("forward"):
            bounds = (inputs.decodes, inputs.max_query, inputs.max_context, inputs.past)
            hidden = self._gathered(views, *bounds)
        judged = prompts.start(self._model, hidden, self._logprobs_mode) if prompts else None
        if not inputs.sampled_rows:
            return self._launched(inputs, None, judged, None)
        chosen = hidden.index_select(0, views.sampled)
        return self._sample(chosen, views.row_slots, views.outputs, inputs, kind, binding, judged)

    def _moulded(
        self,
        inputs: Inputs,
        mould: Mould,
        kind: Kind | None,
        inside: Kind | None,
        binding: Binding | None,
    ) -> Launched:
        """Run as a graph of a mould, with sampling `inside` it, or outside if that is None."""
        with span("upload"):
            views = self._send_mixed(filled(inputs, mould), mould.rows)
        with span("graph"):
            self._moulds.run(mould, inside)
        if inside is not None or not inputs.sampled_rows:
            return self._launched(inputs, None, None, binding)
        assert self._hidden is not None
        hidden = self._hidden[: mould.rows]
        return self._sample(hidden, views.row_slots, views.outputs, inputs, kind, binding, None)

    def _moulded_body(self, mould: Mould, kind: Kind | None) -> None:
        """All kernels of a step of this mould, whose integers are on the device."""
        views = self._mixed_views(mould.tokens, mould.rows, mould.rows)
        longest = self._width * self._block_size
        hidden = self._gathered(views, mould.decodes, mould.tokens, longest, None)
        chosen = hidden.index_select(0, views.sampled)
        if kind is None:
            self._keep(chosen)
            return
        ids, tops = self._sampler.choose(self._logits(chosen), views.row_slots, views.outputs, kind)
        fuse.flush()
        self._finish(ids, tops, views.row_slots)

    def _keep(self, hidden: Tensor) -> None:
        """Leave what is sampled outside the graph where it is found: [R, E]."""
        if self._hidden is None:
            shape = (self._tables.shape[1], hidden.shape[1])
            self._hidden = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
        fuse.flush()
        self._hidden[: len(hidden)].copy_(hidden)

    def _gathered(
        self, views: Views, decodes: int, max_query: int, max_context: int, past: int | None
    ) -> Tensor:
        """Gather the inputs of a step that was sent, and run the model: [T, E]."""
        ids, kv_slots = self._blank(len(views.token_ids))
        kernels.gather(
            views.token_ids,
            views.token_slots,
            views.positions,
            self._last_token,
            self._tables,
            ids,
            kv_slots,
            self._block_size,
        )
        hidden = self._forward(views, ids, kv_slots, decodes, max_query, max_context, past)
        fuse.flush()
        return hidden

    def _send_mixed(self, inputs: Inputs, sampled: int) -> Views:
        """Upload the step's integers. What is sampled is filled up: with row 0, in no slot."""
        parts: tuple[tuple[Ints | tuple[int, ...], int, int], ...] = (
            (inputs.token_ids, len(inputs.token_ids), 0),
            (inputs.token_slots, len(inputs.token_slots), 0),
            (inputs.positions, len(inputs.positions), 0),
            (inputs.q_starts, len(inputs.q_starts), 0),
            (inputs.contexts, len(inputs.contexts), 0),
            (inputs.slots, len(inputs.slots), 0),
            (inputs.sampled, sampled, 0),
            (inputs.sampled_slots, sampled, -1),
            (inputs.outputs, sampled, 0),
        )
        words, at = self._mixed_upload.take(sum(aligned(length) for _, length, _ in parts)), 0
        for part, length, blank in parts:
            words[at : at + len(part)] = part
            words[at + len(part) : at + length] = blank
            at += aligned(length)
        self._mixed_upload.send(at)
        return self._mixed_views(len(inputs.token_ids), len(inputs.slots), sampled)

    def _mixed_views(self, tokens: int, rows: int, sampled: int) -> Views:
        """Where _send_mixed() puts a step's integers."""
        sent, at, found = self._mixed_upload.on_device, 0, []
        for length in (tokens, tokens, tokens, rows + 1, rows, rows, sampled, sampled, sampled):
            found.append(sent[at : at + length])
            at += aligned(length)
        return Views(*found)

    # -- both -----------------------------------------------------------------------------------

    def _blank(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Token ids [T] and KV slots [G, T], for a kernel to fill."""
        groups, device = self._tables.shape[0], self._tables.device
        ids = torch.empty(tokens, dtype=torch.int32, device=device)
        return ids, torch.empty((groups, tokens), dtype=torch.int64, device=device)

    def _forward(
        self,
        views: Views,
        ids: Tensor,
        kv_slots: Tensor,
        decodes: int,
        max_query: int,
        max_context: int,
        past: int | None,
    ) -> Tensor:
        """Hidden states of the step's tokens: [T, E]."""
        batch = Batch(
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
        return self._model(StepInputs(ids, views.positions, self._backend.plan(batch)))

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._model.logits(hidden)
        fuse.flush()
        return logits

    def _sample(
        self,
        hidden: Tensor,
        row_slots: Tensor,
        outputs: Tensor,
        inputs: Inputs,
        kind: Kind | None,
        binding: Binding | None,
        judged: Judged | None,
    ) -> Launched:
        """Sample the rows whose last hidden states these are: [R or more, E], padded at the end."""
        logits = self._logits(hidden)
        if kind is not None:
            if binding is not None and binding.masks:
                with span("masks"):
                    binding.mask(logits)
            ids, tops = self._sampler.choose(logits, row_slots, outputs, kind)
            fuse.flush()
            self._finish(ids, tops, row_slots)
            return self._launched(inputs, None, judged, binding)
        with span("sample"):
            rows = len(inputs.sampled_slots)
            counts = inputs.outputs.tolist()
            sampled = self._sampler.sample(logits[:rows], inputs.sampled_slots, counts, binding)
            fuse.flush()
        self._finish(sampled.token_ids, sampled.tops, row_slots[:rows])
        return self._launched(inputs, sampled.fetch(), judged, binding)

    def _finish(self, ids: Tensor, tops: Tensor, row_slots: Tensor) -> None:
        kernels.finish(ids, tops, row_slots, self._last_token, self._results)

    def _launched(
        self,
        inputs: Inputs,
        fetched: Fetched | None,
        judged: Judged | None,
        binding: Binding | None,
    ) -> Launched:
        """Start the copies to the host, and mark their end."""
        answer = None
        if inputs.sampled_rows and fetched is None:
            self._turn = (self._turn + 1) % IN_FLIGHT
            copy = self._fetched[self._turn]
            copy.copy_(self._results, non_blocking=True)
            answer = copy.numpy()
        done = torch.cuda.Event()
        done.record()
        return _bound(Launched(inputs, done, answer, fetched, judged, binding))


def _bound(made: Launched) -> Launched:
    """Its tokens are wanted by what its rows are bound to."""
    if made.binding is not None:
        made.binding.tell(made.tokens)
    return made

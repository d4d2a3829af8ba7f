"""Decode context parallelism: each of R ranks caches every R-th token of all sequences.

    token p of a sequence   on rank p % R, as its token p // R there
    block n                 R * B tokens of a sequence, B of them on each rank in its block n

So the scheduler has larger blocks, and tables are the same on all ranks. The ranks have the same KV
heads and a part of the query heads each.

    rows that decode   the queries of all ranks' heads attend to the tokens here; each rank gets the
                       parts of its own heads, and combines them
    prompts            whole blocks are gathered from the ranks, up to one longest sequence at a
                       time, and attended to as without context parallelism

A window of w tokens, which R divides, is the last w / R tokens on each rank.

Axes: T tokens in the step, S sequences, H query heads of a rank, K kv heads, D head size, L latent
size, P and R size of a query's plain and rotated part, V size of a value, W table width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from quire.attention.base import AttentionLayer, AttentionMetadata, AttentionStep
from quire.attention.base import Backend as AnyBackend
from quire.attention.mla import MLAStep
from quire.attention.paged import PagedAttentionStep
from quire.config.memory.memory_plan import GATHER_COPIES
from quire.distributed.context_exchange import ContextExchange
from quire.errors import ConfigError
from quire.kernels.attention_slices import combine_slices, paged_attention_slice
from quire.kernels.framework import lazy_fusion
from quire.kernels.mla_attention import mla_attention
from quire.kernels.mla_slice import mla_slice
from quire.kernels.paged_attention import paged_attention


class PromptRun(NamedTuple):
    """Neighbouring sequences of several queries whose blocks are gathered at once."""

    tokens: slice  # of the step
    sequences: slice
    q_starts: Tensor  # [s + 1] int32
    tables: Tensor  # [s, w] int32: of the gathered blocks
    places: tuple[int, ...]  # [s] blocks of each sequence


class ContextStep:
    """What the layers of a step share: made on the device when the first one runs, because a
    captured step repeats it."""

    def __init__(self, batch: AttentionMetadata, exchange: ContextExchange) -> None:
        self.batch, self.exchange = batch, exchange
        self._contexts: Tensor | None = None
        self._slots: dict[int, Tensor] = {}
        self._runs: list[PromptRun] | None = None
        self._blocks: dict[tuple[int, int], Tensor] = {}

    def contexts(self) -> Tensor:
        """[S] int32: tokens of each sequence on this rank."""
        if self._contexts is None:
            lazy_fusion.flush()
            ranks = self.exchange.ranks
            self._contexts = (self.batch.contexts + (ranks - 1 - self.exchange.rank)) // ranks
        return self._contexts

    def slots(self, group: int) -> Tensor:
        """[T] int64: where the step's tokens are cached here; negative: on another rank."""
        if group not in self._slots:
            lazy_fusion.flush()
            whole, ranks = self.batch.slots[group], self.exchange.ranks
            mine = whole % ranks == self.exchange.rank
            self._slots[group] = torch.where(mine, whole // ranks, -1)
        return self._slots[group]

    def prompts(self, cache: Tensor) -> list[PromptRun]:
        """The sequences after those that decode. cache: of some layer.

        Allocates, for a moment, the memory that gathering a longest sequence takes: so what was
        measured for the largest step suffices for all.
        """
        if self._runs is None:
            block_size = cache.shape[3] * self.exchange.ranks
            self._runs = list(self._find_runs(block_size))
            if cache.is_cuda and self._runs:
                most = self.batch.tables[0].shape[1] * self.exchange.ranks
                cache.new_empty((GATHER_COPIES * most, *cache.shape[1:]))
        return self._runs

    def blocks(self, run: int, group: int) -> Tensor:
        """[n] int64: the blocks of a run, sequence by sequence."""
        if (run, group) not in self._blocks:
            assert self._runs is not None
            batch, own = self.batch, self._runs[run]
            table = batch.tables[group]
            rows = torch.arange(own.sequences.start, own.sequences.stop, device=table.device)
            if batch.rows is not None:
                rows = batch.rows[own.sequences].long()
            found = [table[row, :n] for row, n in zip(rows.split(1), own.places)]
            found = [one.reshape(-1)[:n] for one, n in zip(found, own.places)]
            # blocks before a window have been given back (-1): any block will do, it is not read
            self._blocks[run, group] = torch.cat(found).clamp(min=0).long()
        return self._blocks[run, group]

    def _find_runs(self, block_size: int) -> Iterator[PromptRun]:
        batch, first = self.batch, self.batch.decodes
        prompts = list(batch.prompts)
        if not prompts and len(batch.contexts) > first:
            queries = batch.q_starts[first:].diff().tolist()
            prompts = list(zip(queries, batch.contexts[first:].tolist()))
        most = batch.tables[0].shape[1]  # blocks that are gathered at a time: of a longest sequence
        token, start = first, 0
        while start < len(prompts):
            stop = start
            places: list[int] = []
            while stop < len(prompts):
                blocks = -(-prompts[stop][1] // block_size)
                if places and sum(places) + blocks > most:
                    break
                places.append(blocks)
                stop += 1
            tokens = sum(n for n, _ in prompts[start:stop])
            yield self._make_run(
                slice(token, token + tokens),
                slice(first + start, first + stop),
                tuple(places),
            )
            token, start = token + tokens, stop

    def _make_run(self, tokens: slice, sequences: slice, places: tuple[int, ...]) -> PromptRun:
        starts = self.batch.q_starts[sequences.start : sequences.stop + 1] - tokens.start
        width = self.batch.tables[0].shape[1]  # whatever the sequences: kernels depend on it
        ends = torch.tensor((0, *places[:-1]), dtype=torch.int32).cumsum(0)
        table = (ends[:, None] + torch.arange(width)).int()
        # entries past a sequence's blocks are not read
        table = table.clamp(max=max(sum(places) - 1, 0)).to(starts.device, non_blocking=True)
        return PromptRun(tokens, sequences, starts, table, places)


class SlicedAttentionStep:
    """One step over caches of keys and values."""

    def __init__(self, own: PagedAttentionStep, step: ContextStep) -> None:
        self._own, self._step = own, step

    def run(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer) -> Tensor:
        """Write k, v [T, K, D] that belong here to the layer's place, then attend q [T, H, D]."""
        if layer.alibi is not None or layer.position_bias is not None:
            raise ConfigError(
                "decode_context_parallel_size: this model has a bias by distance (ALiBi), which "
                "attention to a part of the tokens has not; leave it out"
            )
        own, step, batch = self._own, self._step, self._own.metadata
        if k is not None and v is not None:
            own.write_cross(k, v, step.slots(layer.group), layer)
        lazy_fusion.flush()  # torch reads the queries, and blocks that the step has written
        if batch.decodes == len(batch.contexts):
            return self._decode(q, layer)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if batch.decodes:
            out[: batch.decodes] = self._launched(self._decode(q[: batch.decodes], layer))
        for number, prompts in enumerate(step.prompts(own.cache[layer.place])):
            found = self._attend_prompts(q[prompts.tokens], number, prompts, layer)
            out[prompts.tokens] = self._launched(found)
        return out

    @staticmethod
    def _launched(x: Tensor) -> Tensor:
        lazy_fusion.flush()  # a copy is no op
        return x

    def _decode(self, q: Tensor, layer: AttentionLayer) -> Tensor:
        own, step, batch, rows = self._own, self._step, self._own.metadata, len(q)
        ranks = step.exchange.ranks
        every = step.exchange.gather_queries(q.reshape(rows, -1)).view(rows, -1, q.shape[2])
        parts = paged_attention_slice(
            every,
            own.cache[layer.place],
            batch.tables[layer.group],
            step.contexts()[:rows],
            layer.scale,
            None if layer.window is None else layer.window // ranks,
            layer.softcap,
            None if batch.rows is None else batch.rows[:rows],
            -(-batch.max_context // ranks),
            layer.k_scale,
            layer.v_scale,
            own.scales_of(layer),
        )
        return combine_slices(step.exchange.scatter_parts(parts), q.dtype, layer.sinks)

    def _attend_prompts(
        self, q: Tensor, number: int, run: PromptRun, layer: AttentionLayer
    ) -> Tensor:
        own, step, batch = self._own, self._step, self._own.metadata
        blocks, scales = step.blocks(number, layer.group), own.scales_of(layer)
        whole = step.exchange.gather_blocks(_pick(own.cache[layer.place], blocks))
        return paged_attention(
            q,
            whole,
            run.tables,
            run.q_starts,
            batch.contexts[run.sequences],
            layer.scale,
            layer.window,
            layer.softcap,
            layer.sinks,
            max_context=batch.max_context,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
            counters=own.counters,
            scales=None if scales is None else step.exchange.gather_blocks(_pick(scales, blocks)),
            spans=batch.spans[run.tokens] if layer.spans and batch.spans is not None else None,
        )

    def with_spans(self, spans: Tensor) -> AttentionStep:
        """The step in which token t also sees positions [spans[t, 0], spans[t, 1])."""
        own = self._own.with_spans(spans)
        assert isinstance(own, PagedAttentionStep)
        return SlicedAttentionStep(own, self._step)


class SlicedMLAStep:
    """One step over caches of latents."""

    def __init__(self, own: MLAStep, step: ContextStep) -> None:
        self._own, self._step = own, step

    def cache_and_slots(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """Where a layer's latents go: its cache [N, 1, 1, B, L + R] and the tokens' slots [T]."""
        return self._own.cache[layer.place], self._step.slots(layer.group)

    def attend(
        self, q: Tensor, q_rope: Tensor, latents: Tensor, up: Tensor, layer: AttentionLayer
    ) -> Tensor:
        """q [T, H, P], q_rope [T, H, R], latents [T, L + R], up [H, P + V, L] -> [T, H * V]."""
        batch, rows = self._own.metadata, self._own.metadata.decodes
        lazy_fusion.flush()  # torch reads the queries, and the latents must be in the cache
        if rows == len(batch.contexts):
            return self._decode(q, q_rope, up, layer)
        values = up.shape[0] * (up.shape[1] - q.shape[2])
        out = torch.empty((len(q), values), dtype=q.dtype, device=q.device)
        if rows:
            out[:rows] = self._decode(q[:rows], q_rope[:rows], up, layer)
        cache = self._own.cache[layer.place]
        for number, run in enumerate(self._step.prompts(cache)):
            blocks = self._step.blocks(number, layer.group)
            whole = self._step.exchange.gather_blocks(cache[blocks])
            found = mla_attention(
                q[run.tokens],
                q_rope[run.tokens],
                latents[run.tokens],
                up,
                whole,
                run.tables,
                run.q_starts,
                batch.contexts[run.sequences],
                layer.scale,
                past=batch.past,
            )
            lazy_fusion.flush()
            out[run.tokens] = found
        return out

    def _decode(self, q: Tensor, q_rope: Tensor, up: Tensor, layer: AttentionLayer) -> Tensor:
        step, batch, (rows, _, plain) = self._step, self._own.metadata, q.shape
        absorbed = torch.bmm(q.transpose(0, 1), up[:, :plain]).transpose(0, 1)
        mine = torch.cat((absorbed, q_rope), -1)
        every = step.exchange.gather_queries(mine.view(rows, -1)).view(rows, -1, mine.shape[2])
        parts = mla_slice(
            every,
            self._own.cache[layer.place],
            batch.tables[layer.group],
            step.contexts()[:rows],
            layer.scale,
            up.shape[2],
            None if batch.rows is None else batch.rows[:rows],
        )
        mixed = combine_slices(step.exchange.scatter_parts(parts), q.dtype)
        lazy_fusion.flush()
        found = torch.bmm(mixed.transpose(0, 1), up[:, plain:].transpose(1, 2))
        return found.transpose(0, 1).reshape(rows, -1)

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        raise AssertionError("a layer with keys and values was given a latent cache")


class Backend:
    """One of the other backends, over a part of the tokens."""

    supports_prefill_graphs = False

    def __init__(self, own: AnyBackend, exchange: ContextExchange) -> None:
        """own: the backend of this rank's cache, paged or mla."""
        self._own, self._exchange = own, exchange

    def plan(self, batch: AttentionMetadata) -> AttentionStep | SlicedMLAStep:
        own, step = self._own.plan(batch), ContextStep(batch, self._exchange)
        if isinstance(own, MLAStep):
            return SlicedMLAStep(own, step)
        assert isinstance(own, PagedAttentionStep), type(own)
        return SlicedAttentionStep(own, step)


def _pick(cache: Tensor, blocks: Tensor) -> Tensor:
    """cache[blocks], of any dtype and with scales that are views."""
    if cache.element_size() == 1:
        return cache.view(torch.uint8)[blocks].view(cache.dtype)
    return cache[blocks]

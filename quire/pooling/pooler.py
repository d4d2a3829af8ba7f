"""Pooler: computes the pooled results of one step on the device, all rows of a kind at once.

    pool -> head dtype -> Dense layers -> dimensions -> L2 norm                    embed
    pool -> head dtype -> classify -> (logit - mean) / sigma -> activation         classify

Token tasks have the same heads for the state of each token. A step's results leave the device as
one float32 buffer. Sums of a prompt that is computed in several steps are kept by slot; a row at
the start of a prompt begins anew, so preempted and aborted sequences need no notice.

Axes: T tokens of the step, n rows of one kind, E hidden, D numbers of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from quire.config.engine_config import DenseSection, PoolingMethod, PoolingSection
from quire.core.types import Pooled
from quire.kernels.framework import lazy_fusion
from quire.kernels.segment_pool import PoolMode, segment_pool
from quire.pooling.activations import activation_named
from quire.pooling.dense import Dense, dummy_dense, load_dense
from quire.pooling.pooling_rows import SEQUENCE_TASKS, PoolingRows, ResultKind
from quire.sampling.h2d import to_device, to_host_async

MAX_LOGIT_TOKENS = 512
"""Tokens whose logits of the whole vocabulary are in memory at once (splade)."""
SUM_MODES: dict[PoolingMethod, PoolMode] = {
    "mean": "sum",
    "mean_sqrt_len": "sum",
    "weighted_mean": "weighted",
    "max": "max",
    "splade": "max",
}
"""Methods that read all tokens, and how these are reduced."""

HeadContext = Callable[[Tensor], AbstractContextManager[object]]
"""The context in which heads of the model run. Called with the slots of the sequences whose states
they read: int32 [n]."""


class Pooler:
    """Of one model, with the state of max_seqs slots. Steps run one after another."""

    def __init__(
        self,
        section: PoolingSection,
        model: Any,
        folder: Path | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_seqs: int,
        seed: int = 0,
    ) -> None:
        """model: with `classify` and `logits`, as tasks and methods need them. folder: of Dense
        layers; None: random ones. dtype: of the model. Raises ConfigError, WeightError.
        """
        self._section = section
        self._model = model
        self._max_seqs = max_seqs
        self._dtype = torch.float32 if section.head_dtype == "float32" else dtype

        def dense(one: DenseSection) -> Dense:
            if folder is None:
                return dummy_dense(one, self._dtype, device, seed)
            return load_dense(one, folder, self._dtype, device)

        self._dense = [dense(one) for one in section.dense]
        self._token_dense = self._dense
        if section.token_dense is not None:
            self._token_dense = [dense(section.token_dense)]
        self._token_weight = None if section.token_weight is None else dense(section.token_weight)
        self._activation = activation_named(section.activation)
        self._states: dict[str, Tensor] = {}  # [max_seqs, E] of prompts in several steps
        self._rows_so_far: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        """slot -> results and norms of the tokens in steps before. Written as results arrive."""
        self._column_indexes: dict[tuple[int, ...], Tensor] = {}

    def start(self, hidden: Tensor, rows: PoolingRows, heads: HeadContext) -> PendingPool:
        """Start the pooling of a step's hidden states [T, E], and the copy of the results."""
        pieces: list[_Piece] = []
        buffers: list[Tensor] = []
        whole = [i for i, k in enumerate(rows.kind_of) if rows.kinds[k].task in SEQUENCE_TASKS]
        done: list[int] = [i for i in whole if rows.is_last[i]]
        states = self._pool_sequences(hidden, rows, whole, heads) if whole else None
        for k, kind in enumerate(rows.kinds):
            if kind.task in SEQUENCE_TASKS:
                places = [at for at, i in enumerate(done) if rows.kind_of[i] == k]
                if not places or states is None:
                    continue
                own = states
                if len(places) < len(done):
                    own = states.index_select(0, to_device(np.array(places), states.device))
                indexes, counts = [done[at] for at in places], None
            else:
                indexes = [i for i, found in enumerate(rows.kind_of) if found == k]
                tokens, counts = _token_indexes(rows, indexes)
                own = hidden.index_select(0, to_device(tokens, hidden.device)).float()
            slots = np.array(rows.slots, np.int32)[indexes]
            slots = slots if counts is None else slots.repeat(counts)
            results = self._head(own, kind, slots, heads) if len(own) else own
            norms = torch.linalg.vector_norm(own, torch.inf, dim=-1)
            pieces.append(_Piece(indexes, results.shape[1], counts))
            buffers += [norms.flatten(), results.flatten()]
        buffer = to_host_async(torch.cat(buffers)) if buffers else torch.zeros(0)
        return PendingPool(self, rows, pieces, buffer)

    # -- states of sequences --------------------------------------------------------------------

    def _pool_sequences(
        self, hidden: Tensor, rows: PoolingRows, which: list[int], heads: HeadContext
    ) -> Tensor | None:
        """Return the pooled states of the sequences that end here: [n, E * methods] float32.

        None if none does. The sums of the others are kept.
        """
        first, count, start, skip, slot = (
            np.array(values, np.int64)[which]
            for values in (rows.firsts, rows.counts, rows.starts, rows.skips, rows.slots)
        )
        batch = _Segments(
            first=first,
            end=first + count,
            start=start,
            length=start + count,
            skip=np.minimum(skip, start + count),
            slot=slot,
            is_last=np.array(rows.is_last)[which],
        )
        found = [self._pool(method, hidden, batch, heads) for method in self._section.methods]
        if not batch.is_last.any():
            return None
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def _pool(
        self, method: PoolingMethod, hidden: Tensor, batch: _Segments, heads: HeadContext
    ) -> Tensor:
        """Return the states of one method, of the sequences that end here: [n, E] float32."""
        device, last = hidden.device, batch.is_last
        if method == "last":
            return hidden.index_select(0, to_device(batch.end[last] - 1, device)).float()
        if method == "cls":
            values = hidden.index_select(0, to_device(batch.first, device)).float()
            return self._over_steps(method, values, batch)
        mode = SUM_MODES[method]
        if method == "splade":
            values = self._largest_logits(hidden, batch, heads)
        else:
            begin = batch.first + np.clip(batch.skip - batch.start, 0, batch.end - batch.first)
            offset = batch.start + begin - batch.first
            numbers = to_device(np.stack([begin, batch.end, offset]).astype(np.int32), device)
            values = segment_pool(hidden, numbers[0], numbers[1], numbers[2], mode)
            lazy_fusion.flush()
        values = self._over_steps(method, values, batch)
        if method == "splade":
            return torch.log1p(torch.relu(values))
        if method == "max":
            return values
        n, s = batch.length[last].astype(np.float64), batch.skip[last].astype(np.float64)
        divisor = n - s
        if method == "mean_sqrt_len":
            divisor = np.sqrt(divisor)
        elif method == "weighted_mean":
            divisor = (n * (n + 1) - s * (s + 1)) / 2
        return (values / to_device(np.maximum(divisor, 1.0)[:, None], device)).float()

    def _over_steps(self, method: PoolingMethod, values: Tensor, batch: _Segments) -> Tensor:
        """Join the values [n, E] of this step and of those before. Returns those of sequences that
        end here, and keeps the others.
        """
        continued, last = batch.start > 0, batch.is_last
        if last.all() and not continued.any():
            return values
        device = values.device
        state = self._states.get(method)
        if state is None:
            state = values.new_zeros((self._max_seqs, values.shape[1]))
            self._states[method] = state
        if continued.any():
            at = to_device(np.flatnonzero(continued), device)
            before = state.index_select(0, to_device(batch.slot[continued], device))
            own = values.index_select(0, at)
            if method == "cls":
                joined = before
            elif SUM_MODES[method] == "max":
                joined = torch.maximum(before, own)
            else:
                joined = before + own
            values = values.index_copy(0, at, joined)
        if not last.all():
            at = to_device(np.flatnonzero(~last), device)
            slots = to_device(batch.slot[~last], device)
            state.index_copy_(0, slots, values.index_select(0, at))
            values = values.index_select(0, to_device(np.flatnonzero(last), device))
        return values

    def _largest_logits(self, hidden: Tensor, batch: _Segments, heads: HeadContext) -> Tensor:
        """Return the largest logit of each vocabulary entry over each row: [n, V] float32."""
        found = []
        for begin, end, slot in zip(batch.first.tolist(), batch.end.tolist(), batch.slot):
            tops = []
            for at in range(begin, end, MAX_LOGIT_TOKENS):
                states = hidden[at : min(at + MAX_LOGIT_TOKENS, end)]
                slots = np.full(len(states), slot, np.int32)
                with heads(to_device(slots, states.device)):
                    logits = self._model.logits(states)
                lazy_fusion.flush()
                tops.append(logits.amax(0).float())
            found.append(torch.stack(tops).amax(0))
        return torch.stack(found)

    # -- heads ----------------------------------------------------------------------------------

    def _head(
        self, states: Tensor, kind: ResultKind, slots: np.ndarray, heads: HeadContext
    ) -> Tensor:
        """[n, E] float32 -> [n, D] float32. slots: int32 [n]"""
        x = states.to(self._dtype)
        if kind.task == "token_classify" and self._token_weight is not None:
            return self._token_weight(x).float()
        if kind.task in ("classify", "token_classify"):
            with heads(to_device(slots, x.device)):
                logits = self._model.classify(x)
            lazy_fusion.flush()
            section = self._section
            x = (logits.float() - section.logit_mean) / section.logit_sigma
            if kind.use_activation:
                x = self._activation(x)
            return x.index_select(1, self._columns(kind.columns, x)) if kind.columns else x
        for dense in self._token_dense if kind.task == "token_embed" else self._dense:
            x = dense(x)
        x = x.float()
        if kind.dimensions is not None:
            x = x[:, : kind.dimensions]
        return functional.normalize(x, dim=-1) if kind.use_activation else x

    def _columns(self, columns: tuple[int, ...], like: Tensor) -> Tensor:
        if columns not in self._column_indexes:
            self._column_indexes[columns] = to_device(columns, like.device)
        return self._column_indexes[columns]


@dataclass(frozen=True, slots=True)
class _Segments:
    """The rows of sequence tasks. Arrays [n] on the host."""

    first: np.ndarray  # index of the first token among the step's
    end: np.ndarray
    start: np.ndarray  # tokens in steps before
    length: np.ndarray  # of the sequence, up to here
    skip: np.ndarray  # leading tokens of the sequence that do not count
    slot: np.ndarray
    is_last: np.ndarray  # bool


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of one kind in the buffer: the norms of their states, then their results."""

    rows: list[int]
    width: int
    counts: list[int] | None  # tokens of each; None: a sequence task


@dataclass(frozen=True, slots=True)
class PendingPool:
    """Results on their way to the host."""

    pooler: Pooler
    rows: PoolingRows
    pieces: Sequence[_Piece]
    buffer: Tensor  # float32

    def result(self) -> tuple[dict[int, Pooled], dict[int, str]]:
        """Return row -> result, and row -> why it has none. Call it once, in the order of steps.

        On a GPU, call it after the step's event.
        """
        found: dict[int, Pooled] = {}
        wrong: dict[int, str] = {}
        numbers, at = self.buffer.numpy(), 0
        for piece in self.pieces:
            lengths = [1] * len(piece.rows) if piece.counts is None else piece.counts
            total = sum(lengths)
            norms = numbers[at : at + total]
            results = numbers[at + total : at + total * (1 + piece.width)]
            results = results.reshape(total, piece.width)
            at += total * (1 + piece.width)
            if piece.counts is None:
                _split_sequences(piece, norms, results, found, wrong)
            else:
                self._split_tokens(piece, norms, results, found, wrong)
        return found, wrong

    def _split_tokens(
        self,
        piece: _Piece,
        norms: np.ndarray,
        results: np.ndarray,
        found: dict[int, Pooled],
        wrong: dict[int, str],
    ) -> None:
        """Join the results of tokens with those of earlier steps."""
        kept, at = self.pooler._rows_so_far, 0
        for i, count in zip(piece.rows, piece.counts or ()):
            slot, own = self.rows.slots[i], (norms[at : at + count], results[at : at + count])
            at += count
            before = kept.pop(slot, [])
            if self.rows.starts[i] == 0:
                before = []  # of a sequence that has left
            if not self.rows.is_last[i]:
                kept[slot] = [*before, (own[0].copy(), own[1].copy())]
                continue
            parts = [part for part in (*before, own) if len(part[0])]
            if not parts:
                found[i] = Pooled((0, piece.width), b"")
                continue
            norm = np.concatenate([part[0] for part in parts])
            rows = np.concatenate([part[1] for part in parts])
            if np.isfinite(norm).all():
                found[i] = Pooled((len(rows), piece.width), rows.tobytes())
            else:
                wrong[i] = _NOT_FINITE


def _split_sequences(
    piece: _Piece,
    norms: np.ndarray,
    results: np.ndarray,
    found: dict[int, Pooled],
    wrong: dict[int, str],
) -> None:
    data, size, shape = results.tobytes(), 4 * piece.width, (piece.width,)
    finite = np.isfinite(norms)
    sound = bool(finite.all())
    for n, i in enumerate(piece.rows):
        if sound or finite[n]:
            found[i] = Pooled(shape, data[n * size : (n + 1) * size])
        else:
            wrong[i] = _NOT_FINITE


_NOT_FINITE = "the model's hidden states are not finite, so they have no pooled result"


def _token_indexes(rows: PoolingRows, which: list[int]) -> tuple[np.ndarray, list[int]]:
    """Return which of the step's T tokens have results, and how many of each row."""
    pieces = []
    for i in which:
        first = rows.firsts[i]
        tagged = rows.tagged.get(i)
        own = range(rows.counts[i]) if tagged is None else tagged
        pieces.append(np.array(own, np.int64) + first)
    return np.concatenate(pieces), [len(piece) for piece in pieces]

"""Which tokens are allowed at all: allowed ids, bad words, and no end before min_tokens.

What is not allowed gets -inf. Each class is one parameter's `Step` (see base).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire.core.types import Sequence as Seq
from quire.sampling.steps.base import Batch, Edit
from quire.sampling.transfer import sent


@dataclass(slots=True)
class AllowedIds:
    """params.allowed_token_ids: everything else is out."""

    _ids: dict[int, list[int]] = field(default_factory=dict)

    def join(self, slot: int, seq: Seq, tokens: list[int]) -> None:
        self._ids.pop(slot, None)
        if seq.request.params.allowed_token_ids:
            self._ids[slot] = sorted(set(seq.request.params.allowed_token_ids))

    def leave(self, slot: int) -> None:
        self._ids.pop(slot, None)

    def holds(self, slot: int) -> bool:
        return slot in self._ids

    def edit(self, batch: Batch) -> Edit | None:
        rows = batch.of(self._ids)
        if not rows:
            return None
        places = [at for row, slot in rows for at in batch.places(row, self._ids[slot])]
        return _Only(batch.tensor([row for row, _ in rows]), batch.tensor(places).long())


@dataclass(slots=True)
class _Only(Edit):
    rows: Tensor
    places: Tensor  # in the flattened logits

    def apply(self, logits: Tensor, positions: Sequence[int], errors: dict[int, str]) -> None:
        flat = logits.view(-1)
        kept = flat[self.places]
        logits.index_fill_(0, self.rows, -torch.inf)
        flat[self.places] = kept


@dataclass(slots=True)
class MinTokens:
    """stop.min_tokens: EOS and stop ids are out until that many outputs exist.

    Not of what is bound to a grammar, which decides the end (quire.sampling.bound).
    """

    _least: dict[int, tuple[int, list[int]]] = field(default_factory=dict)

    def join(self, slot: int, seq: Seq, tokens: list[int]) -> None:
        stop = seq.request.stop
        self._least.pop(slot, None)
        free = seq.request.constraint is None
        if free and stop.min_tokens > 0 and (ends := sorted(stop.eos_ids | stop.token_ids)):
            self._least[slot] = (stop.min_tokens, ends)

    def leave(self, slot: int) -> None:
        self._least.pop(slot, None)

    def holds(self, slot: int) -> bool:
        return slot in self._least

    def edit(self, batch: Batch) -> Edit | None:
        rows = batch.of(self._least)
        if not rows:
            return None
        least = [(row, self._least[slot][0]) for row, slot in rows]
        places = [batch.places(row, self._least[slot][1]) for row, slot in rows]
        return _NoEnd(batch, least, places)


class _NoEnd(Edit):
    def __init__(self, batch: Batch, least: list[tuple[int, int]], places: list[list[int]]) -> None:
        self._batch, self._least, self._places = batch, least, places
        self._live: tuple[int, ...] = ()
        self._cached = batch.tensor([])

    def due(self, positions: Sequence[int]) -> bool:
        return any(positions[row] < least for row, least in self._least)

    def apply(self, logits: Tensor, positions: Sequence[int], errors: dict[int, str]) -> None:
        live = tuple(i for i, (row, least) in enumerate(self._least) if positions[row] < least)
        if live != self._live:
            self._live = live
            self._cached = self._batch.tensor([at for i in live for at in self._places[i]]).long()
        logits.view(-1).index_fill_(0, self._cached, -torch.inf)


ANY = -1
"""A place of a bad word's beginning that matches every token: shorter words are padded with it."""

NOTHING = -2
"""Stands for "no output here yet"; equals no token."""


class BadWords:
    """params.bad_words_token_ids: the last token of a word is out where its beginning was output.

    `_tails` holds the last outputs of each slot on the device, newest last, so that the rule works
    while the newest token is known to the device alone.
    """

    def __init__(self, max_seqs: int, device: torch.device) -> None:
        self._words: dict[int, list[list[int]]] = {}
        self._tails = torch.full((max_seqs, 0), NOTHING, dtype=torch.int64, device=device)

    def join(self, slot: int, seq: Seq, tokens: list[int]) -> None:
        self._words.pop(slot, None)
        words = [word for word in seq.request.params.bad_words_token_ids if word]
        if not words:
            return
        self._words[slot] = words
        self._widen(max(len(word) for word in words) - 1)
        width = self._tails.shape[1]
        tail = [NOTHING] * width + tokens[seq.prompt_len :]
        self._tails[slot] = sent(np.array(tail[len(tail) - width :], np.int64), self._tails.device)

    def _widen(self, width: int) -> None:
        rows, had = self._tails.shape
        if width > had:
            more = self._tails.new_full((rows, width - had), NOTHING)
            self._tails = torch.cat([more, self._tails], 1)

    def leave(self, slot: int) -> None:
        self._words.pop(slot, None)

    def holds(self, slot: int) -> bool:
        return slot in self._words

    def edit(self, batch: Batch) -> Edit | None:
        rows = batch.of(self._words)
        if not rows:
            return None
        width = self._tails.shape[1]
        words = [(r, slot, w) for r, slot in rows for w in self._words[slot] if w[-1] < batch.vocab]
        starts = [[ANY] * (width - len(word) + 1) + word[:-1] for _, _, word in words]
        return _NoWord(
            self._tails,
            batch.tensor([row for row, _ in rows]),
            batch.tensor([slot for _, slot in rows]),
            batch.tensor([slot for _, slot, _ in words]).long(),
            batch.tensor([i for start in starts for i in start]).view(len(words), width).long(),
            batch.tensor([row * batch.vocab + word[-1] for row, _, word in words]).long(),
        )


@dataclass(slots=True)
class _NoWord(Edit):
    tails: Tensor  # [slots, W], shared with the step
    rows: Tensor  # [n] of the logits
    slots: Tensor  # [n]
    word_slots: Tensor  # [words]
    starts: Tensor  # [words, W]
    places: Tensor  # [words] in the flattened logits

    def apply(self, logits: Tensor, positions: Sequence[int], errors: dict[int, str]) -> None:
        same = (self.tails[self.word_slots] == self.starts) | (self.starts == ANY)
        out = torch.where(same.all(-1), -torch.inf, torch.inf)
        logits.view(-1).scatter_reduce_(0, self.places, out, "amin")  # words may share a place

    def drawn(self, token_ids: Tensor) -> None:
        if self.tails.shape[1]:
            new = token_ids[self.rows][:, None]
            self.tails[self.slots] = torch.cat([self.tails[self.slots][:, 1:], new], 1)

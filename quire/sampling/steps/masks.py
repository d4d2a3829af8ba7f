"""Token masks: allowed ids, bad words, and no end before min_tokens.

Tokens that are not allowed get -inf. Each class is one parameter's SamplingStep (see base).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from quire.sampling.h2d import to_device
from quire.sampling.slot_join import SlotJoin
from quire.sampling.steps.base import LogitsEdit, SlotBatch


@dataclass(slots=True)
class AllowedIds:
    """params.allowed_token_ids: all other tokens are masked."""

    reads_outputs: ClassVar = False

    _ids: dict[int, list[int]] = field(default_factory=dict)

    def join(self, joined: SlotJoin) -> None:
        slot = joined.slot
        self._ids.pop(slot, None)
        if joined.params.allowed_token_ids:
            self._ids[slot] = sorted(set(joined.params.allowed_token_ids))

    def leave(self, slot: int) -> None:
        self._ids.pop(slot, None)

    def applies_to(self, slot: int) -> bool:
        return slot in self._ids

    def build_edit(self, batch: SlotBatch) -> LogitsEdit | None:
        rows = batch.rows_in(self._ids)
        if not rows:
            return None
        places = [at for row, slot in rows for at in batch.flat_indices(row, self._ids[slot])]
        return _AllowedTokensEdit(
            batch.tensor([row for row, _ in rows]), batch.tensor(places).long()
        )


@dataclass(slots=True)
class _AllowedTokensEdit(LogitsEdit):
    rows: Tensor
    flat_indices: Tensor  # in the flattened logits

    def apply(self, logits: Tensor, positions: Sequence[int], errors: dict[int, str]) -> None:
        flat = logits.view(-1)
        kept = flat[self.flat_indices]
        logits.index_fill_(0, self.rows, -torch.inf)
        flat[self.flat_indices] = kept


@dataclass(slots=True)
class MinTokens:
    """stop.min_tokens: EOS and stop ids are masked until that many outputs exist.

    A grammar decides the end by itself (quire.sampling.constrained_sequence).
    """

    reads_outputs: ClassVar = False

    _min_tokens: dict[int, tuple[int, list[int]]] = field(default_factory=dict)

    def join(self, joined: SlotJoin) -> None:
        slot, stop = joined.slot, joined.stop
        self._min_tokens.pop(slot, None)
        free = joined.constraint is None
        if free and stop.min_tokens > 0 and (ends := sorted(stop.eos_ids | stop.token_ids)):
            self._min_tokens[slot] = (stop.min_tokens, ends)

    def leave(self, slot: int) -> None:
        self._min_tokens.pop(slot, None)

    def applies_to(self, slot: int) -> bool:
        return slot in self._min_tokens

    def build_edit(self, batch: SlotBatch) -> LogitsEdit | None:
        rows = batch.rows_in(self._min_tokens)
        if not rows:
            return None
        least = [(row, self._min_tokens[slot][0]) for row, slot in rows]
        places = [batch.flat_indices(row, self._min_tokens[slot][1]) for row, slot in rows]
        return _MinTokensEdit(batch, least, places)


class _MinTokensEdit(LogitsEdit):
    def __init__(
        self, batch: SlotBatch, least: list[tuple[int, int]], places: list[list[int]]
    ) -> None:
        self._batch, self._min_tokens, self._places = batch, least, places
        self._active: tuple[int, ...] = ()
        self._active_indices = batch.tensor([])

    def is_due(self, positions: Sequence[int]) -> bool:
        return any(positions[row] < least for row, least in self._min_tokens)

    def apply(self, logits: Tensor, positions: Sequence[int], errors: dict[int, str]) -> None:
        live = tuple(i for i, (row, least) in enumerate(self._min_tokens) if positions[row] < least)
        if live != self._active:
            self._active = live
            self._active_indices = self._batch.tensor(
                [at for i in live for at in self._places[i]]
            ).long()
        logits.view(-1).index_fill_(0, self._active_indices, -torch.inf)


ANY_TOKEN = -1
"""A place of a bad word's beginning that matches every token: shorter words are padded with it."""

NO_TOKEN = -2
"""No output here yet; equals no token."""


class BadWords:
    """params.bad_words_token_ids: masks the last token of a word where its beginning was output.

    `_recent_tokens` holds the last outputs of each slot on the device, newest last, so that the
    rule works while only the device has the newest token.
    """

    reads_outputs: ClassVar = True

    def __init__(self, max_seqs: int, device: torch.device) -> None:
        self._words: dict[int, list[list[int]]] = {}
        self._recent_tokens = torch.full((max_seqs, 0), NO_TOKEN, dtype=torch.int64, device=device)

    def join(self, joined: SlotJoin) -> None:
        slot = joined.slot
        self._words.pop(slot, None)
        words = [word for word in joined.params.bad_words_token_ids if word]
        if not words:
            return
        self._words[slot] = words
        self._grow_width(max(len(word) for word in words) - 1)
        width = self._recent_tokens.shape[1]
        tail = [NO_TOKEN] * width + joined.output_tokens
        self._recent_tokens[slot] = to_device(
            np.array(tail[len(tail) - width :], np.int64), self._recent_tokens.device
        )

    def _grow_width(self, width: int) -> None:
        rows, had = self._recent_tokens.shape
        if width > had:
            more = self._recent_tokens.new_full((rows, width - had), NO_TOKEN)
            self._recent_tokens = torch.cat([more, self._recent_tokens], 1)

    def leave(self, slot: int) -> None:
        self._words.pop(slot, None)

    def applies_to(self, slot: int) -> bool:
        return slot in self._words

    def build_edit(self, batch: SlotBatch) -> LogitsEdit | None:
        rows = batch.rows_in(self._words)
        if not rows:
            return None
        width = self._recent_tokens.shape[1]
        words = [(r, slot, w) for r, slot in rows for w in self._words[slot] if w[-1] < batch.vocab]
        starts = [[ANY_TOKEN] * (width - len(word) + 1) + word[:-1] for _, _, word in words]
        return _BadWordsEdit(
            self._recent_tokens,
            batch.tensor([row for row, _ in rows]),
            batch.tensor([slot for _, slot in rows]),
            batch.tensor([slot for _, slot, _ in words]).long(),
            batch.tensor([i for start in starts for i in start]).view(len(words), width).long(),
            batch.tensor([row * batch.vocab + word[-1] for row, _, word in words]).long(),
        )


@dataclass(slots=True)
class _BadWordsEdit(LogitsEdit):
    recent_tokens: Tensor  # [slots, W], shared with the step
    rows: Tensor  # [n] of the logits
    slots: Tensor  # [n]
    word_slots: Tensor  # [words]
    prefixes: Tensor  # [words, W]
    flat_indices: Tensor  # [words] in the flattened logits

    def apply(self, logits: Tensor, positions: Sequence[int], errors: dict[int, str]) -> None:
        same = (self.recent_tokens[self.word_slots] == self.prefixes) | (self.prefixes == ANY_TOKEN)
        out = torch.where(same.all(-1), -torch.inf, torch.inf)
        logits.view(-1).scatter_reduce_(
            0, self.flat_indices, out, "amin"
        )  # words may share a place

    def on_sampled(self, token_ids: Tensor) -> None:
        if self.recent_tokens.shape[1]:
            new = token_ids[self.rows][:, None]
            self.recent_tokens[self.slots] = torch.cat(
                [self.recent_tokens[self.slots][:, 1:], new], 1
            )

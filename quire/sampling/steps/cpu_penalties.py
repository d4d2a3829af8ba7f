"""CPU penalties: repetition, frequency and presence penalties, in numpy.

    repetition  logit / r if positive, * r if not: once for each token of prompt or output
    frequency   logit - f * (times in the output)
    presence    logit - p if in the output

Seen tokens are a short list of (token, times), not a table over the vocabulary. Only slots with
penalties have one, and each draw is added to it. At this size numpy is 3 times faster than torch; a
GPU uses quire.sampling.steps.gpu_penalties.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from quire.sampling.slot_join import SlotJoin
from quire.sampling.steps.base import LogitsEdit, SlotBatch

Array = np.ndarray[Any, Any]

GROWTH_STEP = 256
"""Lists grow by this many places."""


class CpuPenalties:
    """`ids[p, :known[p]]` are the distinct tokens seen by the sequence of place p, and
    `times[p, :known[p]]` how often it has output each.
    """

    reads_outputs: ClassVar = True

    def __init__(self, vocab: int, max_seqs: int) -> None:
        self._vocab = vocab
        self._max_seqs = max_seqs
        self.entries: dict[int, int] = {}  # slot -> place
        self.factors: dict[int, tuple[float, float, float]] = {}  # slot -> repetition, ...
        self._free: list[int] = []
        self._max_entries: dict[int, int] = {}  # slot -> entries it may have, an upper bound
        self._num_known = np.zeros(0, np.int64)
        self._token_ids = np.zeros((0, 0), np.int64)
        self._token_counts = np.zeros((0, 0), np.float32)

    def join(self, joined: SlotJoin) -> None:
        slot, p = joined.slot, joined.params
        self.leave(slot)
        factors = (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
        if factors == (1.0, 0.0, 0.0):
            return
        times = dict.fromkeys(joined.prompt_tokens, 0)
        times.update(Counter(joined.output_tokens))
        # Prompts may hold ids the model reads but never makes (placeholders of media).
        times = {i: n for i, n in times.items() if i < self._vocab}
        if not self._free:
            self._add_entries()
        place = self._free.pop()
        self.entries[slot], self.factors[slot], self._max_entries[slot] = place, factors, len(times)
        self._grow_width(len(times))
        self._num_known[place] = len(times)
        self._token_ids[place, : len(times)] = list(times)
        self._token_counts[place, : len(times)] = list(times.values())

    def leave(self, slot: int) -> None:
        if slot in self.entries:
            self._free.append(self.entries.pop(slot))
            del self.factors[slot], self._max_entries[slot]

    def applies_to(self, slot: int) -> bool:
        return slot in self.entries

    def build_edit(self, batch: SlotBatch) -> LogitsEdit | None:
        rows = batch.rows_in(self.entries)
        return _CpuPenaltyEdit(self, batch, rows) if rows else None

    def _add_entries(self) -> None:
        had = len(self._num_known)
        more = min(max(4, had), self._max_seqs - had)
        self._free.extend(range(had, had + more))
        self._num_known = self._grown(self._num_known, had + more)
        self._resize(had + more, self._token_ids.shape[1])

    def _grow_width(self, entries: int) -> None:
        if entries > self._token_ids.shape[1]:
            self._resize(len(self._token_ids), -(-entries // GROWTH_STEP) * GROWTH_STEP)

    def _resize(self, places: int, width: int) -> None:
        self._token_ids = self._grown(self._token_ids, places, width)
        self._token_counts = self._grown(self._token_counts, places, width)

    def _grown(self, old: Array, *shape: int) -> Array:
        new = np.zeros(shape, old.dtype)
        new[tuple(slice(0, n) for n in old.shape)] = old
        return new

    def padded_lists(self, places: Array, slots: list[int]) -> tuple[Array, Array, Array]:
        """The lists of these slots as [n, C] ids, times; shorter ones repeat their first entry.

        So whatever is computed for the repeats is what is computed for the first entry. The third
        array [n, 1] is False for a list without entries: a prompt of vectors has no ids.
        """
        width = max(self._max_entries[slot] for slot in slots)
        ids, times = self._token_ids[places, :width], self._token_counts[places, :width]
        known = self._num_known[places][:, None]
        live = np.arange(width) < known
        return np.where(live, ids, ids[:, :1]), np.where(live, times, times[:, :1]), known > 0

    def add_tokens(self, places: Array, slots: list[int], tokens: Array) -> None:
        """One more output of each slot: tokens [n]."""
        for slot in slots:
            self._max_entries[slot] += 1
        width = max(self._max_entries[slot] for slot in slots)
        self._grow_width(width)
        known, columns = self._num_known[places][:, None], np.arange(width)
        ids, times = self._token_ids[places, :width], self._token_counts[places, :width]
        here = (ids == tokens[:, None]) & (columns < known)
        new = ~here.any(-1)[:, None]
        here |= new & (columns == known)
        self._token_counts[places, :width] = np.where(new & here, 0.0, times) + here
        self._token_ids[places, :width] = np.where(here, tokens[:, None], ids)
        self._num_known[places] = known[:, 0] + new[:, 0]


class _CpuPenaltyEdit(LogitsEdit):
    def __init__(self, step: CpuPenalties, batch: SlotBatch, rows: list[tuple[int, int]]) -> None:
        self._step = step
        self._slots = [slot for _, slot in rows]
        self._rows = np.array([row for row, _ in rows])
        self._starts = self._rows[:, None] * batch.vocab
        self._places = np.array([step.entries[slot] for slot in self._slots])
        factors = np.array([step.factors[slot] for slot in self._slots], np.float32)
        self._repetition, self._frequency, self._presence = (factors[:, i, None] for i in range(3))

    def apply(self, logits: Tensor, positions: Sequence[int], errors: dict[int, str]) -> None:
        ids, times, has_entries = self._step.padded_lists(self._places, self._slots)
        at = self._starts + ids
        flat = logits.numpy().reshape(-1)
        before = x = flat[at]
        x = np.where(x > 0, x / self._repetition, x * self._repetition)
        x -= self._frequency * times
        x -= self._presence * (times > 0)
        flat[at] = np.where(has_entries, x, before)  # equal places get equal values

    def on_sampled(self, token_ids: Tensor) -> None:
        self._step.add_tokens(self._places, self._slots, token_ids.numpy()[self._rows])

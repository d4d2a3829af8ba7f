"""Repetition, frequency and presence penalties.

    repetition  logit / r if positive, * r if not: once for each token of prompt or output
    frequency   logit - f * (times in the output)
    presence    logit - p if in the output

The one idea: what was seen is a short list of (token, times), not a table over the vocabulary. Only
slots that ask have one, and it learns each draw. This is the CPU's way, in numpy, which is 3 times
faster than torch at this size; a GPU's is quire.sampling.steps.counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from quire.core.types import Sequence as Seq
from quire.sampling.steps.base import Batch, Edit

Array = np.ndarray[Any, Any]

STEP = 256
"""Lists grow by this many places."""


class Penalties:
    """`ids[p, :known[p]]` are the distinct tokens seen by the sequence of place p, and
    `times[p, :known[p]]` how often it has output each.
    """

    def __init__(self, vocab: int, max_seqs: int) -> None:
        self._vocab = vocab
        self._most = max_seqs
        self.places: dict[int, int] = {}  # slot -> place
        self.factors: dict[int, tuple[float, float, float]] = {}  # slot -> repetition, ...
        self._free: list[int] = []
        self._need: dict[int, int] = {}  # slot -> entries it may have, an upper bound
        self._known = np.zeros(0, np.int64)
        self._ids = np.zeros((0, 0), np.int64)
        self._times = np.zeros((0, 0), np.float32)

    def join(self, slot: int, seq: Seq, tokens: list[int]) -> None:
        self.leave(slot)
        p = seq.request.params
        factors = (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
        if factors == (1.0, 0.0, 0.0):
            return
        times = dict.fromkeys(tokens[: seq.prompt_len], 0)
        times.update(Counter(tokens[seq.prompt_len :]))
        # Prompts may hold ids the model reads but never makes (placeholders of media).
        times = {i: n for i, n in times.items() if i < self._vocab} or {0: 0}
        if not self._free:
            self._add_places()
        place = self._free.pop()
        self.places[slot], self.factors[slot], self._need[slot] = place, factors, len(times)
        self._widen(len(times))
        self._known[place] = len(times)
        self._ids[place, : len(times)] = list(times)
        self._times[place, : len(times)] = list(times.values())

    def leave(self, slot: int) -> None:
        if slot in self.places:
            self._free.append(self.places.pop(slot))
            del self.factors[slot], self._need[slot]

    def holds(self, slot: int) -> bool:
        return slot in self.places

    def edit(self, batch: Batch) -> Edit | None:
        rows = batch.of(self.places)
        return _Punish(self, batch, rows) if rows else None

    def _add_places(self) -> None:
        had = len(self._known)
        more = min(max(4, had), self._most - had)
        self._free.extend(range(had, had + more))
        self._known = self._grown(self._known, had + more)
        self._resize(had + more, self._ids.shape[1])

    def _widen(self, entries: int) -> None:
        if entries > self._ids.shape[1]:
            self._resize(len(self._ids), -(-entries // STEP) * STEP)

    def _resize(self, places: int, width: int) -> None:
        self._ids = self._grown(self._ids, places, width)
        self._times = self._grown(self._times, places, width)

    def _grown(self, old: Array, *shape: int) -> Array:
        new = np.zeros(shape, old.dtype)
        new[tuple(slice(0, n) for n in old.shape)] = old
        return new

    def view(self, places: Array, slots: list[int]) -> tuple[Array, Array]:
        """The lists of these slots as [n, C] ids, times; shorter ones repeat their first entry.

        So whatever is computed for the repeats is what is computed for the first entry.
        """
        width = max(self._need[slot] for slot in slots)
        ids, times = self._ids[places, :width], self._times[places, :width]
        live = np.arange(width) < self._known[places][:, None]
        return np.where(live, ids, ids[:, :1]), np.where(live, times, times[:, :1])

    def count(self, places: Array, slots: list[int], tokens: Array) -> None:
        """One more output of each slot: tokens [n]."""
        for slot in slots:
            self._need[slot] += 1
        width = max(self._need[slot] for slot in slots)
        self._widen(width)
        known, columns = self._known[places][:, None], np.arange(width)
        ids, times = self._ids[places, :width], self._times[places, :width]
        here = (ids == tokens[:, None]) & (columns < known)
        new = ~here.any(-1)[:, None]
        here |= new & (columns == known)
        self._times[places, :width] = np.where(new & here, 0.0, times) + here
        self._ids[places, :width] = np.where(here, tokens[:, None], ids)
        self._known[places] = known[:, 0] + new[:, 0]


class _Punish(Edit):
    def __init__(self, step: Penalties, batch: Batch, rows: list[tuple[int, int]]) -> None:
        self._step = step
        self._slots = [slot for _, slot in rows]
        self._rows = np.array([row for row, _ in rows])
        self._starts = self._rows[:, None] * batch.vocab
        self._places = np.array([step.places[slot] for slot in self._slots])
        factors = np.array([step.factors[slot] for slot in self._slots], np.float32)
        self._repetition, self._frequency, self._presence = (factors[:, i, None] for i in range(3))

    def apply(self, logits: Tensor, positions: Sequence[int], errors: dict[int, str]) -> None:
        ids, times = self._step.view(self._places, self._slots)
        at = self._starts + ids
        flat = logits.numpy().reshape(-1)
        x = flat[at]
        x = np.where(x > 0, x / self._repetition, x * self._repetition)
        x -= self._frequency * times
        x -= self._presence * (times > 0)
        flat[at] = x  # equal places get equal values

    def drawn(self, token_ids: Tensor) -> None:
        self._step.count(self._places, self._slots, token_ids.numpy()[self._rows])

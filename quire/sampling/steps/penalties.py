"""Repetition, frequency and presence penalties.

    repetition  logit / r if positive, * r if not: once for each token of prompt or output
    frequency   logit - f * (times in the output)
    presence    logit - p if in the output

The one idea: what was seen is a short list of (token, times), not a table over the vocabulary. A
slot's list lives on the device and learns each draw there, because the host may not know it yet.
Only slots that ask have one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.core.types import Sequence as Seq
from quire.sampling.steps.base import Batch, Edit

STEP = 256
"""Lists grow by this many places."""


class Penalties:
    """`ids[p, :known[p]]` are the distinct tokens seen by the sequence of place p, and
    `times[p, :known[p]]` how often it has output each.
    """

    def __init__(self, vocab: int, max_seqs: int, device: torch.device) -> None:
        self._vocab = vocab
        self._places: dict[int, int] = {}  # slot -> place
        self._free: list[int] = []
        self._most = max_seqs
        self._factors: dict[int, tuple[float, float, float]] = {}
        self._known = torch.zeros(0, dtype=torch.int64, device=device)  # [places] entries in use
        self._ids = torch.zeros((0, 0), dtype=torch.int64, device=device)
        self._times = torch.zeros((0, 0), dtype=torch.int64, device=device)
        self._need: dict[int, int] = {}  # slot -> entries it may have, an upper bound

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
        self._factors[slot], self._need[slot] = factors, len(times)
        place = self._places[slot] = self._free.pop()
        self._widen(len(times))
        self._write(place, times)

    def _add_places(self) -> None:
        had = len(self._known)
        more = min(max(4, had), self._most - had)
        self._free.extend(range(had, had + more))
        grown = [torch.cat([t, t.new_zeros(more, *t.shape[1:])]) for t in self._state()]
        self._known, self._ids, self._times = grown

    def _state(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._known, self._ids, self._times

    def _widen(self, entries: int) -> None:
        more = -(-entries // STEP) * STEP - self._ids.shape[1]
        if more > 0:
            self._ids, self._times = (
                torch.cat([t, t.new_zeros(len(t), more)], 1) for t in (self._ids, self._times)
            )

    def _write(self, place: int, times: dict[int, int]) -> None:
        self._known[place] = len(times)
        self._ids[place, : len(times)] = self._ids.new_tensor(list(times))
        self._times[place, : len(times)] = self._times.new_tensor(list(times.values()))

    def leave(self, slot: int) -> None:
        if slot in self._places:
            self._free.append(self._places.pop(slot))
            del self._factors[slot], self._need[slot]

    def edit(self, batch: Batch) -> Edit | None:
        rows = batch.of(self._places)
        return _Punish(self, batch, rows) if rows else None

    def view(self, places: Tensor, slots: list[int]) -> tuple[Tensor, Tensor]:
        """The lists of these slots as [n, C] ids, times; shorter ones repeat their first entry.

        So whatever is computed for the repeats is what is computed for the first entry.
        """
        width = max(self._need[slot] for slot in slots)
        ids, times = self._ids[places, :width], self._times[places, :width]
        live = torch.arange(width, device=ids.device) < self._known[places][:, None]
        return torch.where(live, ids, ids[:, :1]), torch.where(live, times, times[:, :1])

    def count(self, places: Tensor, slots: list[int], token_ids: Tensor) -> None:
        """One more output of each slot: token_ids [n]."""
        for slot in slots:
            self._need[slot] += 1
        width = max(self._need[slot] for slot in slots)
        self._widen(width)
        known = self._known[places][:, None]
        column = torch.arange(width, device=known.device)
        here = (self._ids[places, :width] == token_ids[:, None]) & (column < known)
        new = ~here.any(-1, keepdim=True)
        here |= new & (column == known)
        fresh = new & here
        self._times[places, :width] = torch.where(fresh, 0, self._times[places, :width]) + here
        self._ids[places, :width] = torch.where(here, token_ids[:, None], self._ids[places, :width])
        self._known[places] = known[:, 0] + new[:, 0]


class _Punish(Edit):
    def __init__(self, step: Penalties, batch: Batch, rows: list[tuple[int, int]]) -> None:
        self._step = step
        self._slots = [slot for _, slot in rows]
        self._rows = batch.tensor([row for row, _ in rows])
        self._starts = self._rows[:, None] * batch.vocab
        self._places = batch.tensor([step._places[slot] for slot in self._slots])
        factors = [step._factors[slot] for slot in self._slots]
        self._repetition, self._frequency, self._presence = (
            batch.tensor([float(f[i]) for f in factors])[:, None] for i in range(3)
        )

    def apply(self, logits: Tensor, positions: Sequence[int], errors: dict[int, str]) -> None:
        ids, times = self._step.view(self._places, self._slots)
        at = self._starts + ids
        flat = logits.view(-1)
        x = flat[at]
        x = torch.where(x > 0, x / self._repetition, x * self._repetition)
        x -= self._frequency * times
        x -= self._presence * (times > 0)
        flat[at] = x  # equal places get equal values

    def drawn(self, token_ids: Tensor) -> None:
        self._step.count(self._places, self._slots, token_ids[self._rows])

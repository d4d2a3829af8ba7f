"""Time stamps: what of them may come next, by the rules of core.types.TimeRules.

The last outputs that the rules read are held on the device, so that they work while only the device
has the newest token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quire.core.types import TimeRules
from quire.sampling.h2d import to_device
from quire.sampling.slot_join import SlotJoin
from quire.sampling.steps.base import LogitsEdit, SlotBatch


class TimeStamps:
    """request.forced.times. `_state` of a slot: whether the last output and the one before it are
    time stamps (1 where there is none), and the last time stamp, or -1."""

    reads_outputs: ClassVar = True

    def __init__(self, max_seqs: int, device: torch.device) -> None:
        self._rules: dict[int, TimeRules] = {}
        self._state = torch.zeros((max_seqs, 3), dtype=torch.int64, device=device)

    def join(self, joined: SlotJoin) -> None:
        self._rules.pop(joined.slot, None)
        if joined.forced is None or joined.forced.times is None:
            return
        rules = self._rules[joined.slot] = joined.forced.times
        state = [1, 1, -1]
        for token in joined.output_tokens:
            stamp = token >= rules.first_time
            state = [int(stamp), state[0], token if stamp else state[2]]
        self._state[joined.slot] = to_device(state, self._state.device)

    def leave(self, slot: int) -> None:
        self._rules.pop(slot, None)

    def applies_to(self, slot: int) -> bool:
        return slot in self._rules

    def build_edit(self, batch: SlotBatch) -> LogitsEdit | None:
        rows = batch.rows_in(self._rules)
        if not rows:
            return None
        return _TimeStampsEdit(
            self._state,
            batch.tensor([row for row, _ in rows]).long(),
            batch.tensor([slot for _, slot in rows]).long(),
            [row for row, _ in rows],
            self._rules[rows[0][1]],  # a model has one set of rules
        )


@dataclass(slots=True)
class _TimeStampsEdit(LogitsEdit):
    state: Tensor  # [slots, 3], shared with the step
    rows: Tensor  # [n] of the logits
    slots: Tensor  # [n]
    host_rows: list[int]
    rules: TimeRules

    def apply(self, logits: Tensor, positions: Sequence[int], errors: dict[int, str]) -> None:
        rules, device = self.rules, logits.device
        last, before, newest = self.state[self.slots, :, None].unbind(1)  # each [n, 1]
        first = to_device([float(positions[row] == 0) for row in self.host_rows], device)
        begins = first[:, None] > 0
        ids = torch.arange(logits.shape[1], device=device)[None]
        stamps = ids >= rules.first_time
        ends_pair, opens_pair = ~begins & (last * before > 0), last > before
        banned = (ids == rules.no_times) | (ends_pair & stamps) | (opens_pair & (ids < rules.end))
        earliest = torch.where(opens_pair, newest, newest + 1)
        banned |= (newest >= 0) & stamps & (ids < earliest)
        latest = rules.first_time + rules.last_first
        banned |= begins & (~stamps | (ids > latest))
        scores = logits[self.rows].masked_fill(banned, -torch.inf)
        total = scores[:, rules.first_time :].logsumexp(-1, keepdim=True)
        best = scores[:, : rules.first_time].amax(-1, keepdim=True)
        scores.masked_fill_((total > best) & ~stamps, -torch.inf)
        logits[self.rows] = scores

    def on_sampled(self, token_ids: Tensor) -> None:
        new = token_ids[self.rows].long()
        stamp = new >= self.rules.first_time
        last, _, newest = self.state[self.slots].unbind(1)
        newest = torch.where(stamp, new, newest)
        self.state[self.slots] = torch.stack((stamp.long(), last, newest), 1)

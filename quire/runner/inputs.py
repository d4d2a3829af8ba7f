"""Turns a plan into the tensors of one forward pass.

Two halves, because steps overlap: `gather` reads the scheduler's objects and the slots on the
engine's thread and copies what it needs; `Inputs.tensors` is used later, when the step before has
left its tokens in `last_token`. Nothing here is written after the forward pass has started.

Axes: T tokens in the step, S rows, W blocks of the longest context, R sampled rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.attention.base import Batch
from quire.core.types import NO_BLOCK, UNKNOWN, StepPlan
from quire.runner.slots import Slots

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Inputs:
    """One step's inputs on the host, complete but for tokens a step in flight has yet to yield."""

    token_ids: Ints  # [T], UNKNOWN where `late` says so
    late: Longs  # indexes into token_ids that take the slot's last token
    late_slots: Longs  # their slots
    positions: Ints  # [T]
    q_starts: Ints  # [S + 1]
    contexts: Ints  # [S]
    tables: tuple[Ints, ...]  # per group [S, W]
    kv_slots: tuple[Longs, ...]  # per group [T]: block * block_size + offset
    sampled: Longs  # [R] indexes into the T tokens
    sampled_rows: tuple[int, ...]  # [R] indexes into plan.rows
    sampled_slots: tuple[int, ...]  # [R]
    outputs: tuple[int, ...]  # [R] tokens each sequence has put out already
    decode_only: bool  # every row is one token and is sampled

    def batch(self) -> Batch:
        """The attention backend's view of the step."""
        counts = np.diff(self.q_starts)
        return Batch(
            q_starts=torch.from_numpy(self.q_starts),
            contexts=torch.from_numpy(self.contexts),
            tables=tuple(torch.from_numpy(t) for t in self.tables),
            slots=tuple(torch.from_numpy(s) for s in self.kv_slots),
            max_query=int(counts.max()),
            max_context=int(self.contexts.max()),
        )


def gather(plan: StepPlan, slots: Slots, block_size: int) -> Inputs:
    """Copy everything step `plan` needs. The plan has rows."""
    rows = plan.rows
    row_slots = np.array([row.seq.slot for row in rows], dtype=np.int64)
    starts = np.array([row.start for row in rows], dtype=np.int32)
    counts = np.array([row.count for row in rows], dtype=np.int32)
    q_starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(counts, out=q_starts[1:])
    contexts = starts + counts
    decode_only = int(q_starts[-1]) == len(rows) and all(row.samples for row in rows)
    if decode_only:
        positions, row_of = starts, np.arange(len(rows))
    else:
        row_of = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(q_starts[-1], dtype=np.int32) - q_starts[row_of] + starts[row_of]
    token_ids, late = _tokens(plan, q_starts)
    tables, kv_slots = _tables(slots, row_slots, row_of, positions, contexts, block_size)
    sampled_rows = tuple(i for i, row in enumerate(rows) if row.samples)
    return Inputs(
        token_ids=token_ids,
        late=late,
        late_slots=row_slots[row_of[late]],
        positions=positions.astype(np.int32, copy=False),
        q_starts=q_starts,
        contexts=contexts.astype(np.int32, copy=False),
        tables=tables,
        kv_slots=kv_slots,
        sampled=q_starts[1:][list(sampled_rows)].astype(np.int64) - 1,
        sampled_rows=sampled_rows,
        sampled_slots=tuple(rows[i].seq.slot for i in sampled_rows),
        outputs=tuple(contexts[i] - rows[i].seq.prompt_len for i in sampled_rows),
        decode_only=decode_only,
    )


def _tokens(plan: StepPlan, q_starts: Ints) -> tuple[Ints, Longs]:
    """[T] token ids, and where a step in flight still owes one."""
    ids: list[int] = []
    for seq, start, count, _ in plan.rows:
        ids.extend(seq.tokens[start : start + count] if count > 1 else (seq.tokens[start],))
    token_ids = np.array(ids, dtype=np.int32)
    assert len(token_ids) == q_starts[-1], (len(token_ids), q_starts[-1])
    return token_ids, np.nonzero(token_ids == UNKNOWN)[0]


def _tables(
    slots: Slots,
    row_slots: Longs,
    row_of: Longs,
    positions: Ints,
    contexts: Ints,
    block_size: int,
) -> tuple[tuple[Ints, ...], tuple[Longs, ...]]:
    width = -(-int(contexts.max()) // block_size)
    tables, kv_slots = [], []
    blocks, offsets = positions // block_size, positions % block_size
    for whole in slots.tables:
        table = whole[row_slots, :width]  # fancy indexing copies: the slots may change meanwhile
        block = table[row_of, blocks].astype(np.int64)
        assert (block != NO_BLOCK).all(), "a token to compute has no block"
        tables.append(table)
        kv_slots.append(block * block_size + offsets)
    return tuple(tables), tuple(kv_slots)

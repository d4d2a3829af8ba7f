"""The batches of a drafter's passes: the tokens of a step that are in the sequences now, then one
token a row.

A head, which reads the target's states, has the token t[i + 1] at position i: the one behind the
state. A model of its own has it at position i + 1, and needs the tokens before that it was never
given: the first of a prompt, or of a row after a prefix hit.

Axes: T tokens of the step, n tokens of the first pass, m rows with drafts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.core.types import UNKNOWN
from quire.runner.step_batch import EMPTY_BATCH, Ints, StepBatch

Indexes = npt.NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, slots=True)
class FirstPass:
    """The first pass, and the places from which chains continue."""

    batch: StepBatch  # of n tokens
    at: Indexes  # [n] indexes into the T tokens of the step
    ends: Indexes  # [m] indexes into the n tokens: the last of each row with drafts
    rows: tuple[int, ...]  # [m] of the plan
    most: Ints  # [m] drafts, whose positions have blocks and angles


@dataclass(frozen=True, slots=True)
class PassLimits:
    """What bounds the positions of a drafter's passes."""

    block_size: int
    max_len: int  # positions that the drafter has


def build_first_pass(
    batch: StepBatch,
    ids: Sequence[int],
    kept: Sequence[int],
    limits: PassLimits,
    given: Ints | None = None,
) -> FirstPass | None:
    """Return the pass over all tokens of a step that are in their sequences now; None: there are
    none. Sequences without drafts are in it too: others may find their blocks by prefix.

    ids: [R] sampled tokens. kept: the accepted ones. given: [slots] leading tokens that a model of
    its own was given, which is updated; None: of a head.
    """
    inputs = batch.draft_inputs
    assert inputs is not None, "the batch was built without inputs of drafters"
    shift = 0 if given is None else 1
    owner = np.repeat(np.arange(len(batch.rows)), np.diff(batch.q_starts))  # [T] row of the batch
    following = batch.following_tokens
    following[batch.sampled_tokens] = np.asarray(ids, dtype=np.int32)
    is_end, used = np.zeros(len(owner), dtype=bool), np.ones(len(owner), dtype=bool)
    used[batch.sampled_tokens] = False
    used[batch.sampled_tokens[list(kept)]] = True
    last_of_row = {batch.sampled_rows[i]: i for i in kept}
    is_end[batch.sampled_tokens[list(last_of_row.values())]] = True
    is_end &= (inputs.most > 0)[owner]
    room = np.minimum(inputs.blocks * limits.block_size, limits.max_len)[owner]
    used &= (following != UNKNOWN) & (batch.positions + shift < room)
    at = np.flatnonzero(used)
    if not len(at):
        return None
    plan_rows = np.asarray(batch.rows)[owner]
    starts = np.flatnonzero(np.diff(plan_rows[at], prepend=-1))
    tokens, positions = following[at], batch.positions[at] + np.int32(shift)
    lengths = np.diff(starts, append=len(at))
    if given is not None:  # which rows lack the token before
        lacks = given[batch.token_slots[at[starts]]] != batch.positions[at[starts]] + 1
        places = starts[lacks]
        lacking = at[places]
        tokens = np.insert(tokens, places, np.maximum(batch.token_ids[lacking], 0))
        positions = np.insert(positions, places, batch.positions[lacking])
        lengths += lacks
        at = np.insert(at, places, lacking)
        last = np.cumsum(lengths) - 1
        given[batch.token_slots[at[last]]] = positions[last] + 1
    several = lengths > 1
    moved = np.argsort(np.repeat(several, lengths), kind="stable")  # rows of one token come first
    at, lengths = at[moved], lengths[np.argsort(several, kind="stable")]
    made = batch_of_rows(tokens[moved], positions[moved], batch.token_slots[at], lengths)
    ends = np.cumsum(lengths) - 1
    ends = ends[is_end[at[ends]]]
    most = np.minimum(inputs.most[owner[at[ends]]], room[at[ends]] - made.positions[ends])
    return FirstPass(made, at, ends, tuple(plan_rows[at[ends]].tolist()), most)


def batch_of_rows(
    tokens: Indexes, positions: Indexes, token_slots: Ints, lengths: Indexes
) -> StepBatch:
    """Return a batch of rows of these lengths, those of one token first."""
    q_starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=q_starts[1:])
    ends = q_starts[1:] - 1
    contexts = (positions[ends] + 1).astype(np.int32)
    return replace(
        EMPTY_BATCH,
        rows=range(len(lengths)),
        slots=token_slots[ends],
        token_ids=tokens.astype(np.int32),
        token_slots=token_slots,
        positions=positions.astype(np.int32),
        q_starts=q_starts,
        contexts=contexts,
        num_decodes=int((lengths == 1).sum()),
        max_query=int(lengths.max()),
        max_context=int(contexts.max()),
    )


def batch_behind(first: FirstPass, rows: Indexes, count: int) -> StepBatch:
    """Return the batch of one token each, `count` positions behind the first pass.

    rows: indexes into the m rows with drafts.
    """
    ends = first.ends[rows]
    positions = first.batch.positions[ends] + np.int32(count)
    ones = np.ones(len(rows), dtype=np.int32)
    return batch_of_rows(ones, positions, first.batch.token_slots[ends], ones)

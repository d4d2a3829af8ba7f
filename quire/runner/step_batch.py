"""Step batch: the numbers of one forward pass, gathered from a plan on the host.

The rows of one token come first ("decodes"), the others after them, each kind in the plan's order.
A row with drafts is as many rows of one token of the same slot: each attends to the tokens before
it, whose keys the step has written by then, and each is sampled. So a step of such rows is like any
other decode step. Nothing here refers to the scheduler's objects, which change later; block tables
are on the device. A token that a step in flight will yield is UNKNOWN: the device has it.

Axes: T tokens in the step, S rows, R sampled rows.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.core.types import Row, StepPlan, Wants

Ints = npt.NDArray[np.int32]


class DraftInputs(NamedTuple):
    """What a model drafter reads of the S rows of a batch."""

    next_tokens: Ints  # [S] known token behind the row's last one; -1: the step samples it
    blocks: Ints  # [S] block table entries that the row has, in every group
    most: Ints  # [S] drafts of the sequence; 0: it has none, ever


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's inputs. The arrays are this step's own."""

    rows: Seq[int]  # [S] indexes into plan.rows; of a row with drafts several
    slots: Ints  # [S]
    token_ids: Ints  # [T], UNKNOWN: the last token of the slot; of `continued` ones: codes
    token_slots: Ints  # [T]
    positions: Ints  # [T]
    q_starts: Ints  # [S + 1]
    contexts: Ints  # [S]
    sampled_tokens: Ints  # [R] indexes into the T tokens
    sampled_rows: Seq[int]  # [R] indexes into plan.rows
    sampled_slots: tuple[int, ...]  # [R]
    num_outputs: Ints  # [R] tokens each sequence has put out already
    num_decodes: int  # leading rows of one token, drafts included
    max_query: int
    max_context: int
    decode_only: bool  # every row is one token and is sampled
    next_drafts: Seq[int] = ()
    """[R] the draft behind each sampled token, -1 behind a row's last; () if no row has drafts."""
    agreement: Seq[bool] = ()
    """[R] whether a benchmark takes the draft behind a token as accepted; (): tokens decide."""
    may_have_prompts: bool = True  # False: no row computes a position of a prompt
    rotary: Ints | None = None
    """[T], or [axes * T]: rotary positions, axis by axis; None: they are those in the sequence."""
    draft_inputs: DraftInputs | None = None  # None: no model drafts, or not in this step
    continued: int = 0
    """The first tokens, so many, are of rows that start behind what rows of the step before yield.
    Positions, contexts and outputs are those if these yield one token; token ids, and drafts, are
    codes of ahead_code(). Each is a row of the batch, and is sampled."""

    @property
    def uses_drafts(self) -> bool:
        """Whether rows have drafts, or a model makes some behind them."""
        return bool(self.next_drafts) or self.draft_inputs is not None

    @property
    def row_ends(self) -> Ints:
        """[S] the last token of each row, as an index into the T tokens."""
        return self.q_starts[1:] - 1

    @property
    def sampled_row_indexes(self) -> npt.NDArray[np.intp]:
        """[R] of each sampled token, its row as an index into the S rows."""
        return np.searchsorted(self.q_starts, self.sampled_tokens, side="right") - 1

    @property
    def following_tokens(self) -> Ints:
        """[T] the token behind each in its row, with draft_inputs also behind the row. Behind a
        sampled token it may be a draft, or -1."""
        assert self.draft_inputs is not None, "the batch was built without inputs of drafters"
        following = np.append(self.token_ids[1:], 0).astype(np.int32)
        following[self.row_ends] = self.draft_inputs.next_tokens
        return following

    @property
    def rotary_positions(self) -> Ints:
        """[T], or [axes, T] if the axes differ."""
        if self.rotary is None:
            return self.positions
        tokens = len(self.positions)
        return self.rotary if len(self.rotary) == tokens else self.rotary.reshape(-1, tokens)

    @property
    def has_axes(self) -> bool:
        """Whether tokens have a rotary position per axis."""
        return self.rotary is not None and len(self.rotary) != len(self.positions)

    @property
    def max_prior_context(self) -> int:
        """Maximum of tokens that a row of several has before this step's."""
        if self.num_decodes == len(self.slots):
            return 0
        before = self.contexts - np.diff(self.q_starts)
        return int(before[self.num_decodes :].max(initial=0))

    def agrees(self, i: int, token: int) -> bool:
        """Whether the draft behind sampled token i is accepted. token: what was sampled there."""
        draft = self.next_drafts[i]
        return draft >= 0 and (self.agreement[i] if self.agreement else token == draft)

    def accepted(self, ids: Seq[int], ends: Container[int] = ()) -> Seq[int]:
        """Which of the R sampled tokens are accepted: a row's first, and each after drafts that
        agree. ends: those of the R that have none after them, because their sequence ends."""
        if not self.next_drafts:
            return range(len(ids))
        kept: list[int] = []
        row, agree = -1, False
        for i, own in enumerate(self.sampled_rows):
            if own != row or agree:
                kept.append(i)
                agree = i not in ends and self.agrees(i, ids[i])
            row = own
        return kept


AHEAD_ROWS = 4096
"""More than a step with drafts has rows."""


def ahead_code(row: int, place: int) -> int:
    """Return the code of a token in a batch that continues another.

    row: of the plan of the step before. place: 0 is the last token that it yields, j the j-th draft
    that a model made behind that.
    """
    return -2 - (place * AHEAD_ROWS + row)


def ahead_place(code: int) -> tuple[int, int]:
    """Return row and place of a code."""
    place, row = divmod(-2 - code, AHEAD_ROWS)
    return row, place


def build_step_batch(
    plan: StepPlan,
    *,
    has_rotary: bool = False,
    drafts: int = 0,
    synthetic: tuple[float, ...] | None = None,
) -> StepBatch:
    """Copy what the forward pass of a plan with rows needs, without block tables.

    has_rotary: sequences may have rotary positions that are not those of their tokens. drafts: that
    a model proposes for a row at most; 0: none does. synthetic: acceptance by position, of a
    benchmark.
    """
    seqs, starts, counts, wants, row_drafts = zip(*plan.rows)
    continued = [
        [ahead_code(row, place) for place in range(1 + count)]
        for row, count in zip(plan.continues, row_drafts)
    ]
    if continued and len(continued) == len(seqs):
        first, drafts_of = [ids[0] for ids in continued], [tuple(ids[1:]) for ids in continued]
        batch = _build_draft_batch(seqs, starts, first, drafts_of)
    elif continued or wants.count(Wants.TOKEN) != len(wants):
        batch = _build_mixed_batch(plan.rows, continued)
    elif counts.count(1) == len(counts):
        batch = _build_decode_batch(seqs, starts)
    elif sum(counts) == len(counts) + sum(row_drafts):
        drafts_of = [seq.drafts[:count] for seq, count in zip(seqs, row_drafts)]
        assert [*map(len, drafts_of)] == [*row_drafts], (drafts_of, row_drafts)
        first = [seq.tokens[at] for seq, at in zip(seqs, starts)]
        batch = _build_draft_batch(seqs, starts, first, drafts_of)
    else:
        batch = _build_mixed_batch(plan.rows)
    if continued:
        batch = replace(batch, continued=sum(map(len, continued)))
    if has_rotary and any(seq.request.rope_positions for seq in seqs):
        rows = dict.fromkeys(batch.rows)
        batch = replace(batch, rotary=_rotary([plan.rows[i] for i in rows]))
    if drafts and (plan.proposals or not batch.decode_only):
        most = min(drafts, max(plan.proposals, 1))  # without proposals: for the KV of prompts
        inputs = _draft_inputs(plan.rows, most)
        if isinstance(batch.rows, list):  # several of a row of the plan, or in another order
            at = np.array(batch.rows)
            inputs = DraftInputs(inputs.next_tokens[at], inputs.blocks[at], inputs.most[at])
        batch = replace(batch, draft_inputs=inputs)
    if synthetic is not None and batch.next_drafts:
        batch = replace(batch, agreement=_draw_agreement(batch, synthetic))
    return batch


def _draw_agreement(batch: StepBatch, rates: tuple[float, ...]) -> list[bool]:
    """Draw which drafts are accepted: of a row so many that position j is reached as often as
    rates[j] says. The draws depend on slots and positions alone."""
    found: list[bool] = []
    limits, row, at, drawn = (*rates, 0.0), -1, 0, 0.0
    positions = batch.positions[batch.sampled_tokens].tolist()
    for slot, own, position in zip(batch.sampled_slots, batch.sampled_rows, positions):
        if own != row:
            row, at, drawn = own, 0, _uniform((slot << 32) + position)
        found.append(drawn < limits[min(at, len(rates))])
        at += 1
    return found


def _uniform(number: int) -> float:
    """Return a number in [0, 1) that depends on another."""
    for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # of splitmix64
        number = (number ^ (number >> 30)) * factor % 2**64
    return (number >> 11) / 2**53


def _draft_inputs(rows: Seq[Row], drafts: int) -> DraftInputs:
    """Return what a model drafter reads of rows of a plan."""
    next_tokens, blocks, most = [], [], []
    for seq, start, count, wants, _ in rows:
        request, end = seq.request, start + count
        is_chunk = wants is Wants.NOTHING and end < len(seq.tokens)
        next_tokens.append(seq.tokens[end] if is_chunk else -1)
        blocks.append(min(map(len, seq.tables), default=0))
        excluded = request.pooling is not None or request.hold or request.num_beams > 1
        most.append(0 if excluded or not request.speculates else drafts)
    return DraftInputs(*(np.array(of, dtype=np.int32) for of in (next_tokens, blocks, most)))


def _rotary(rows: list[Row]) -> Ints:
    """Return rotary positions of a batch with these rows, as StepBatch.rotary has them."""
    axes = max(len(row.seq.request.rope_positions) // (4 * row.seq.prompt_len) for row in rows)
    pieces = []
    for seq, start, count, _, _ in rows:
        given, prompt = seq.request.rope_positions, seq.prompt_len
        positions = np.arange(start, start + count, dtype=np.int32)
        if given:
            positions += seq.request.rope_delta
        piece = np.broadcast_to(positions, (axes, count))
        if given and start < prompt:
            known = np.frombuffer(given, np.int32).reshape(-1, prompt)[:, start : start + count]
            piece = np.concatenate([known, piece[:, known.shape[1] :]], axis=1)
        pieces.append(piece)
    found = np.concatenate(pieces, axis=1)
    if (found == found[0]).all():
        return np.ascontiguousarray(found[0])
    return found.reshape(-1)


def _build_decode_batch(seqs: tuple, starts: tuple[int, ...]) -> StepBatch:
    """The most frequent step by far: few passes over the rows."""
    rows = range(len(seqs))
    slots = [seq.slot for seq in seqs]
    positions = np.array(starts, dtype=np.int32)
    prompts = np.array([len(seq.request.prompt) for seq in seqs], dtype=np.int32)
    ids = [seq.tokens[at] for seq, at in zip(seqs, starts)]
    return _decode_only(rows, slots, ids, positions, positions + 1 - prompts)


def _build_draft_batch(
    seqs: tuple, starts: tuple[int, ...], first: list[int], drafts_of: Seq[tuple[int, ...]]
) -> StepBatch:
    """A step of rows that decode, of which some have drafts. first: the known token of each."""
    ids: list[int] = []
    behind: list[int] = []
    numbers: list[tuple[int, int, int, int]] = []  # of each token: row, slot, position, outputs
    for i, (seq, start, token, drafts) in enumerate(zip(seqs, starts, first, drafts_of)):
        ids.append(token)
        ids += drafts
        behind += drafts
        behind.append(-1)
        slot, prompt, end = seq.slot, len(seq.request.prompt), start + len(drafts)
        numbers += [(i, slot, at, at + 1 - prompt) for at in range(start, end + 1)]
    rows, slots, positions, num_outputs = np.array(numbers, dtype=np.int32).T.copy()
    return _decode_only(rows.tolist(), slots.tolist(), ids, positions, num_outputs, behind)


def _decode_only(
    rows: Seq[int],
    slots: list[int],
    ids: list[int],
    positions: Ints,
    num_outputs: Ints,
    next_drafts: Seq[int] = (),
) -> StepBatch:
    """A step whose every token is sampled. All: of each token."""
    contexts = positions + 1
    q_starts = np.arange(len(ids) + 1, dtype=np.int32)
    of_tokens = np.array(slots, dtype=np.int32)
    return StepBatch(
        rows=rows,
        slots=of_tokens,
        token_ids=np.array(ids, dtype=np.int32),
        token_slots=of_tokens,
        positions=positions,
        q_starts=q_starts,
        contexts=contexts,
        sampled_tokens=q_starts[:-1],
        sampled_rows=rows,
        sampled_slots=tuple(slots),
        num_outputs=num_outputs,
        num_decodes=len(ids),
        max_query=1,
        max_context=int(contexts.max()),
        decode_only=True,
        next_drafts=next_drafts,
        may_have_prompts=bool(num_outputs.min() <= 0),
    )


def _build_mixed_batch(planned: tuple[Row, ...], continued: Seq[Seq[int]] = ()) -> StepBatch:
    """continued: codes of the tokens of each of the first rows that continue others."""
    ones = [i for i, row in enumerate(planned) if row.count == 1 + row.drafts]
    order = ones + [i for i, row in enumerate(planned) if row.count != 1 + row.drafts]
    rows = [planned[i] for i in order]
    slots, starts, counts, drafts, prompts = np.array(
        [
            (seq.slot, start, count, drafts, len(seq.request.prompt))
            for seq, start, count, _, drafts in rows
        ],
        dtype=np.int32,
    ).T
    ends = np.cumsum(counts, dtype=np.int32)
    row_of = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(ends[-1], dtype=np.int32) + (starts - ends + counts)[row_of]
    token_ids = _gather_token_ids(rows, continued, len(positions))
    queries = np.where(counts == 1 + drafts, counts, 1)  # of each row
    query_rows = np.repeat(np.arange(len(rows)), queries)
    q_starts = np.zeros(len(query_rows) + 1, dtype=np.int32)
    np.cumsum((counts // queries)[query_rows], out=q_starts[1:])
    results = np.where([row.wants is Wants.TOKEN for row in rows], 1 + drafts, 0)  # of each row
    sampled = np.repeat(np.arange(len(rows)), results)
    behind = np.cumsum(results)[sampled] - np.arange(len(sampled)) - 1  # drafts of the row
    at = (ends[sampled] - behind - 1).astype(np.int32)
    next_drafts = np.where(behind > 0, token_ids[np.minimum(at + 1, len(token_ids) - 1)], -1)
    numbers = np.array(order)
    return StepBatch(
        rows=numbers[query_rows].tolist(),
        slots=slots[query_rows],
        token_ids=token_ids,
        token_slots=slots[row_of],
        positions=positions,
        q_starts=q_starts,
        contexts=positions[q_starts[1:] - 1] + 1,
        sampled_tokens=at,
        sampled_rows=numbers[sampled].tolist(),
        sampled_slots=tuple(slots[sampled].tolist()),
        num_outputs=positions[at] + 1 - prompts[sampled],
        num_decodes=int(queries[: len(ones)].sum()),
        max_query=int(np.diff(q_starts).max()),
        max_context=int((starts + counts).max()),
        decode_only=len(at) == len(positions) == len(query_rows),
        next_drafts=next_drafts.tolist() if drafts.any() else (),
        may_have_prompts=bool((starts < prompts).any()),
    )


def _gather_token_ids(rows: list[Row], continued: Seq[Seq[int]], total: int) -> Ints:
    ids: list[int] = [*chain.from_iterable(continued)]
    for seq, start, count, _, drafts in rows[len(continued) :]:
        ids.extend(
            seq.tokens[start : start + count - drafts] if count > 1 else (seq.tokens[start],)
        )
        if drafts:
            ids.extend(seq.drafts[:drafts])
    assert len(ids) == total, (len(ids), total)
    return np.array(ids, dtype=np.int32)


_NO_INTS: Ints = np.zeros(0, dtype=np.int32)
EMPTY_BATCH = StepBatch(
    rows=(),
    slots=_NO_INTS,
    token_ids=_NO_INTS,
    token_slots=_NO_INTS,
    positions=_NO_INTS,
    q_starts=np.zeros(1, dtype=np.int32),
    contexts=_NO_INTS,
    sampled_tokens=_NO_INTS,
    sampled_rows=(),
    sampled_slots=(),
    num_outputs=_NO_INTS,
    num_decodes=0,
    max_query=0,
    max_context=0,
    decode_only=False,
)
"""A step without rows."""

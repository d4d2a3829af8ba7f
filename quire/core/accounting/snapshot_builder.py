"""Snapshot builder: describes the engine between two steps as a Snapshot. It is read-only."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import islice
from typing import TypeVar

from quire.core.accounting.time_accounting import TimeAccounting
from quire.core.scheduling.scheduler import Scheduler
from quire.core.snapshot import (
    AdapterStats,
    AdmissionStats,
    ExpertBalanceStats,
    GrammarStats,
    LateWorkCounts,
    MediaStats,
    RequestRow,
    Snapshot,
)
from quire.core.types import NO_BLOCK, UNKNOWN, Sequence, SequenceState

F = TypeVar("F")

_STATES = {state: state.name.lower() for state in SequenceState}
MOST_ROWS = 65_534
"""The map has two bytes per block, which limits the number of distinct rows."""


def build_snapshot(
    scheduler: Scheduler,
    accounting: TimeAccounting,
    *,
    at: float,
    most: int,
    blocks: bool,
    late_work: LateWorkCounts = LateWorkCounts(),  # noqa: B008 - an immutable value
    experts: ExpertBalanceStats = ExpertBalanceStats(),  # noqa: B008
) -> Snapshot:
    """Return a snapshot at time `at` with at most `most` rows, and with the block map if wanted."""
    sequences = list(islice(scheduler.sequences(), max(0, min(most, MOST_ROWS))))
    states = scheduler.block_map() if blocks else b""
    stats = scheduler.limit_stats()
    return Snapshot(
        at=at,
        stats=scheduler.stats(),
        preempted=accounting.num_preempted,
        max_seqs=scheduler.max_seqs,
        block_size=scheduler.block_size,
        counters=accounting.counters()._replace(draft_counts=scheduler.draft_counts),
        rows=[_row(seq, at - accounting.accepted_at(seq)) for seq in sequences],
        block_states=states,
        block_owners=_block_owners(sequences, len(states), scheduler.num_ranks) if blocks else b"",
        grammars=_stats_of_type(stats, GrammarStats),
        admission=_stats_of_type(stats, AdmissionStats),
        late_work=late_work,
        adapters=_stats_of_type(stats, AdapterStats),
        experts=experts,
        media=_stats_of_type(stats, MediaStats),
    )


def _stats_of_type(stats: list[object], kind: type[F]) -> F:
    """Return the given stats of this type, or empty stats if there are none."""
    return next((one for one in stats if isinstance(one, kind)), kind())


def _row(seq: Sequence, seconds: float) -> RequestRow:
    """Describe one sequence. Hundreds per snapshot: positional arguments, few calls, for speed."""
    prompt, tokens = seq.prompt_len, seq.tokens
    unknown = _num_unknown(tokens) if tokens[-1] == UNKNOWN else 0
    blocks = 0
    for table in seq.tables:
        blocks += len(table) - table.count(NO_BLOCK)
    return RequestRow(
        seq.request.id,
        seq.index,
        "preempted"
        if seq.preemptions and seq.state is SequenceState.WAITING
        else _STATES[seq.state],
        prompt,
        seq.cached,
        seq.computed,
        len(tokens) - unknown - prompt,
        blocks,
        seq.preemptions,
        seconds,
    )


def _num_unknown(tokens: list[int]) -> int:
    """Count the tokens at the end that steps in flight will produce."""
    count = 0
    while tokens[-1 - count] == UNKNOWN:
        count += 1
    return count


def _block_owners(sequences: Iterable[Sequence], blocks: int, ranks: int) -> bytes:
    """Number (from 1) of the first sequence of `shown` that has each block; 0 for none."""
    owners = array("H", bytes(2 * blocks))
    for number, seq in reversed(list(enumerate(sequences, 1))):
        first = seq.dp_rank * (blocks // ranks)
        for table in seq.tables:
            for block in [b for b in table if b >= 0] if NO_BLOCK in table else table:
                owners[first + block] = number
    return owners.tobytes()

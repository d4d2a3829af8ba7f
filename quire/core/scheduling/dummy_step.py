"""Dummy step: plans one token of each rank that belongs to no request, to check that steps work."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from quire.core.kv.kv_cache import KVCache
from quire.core.params import SamplingParams
from quire.core.scheduling.plan_builder import RankMoves, divide_plan
from quire.core.scheduling.sequence_registry import SequenceRegistry
from quire.core.types import (
    UNKNOWN,
    Request,
    Row,
    Sequence,
    SequenceState,
    StateMoves,
    StepPlan,
    StopConditions,
    Wants,
)

DUMMY_REQUEST = Request("", (0,), StopConditions(max_tokens=1), SamplingParams(temperature=0.0))


def build_dummy_step(
    kvs: Seq[KVCache], registry: SequenceRegistry, number: int, request: Request
) -> StepPlan | None:
    """Build the step, with one slot and one block per table of each rank. None: a rank has no block
    free. No slot is in use.

    request: of one token, such as DUMMY_REQUEST; it is in no queue.
    """
    if any(kv.pool.available < len(kv.specs) for kv in kvs):
        return None
    wants, unknown = (Wants.TOKEN, [UNKNOWN]) if request.pooling is None else (Wants.POOLED, [])
    rows = []
    for rank, kv in enumerate(kvs):
        blocks = kv.pool.allocate(len(kv.specs), offer=False) or []
        tokens, tables = [*request.prompt, *unknown], tuple([one] for one in blocks)
        seq = Sequence(request, 0, tokens, tables, planned=1, max_len=2, dp_rank=rank)
        seq.state, seq.slot = SequenceState.RUNNING, registry.unused_slot(rank)
        rows.append(Row(seq, 0, 1, wants))
    moves = [RankMoves(leaves) for leaves in registry.take_leaves()]
    joins = tuple(row.seq for row in rows)
    parts = () if kvs[0].states is None else (StateMoves(),)
    plan = StepPlan(number, tuple(rows), joins, leaves=moves[0].leaves, parts=parts)
    return plan if len(kvs) == 1 else divide_plan(plan, moves)


def release_dummy_step(plan: StepPlan, kvs: Seq[KVCache], registry: SequenceRegistry) -> None:
    """Free the slots and the blocks of a finished dummy step."""
    for row in plan.rows:
        registry.empty_slot(row.seq)
        for table in row.seq.tables:
            kvs[row.seq.dp_rank].pool.free(table)

"""Dummy step: plans one token that belongs to no request, to check that steps work."""

from __future__ import annotations

from quire.core.kv.kv_cache import KVCache
from quire.core.params import SamplingParams
from quire.core.scheduling.sequence_registry import SequenceRegistry
from quire.core.types import (
    UNKNOWN,
    Request,
    Row,
    Sequence,
    SequenceState,
    StepPlan,
    StopConditions,
    Wants,
)

DUMMY_REQUEST = Request("", (0,), StopConditions(max_tokens=1), SamplingParams(temperature=0.0))


def build_dummy_step(
    kv: KVCache, registry: SequenceRegistry, number: int, request: Request
) -> StepPlan | None:
    """Build the step, with one slot and one block per table. None: no slot or no block is free.

    request: of one token, such as DUMMY_REQUEST; it is in no queue.
    """
    blocks = kv.pool.allocate(len(kv.specs), offer=False)
    if blocks is None:
        return None
    wants, unknown = (Wants.TOKEN, [UNKNOWN]) if request.pooling is None else (Wants.POOLED, [])
    tokens, tables = [*request.prompt, *unknown], tuple([one] for one in blocks)
    seq = Sequence(request, 0, tokens, tables, planned=1, max_len=2)
    seq.state, seq.slot = SequenceState.RUNNING, registry.unused_slot
    rows = (Row(seq, 0, 1, wants),)
    return StepPlan(number, rows, (seq,), leaves=registry.take_leaves())


def release_dummy_step(plan: StepPlan, kv: KVCache, registry: SequenceRegistry) -> None:
    """Free the slot and the blocks of a finished dummy step."""
    seq = plan.rows[0].seq
    registry.empty_slot(seq.slot)
    for table in seq.tables:
        kv.pool.free(table)

"""A step of one token of nobody's, to see whether steps work: in no book, and in no cache."""

from __future__ import annotations

from quire.core.kv_cache import KVCache
from quire.core.params import SamplingParams
from quire.core.roster import Roster
from quire.core.types import UNKNOWN, Request, Row, Sequence, State, StepPlan, Stop

NOBODY = Request("", (0,), Stop(max_tokens=1), SamplingParams(temperature=0.0))


def step(kv: KVCache, roster: Roster, number: int) -> StepPlan | None:
    """The step, with a slot and a block for each table. None: there is no room."""
    blocks = kv.pool.take(len(kv.specs))
    if blocks is None:
        return None
    seq = Sequence(NOBODY, 0, [0, UNKNOWN], tuple([one] for one in blocks), planned=1, end=2)
    seq.state, seq.slot = State.RUNNING, roster.a_slot
    rows = (Row(seq, 0, 1, True),)
    return StepPlan(number, rows, (seq,), leaves=roster.take_leaves())


def forget(plan: StepPlan, kv: KVCache, roster: Roster) -> None:
    """It is over: give back what it had."""
    seq = plan.rows[0].seq
    roster.left(seq.slot)
    for table in seq.tables:
        kv.pool.drop(table)

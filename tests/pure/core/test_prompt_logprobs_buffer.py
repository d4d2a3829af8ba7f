"""Prompt logprobs are returned once per position, also after recomputation."""

from quire.core.kv.block_pool import BlockPool
from quire.core.kv.kv_cache import KVCache
from quire.core.params import SamplingParams
from quire.core.scheduling.limits.base import by_contract
from quire.core.scheduling.limits.token_budget import TokenBudget
from quire.core.scheduling.order.fifo import Fifo
from quire.core.scheduling.prompt_logprobs_buffer import PromptLogprobsBuffer
from quire.core.scheduling.scheduler import Scheduler
from quire.core.types import (
    Request,
    Row,
    Sequence,
    StepResult,
    StopConditions,
    TokenLogprobs,
    Wants,
)


def entries(positions):
    return [TokenLogprobs([p], [0.0], [1]) for p in positions]


def test_positions_after_a_prefix_hit_are_kept_in_place_on_recomputation():
    seq = Sequence(
        Request("a", tuple(range(10)), StopConditions(1)), 0, list(range(10)), ([],), cached=4
    )
    buffer = PromptLogprobsBuffer()
    buffer.add(Row(seq, 4, 3, Wants.NOTHING), entries([5, 6, 7]))
    buffer.add(Row(seq, 0, 6, Wants.NOTHING), entries([1, 2, 3, 4, 5, 6]))
    buffer.add(Row(seq, 6, 4, Wants.TOKEN), entries([7, 8, 9]))
    assert buffer.pop(seq) == entries([5, 6, 7, 8, 9])


def test_a_preempted_prompt_with_logprobs_does_not_use_the_cache():
    """Another request may have cached more of the prompt than has logprobs."""
    for prompt_logprobs_count in (None, 0):
        kv = KVCache(BlockPool(8), 4)
        scheduler = Scheduler(kv, Fifo(), **by_contract([TokenBudget(8)]), max_seqs=4, max_len=32)
        scheduler.add(Request("old", (1, 2, 3), StopConditions(25)))
        params = SamplingParams(prompt_logprobs=prompt_logprobs_count)
        scheduler.add(Request("young", tuple(range(10, 24)), StopConditions(12), params))
        starts = []
        while not scheduler.idle:
            plan = scheduler.plan()
            starts += [r.start for r in plan.rows if r.seq in plan.joins and r.seq.preemptions]
            scheduler.apply(
                plan, StepResult([(7,) if row.wants is Wants.TOKEN else () for row in plan.rows])
            )
        assert starts
        assert all(start == 0 for start in starts) == (prompt_logprobs_count is not None)

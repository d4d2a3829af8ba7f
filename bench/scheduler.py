"""Measures one step of the scheduler: plan + apply while so many sequences decode.

    python bench/scheduler.py [--json] [--steps 400] [--depth 1] [--drafts off|wrong|ngram|suffix]

Default limits, prefix caching on, one layer group, blocks of 16; prompts of 100 to 163 tokens, so
that blocks fill in different steps. Prints milliseconds: median and 99th percentile by the clock on
the wall, and the mean of the thread's CPU time (which has the steps that fill blocks, and does not
count other processes). Target: 0.6 ms at 256, growing linearly.

--drafts: what speculation costs where nothing is accepted. wrong: a drafter whose drafts are wrong;
ngram, suffix: these, and every sequence generates random tokens. Two percent more than off is the
limit of wrong.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from random import randrange

from quire.config.engine_config import SpeculationSection
from quire.core.drafters.base import HostDrafter
from quire.core.kv.block_pool import BlockPool
from quire.core.kv.kv_cache import KVCache
from quire.core.scheduling.drafting import Drafting
from quire.core.scheduling.limits.base import by_contract
from quire.core.scheduling.limits.max_seqs import MaxSeqsLimit
from quire.core.scheduling.limits.token_budget import TokenBudget
from quire.core.scheduling.order.fifo import Fifo
from quire.core.scheduling.scheduler import Scheduler
from quire.core.types import Request, StepResult, StopConditions, Wants
from quire.engine.startup.scheduler_setup import HOST_DRAFTERS


class WrongDrafter(HostDrafter):
    """Proposes tokens that answer() never yields."""

    def propose(self, seq, known, most):
        return (5,) * most

    def remove(self, seq):
        pass


def drafting_of(name: str, depth: int) -> Drafting | None:
    if name == "off":
        return None
    if name == "wrong":
        drafter = WrongDrafter()
    else:
        drafter = HOST_DRAFTERS.load(name).build(SpeculationSection(method=name))
    return Drafting(drafter, max_drafts=8, overlaps=depth > 1, step_tokens=8192)


def decoding(sequences: int, depth: int, drafts: str = "off") -> Scheduler:
    """Return a scheduler whose sequences have computed their prompts."""
    kv = KVCache(BlockPool(sequences * 80), 16)
    limits = [TokenBudget(8192), MaxSeqsLimit(sequences)]
    scheduler = Scheduler(
        kv,
        Fifo(),
        **by_contract(limits),
        max_seqs=sequences,
        max_len=32_768,
        steps_in_flight=depth,
        drafting=drafting_of(drafts, depth),
    )
    stop = StopConditions(max_tokens=1000, eos_ids=frozenset({2}), token_ids=frozenset({7, 8}))
    for i in range(sequences):
        prompt = tuple((i * 31 + j) % 5000 + 10 for j in range(100 + i % 64))
        scheduler.add(Request(f"request-{i}", prompt, stop))
    while scheduler.stats().running < sequences or any(
        seq.pending > 1 for seq in scheduler._running
    ):
        step(scheduler, [])
    return scheduler


def answer(plan) -> StepResult:
    return StepResult(
        [(randrange(10, 30_000),) if row.wants is Wants.TOKEN else () for row in plan.rows]
    )


def step(scheduler: Scheduler, flying: list) -> tuple[float, float]:
    """Run a plan, and apply it or the one in flight. Returns wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.thread_time()
    if not flying or not scheduler.awaits_result:
        flying.append(scheduler.plan())
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    result = answer(flying[0])
    wall_again, cpu_again = time.perf_counter(), time.thread_time()
    scheduler.apply(flying.pop(0), result)
    scheduler.observe_step(0, 0.01)
    return wall + time.perf_counter() - wall_again, cpu + time.thread_time() - cpu_again


def measure(sequences: int, steps: int, depth: int, drafts: str) -> dict:
    scheduler = decoding(sequences, depth, drafts)
    flying = [scheduler.plan()] if depth > 1 else []
    for _ in range(20):
        step(scheduler, flying)
    gc.collect()
    times = [step(scheduler, flying) for _ in range(steps)]
    walls = sorted(wall * 1e3 for wall, _ in times)
    mean = statistics.fmean(cpu for _, cpu in times)
    return {
        "sequences": sequences,
        "median_ms": round(statistics.median(walls), 4),
        "p99_ms": round(walls[int(0.99 * len(walls))], 4),
        "cpu_mean_ms": round(mean * 1e3, 4),
        "cpu_us_per_sequence": round(mean * 1e6 / sequences, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--drafts", default="off", choices=("off", "wrong", "ngram", "suffix"))
    args = parser.parse_args()
    for sequences in (1, 64, 256, 1024):
        figures = measure(sequences, args.steps, args.depth, args.drafts)
        print(
            json.dumps(figures) if args.json else "  ".join(f"{k}={v}" for k, v in figures.items())
        )


if __name__ == "__main__":
    main()

"""Measures one step of the scheduler: plan + apply while so many sequences decode.

    python bench/scheduler.py [--json] [--steps 400] [--depth 1]

Default limits, prefix caching on, one layer group, blocks of 16; prompts of 100 to 163 tokens, so
that blocks fill in different steps. Prints milliseconds: median and 99th percentile by the clock on
the wall, and the mean of the thread's CPU time (which has the steps that fill blocks, and does not
count other processes). Target: 0.6 ms at 256, growing linearly.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time

from quire.core.kv.block_pool import BlockPool
from quire.core.kv.kv_cache import KVCache
from quire.core.scheduling.limits.base import by_contract
from quire.core.scheduling.limits.max_seqs import MaxSeqsLimit
from quire.core.scheduling.limits.token_budget import TokenBudget
from quire.core.scheduling.order.fifo import Fifo
from quire.core.scheduling.scheduler import Scheduler
from quire.core.types import Request, StepResult, StopConditions, Wants


def decoding(sequences: int, depth: int) -> Scheduler:
    """Return a scheduler whose sequences have computed their prompts."""
    kv = KVCache(BlockPool(sequences * 80), 16)
    limits = [TokenBudget(8192), MaxSeqsLimit(sequences)]
    scheduler = Scheduler(
        kv, Fifo(), **by_contract(limits), max_seqs=sequences, max_len=32_768, steps_in_flight=depth
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
    return StepResult([(11,) if row.wants is Wants.TOKEN else () for row in plan.rows])


def step(scheduler: Scheduler, flying: list) -> tuple[float, float]:
    """Run a plan, and apply it or the one in flight. Returns wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.thread_time()
    flying.append(scheduler.plan())
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    result = answer(flying[0])
    wall_again, cpu_again = time.perf_counter(), time.thread_time()
    scheduler.apply(flying.pop(0), result)
    return wall + time.perf_counter() - wall_again, cpu + time.thread_time() - cpu_again


def measure(sequences: int, steps: int, depth: int) -> dict:
    scheduler = decoding(sequences, depth)
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
    args = parser.parse_args()
    for sequences in (1, 64, 256, 1024):
        figures = measure(sequences, args.steps, args.depth)
        print(
            json.dumps(figures) if args.json else "  ".join(f"{k}={v}" for k, v in figures.items())
        )


if __name__ == "__main__":
    main()

"""Cost of one step of the scheduler: plan + apply while so many sequences decode.

    python bench/scheduler.py [--json] [--steps 400] [--depth 1]

Default limits, prefix caching on, one layer group, blocks of 16; prompts of 100 to 163 tokens, so
that blocks fill in different steps. Prints the median, the mean (which has the steps that fill
blocks) and the 99th percentile, in milliseconds. Target: 0.6 ms at 256, growing linearly.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time

from quire.core.block_pool import BlockPool
from quire.core.kv_cache import KVCache
from quire.core.limits.seats import SeatLimit
from quire.core.limits.tokens import TokenBudget
from quire.core.order.fifo import Fifo
from quire.core.scheduler import Scheduler
from quire.core.types import Request, StepResult, Stop


def decoding(sequences: int, depth: int) -> Scheduler:
    """A scheduler whose sequences have all done their prompts."""
    kv = KVCache(BlockPool(sequences * 80), 16)
    limits = [TokenBudget(8192), SeatLimit(sequences)]
    scheduler = Scheduler(
        kv, limits, Fifo(), max_seqs=sequences, max_len=32_768, steps_in_flight=depth
    )
    stop = Stop(max_tokens=1000, eos_ids=frozenset({2}), token_ids=frozenset({7, 8}))
    for i in range(sequences):
        prompt = tuple((i * 31 + j) % 5000 + 10 for j in range(100 + i % 64))
        scheduler.add(Request(f"request-{i}", prompt, stop))
    while scheduler.stats().running < sequences or any(
        seq.pending > 1 for seq in scheduler._running
    ):
        step(scheduler)
    return scheduler


def answer(plan) -> StepResult:
    return StepResult([(11,) if row.samples else () for row in plan.rows])


def step(scheduler: Scheduler) -> float:
    """One plan and one apply; seconds spent in the two."""
    began = time.perf_counter()
    plan = scheduler.plan()
    planned = time.perf_counter()
    result = answer(plan)
    resumed = time.perf_counter()
    scheduler.apply(plan, result)
    return time.perf_counter() - resumed + planned - began


def step_ahead(scheduler: Scheduler, flying: list) -> float:
    """The same with one step in flight: plan(n + 1) before apply(n)."""
    began = time.perf_counter()
    flying.append(scheduler.plan())
    planned = time.perf_counter()
    result = answer(flying[0])
    resumed = time.perf_counter()
    scheduler.apply(flying.pop(0), result)
    return time.perf_counter() - resumed + planned - began


def measure(sequences: int, steps: int, depth: int) -> dict:
    scheduler = decoding(sequences, depth)
    flying = [scheduler.plan()] if depth > 1 else []
    one = (lambda: step_ahead(scheduler, flying)) if depth > 1 else (lambda: step(scheduler))
    for _ in range(20):
        one()
    gc.collect()
    times = sorted(one() * 1e3 for _ in range(steps))
    return {
        "sequences": sequences,
        "median_ms": round(statistics.median(times), 4),
        "mean_ms": round(statistics.fmean(times), 4),
        "p99_ms": round(times[int(0.99 * len(times))], 4),
        "us_per_sequence": round(1e3 * statistics.fmean(times) / sequences, 3),
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

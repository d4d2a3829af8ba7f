"""Measures how prompts share steps with decoding rows: the scheduler with simulated step times.

    python bench/pacing.py serve [--concurrency 32,128,256] [--targets 0,50,30]
    python bench/pacing.py long  [--streams 1,4,16] [--targets 0,40]

No model and no GPU: the result is the scheduler's policy alone. Prints JSON lines.

serve: clients in a closed loop, 512 tokens in, 128 out, 4 requests a client. A step takes the
measured time of an 8B model on an H200 for so many rows (H200_STEPS), and the KV reads of its
decoding rows (131 KB a token at 4.2 TB/s); one of more than a thousand rows at least 10 ms if there
is a prompt in it.

long: a long prompt beside streams, on simulated devices (DEVICES): fixed costs of a step with
prompts, noise, slow first steps, stalls. The prompt takes --seconds alone. While it runs: `prompt`
is its throughput over that alone, `streams_keep` the tokens per second of the streams over those
alone, and `total` the sum of the two over the same sum without a target. Goals: at least 0.33, 0.5
and 0.85; the time between tokens is bounded by one full step. With several --prompts, prompts may
take more than half of the time.
"""

import argparse
import itertools
import json
import random
from dataclasses import dataclass

from quire.core.kv.block_pool import BlockPool
from quire.core.kv.kv_cache import KVCache
from quire.core.scheduling.limits.base import by_contract
from quire.core.scheduling.limits.itl_target import InterTokenLatencyLimit
from quire.core.scheduling.limits.max_seqs import MaxSeqsLimit
from quire.core.scheduling.limits.shortest_prompt_first import ShortestPromptFirst
from quire.core.scheduling.limits.token_budget import TokenBudget
from quire.core.scheduling.order.fifo import Fifo
from quire.core.scheduling.scheduler import Scheduler
from quire.core.types import Request, StepResult, StopConditions, Wants

INPUT, OUTPUT, DEPTH, BUDGET = 512, 128, 2, 8192

H200_STEPS = (
    *((1, 3.7), (32, 4.1), (64, 4.3), (128, 4.8), (256, 6.2), (512, 10.9), (640, 14.1)),
    *((1024, 21.9), (2048, 47.2), (16384, 386.0)),
)  # rows, ms
CAPTURED = 1024
MIN_LARGE_STEP_S = 0.010


def h200_step_s(prompts, rows, step):
    total = prompts + rows
    low, high = next(pair for pair in itertools.pairwise(H200_STEPS) if total <= pair[1][0])
    share = (total - low[0]) / (high[0] - low[0])
    products = (low[1] + share * (high[1] - low[1])) / 1e3
    kv = rows * (INPUT + OUTPUT / 2) * 131e3 / 4.2e12
    return max(products + kv, MIN_LARGE_STEP_S if prompts and total > CAPTURED else 0.0)


@dataclass(frozen=True)
class Device:
    """Seconds of a step: fixed, per row, per prompt token; factors of noise and stalls."""

    decode_s: float
    row_s: float
    prompt_fixed_s: float
    prompt_token_s: float
    noise: float = 0.05
    first_s: float = 0.0  # added to each of the first three steps with prompts
    stall_every: int = 0  # steps; such a step takes 0.5 s more

    def step_s(self, prompts, rows, step):
        draw = random.Random(step)
        seconds = self.decode_s + self.row_s * rows
        if prompts:
            seconds += self.prompt_fixed_s + self.prompt_token_s * prompts
        stalled = self.stall_every and step % self.stall_every == self.stall_every - 1
        return seconds * draw.uniform(1 - self.noise, 1 + self.noise) + 0.5 * bool(stalled)


DEVICES = {
    "cpu": Device(0.003, 0.0003, 0.009, 0.0003),
    "cpu, noisy": Device(0.003, 0.0003, 0.009, 0.0003, noise=0.6),
    "cpu, slow first steps": Device(0.003, 0.0003, 0.009, 0.0003, first_s=2.0),
    "cpu, stalls": Device(0.003, 0.0003, 0.009, 0.0003, stall_every=499),
    "cpu, large model": Device(0.150, 0.002, 0.020, 0.008),
    "h200": Device(0.0037, 12e-6, 0.0005, 22e-6),
    "h200, slow first steps": Device(0.0037, 12e-6, 0.0005, 22e-6, first_s=0.5),
}


class SchedulerLoop:
    """Runs a scheduler with a device's step times and a simulated clock."""

    def __init__(self, step_s, target_s, *, depth=DEPTH, max_len=4096):
        queue, budget = Fifo(), TokenBudget(BUDGET)
        limits, left = [budget, MaxSeqsLimit(1024)], lambda: budget.left
        if target_s:
            pace = InterTokenLatencyLimit(target_s)
            limits.append(pace)
            left = lambda: min(budget.left, pace.prompt_tokens_left())  # noqa: E731
        limits.append(ShortestPromptFirst(queue, left))
        kv = KVCache(BlockPool(56000), 16)
        self.scheduler = Scheduler(
            kv, queue, **by_contract(limits), max_seqs=1024, max_len=max_len, steps_in_flight=depth
        )
        self.step_s, self.depth = step_s, depth
        self.now = self.free_at = 0.0
        self.sent, self.last, self.first, self.gaps = {}, {}, {}, []
        self.ids, self.draw = itertools.count(), random.Random(1)
        self.in_flight, self.steps, self.on_finish = [], 0, lambda name: None

    def send(self, tokens, out):
        name = f"r{next(self.ids)}"
        prompt = tuple(self.draw.randrange(10, 99999) for _ in range(tokens))
        self.sent[name] = self.now
        self.scheduler.add(Request(name, prompt, StopConditions(out), read_prefix_cache=False))
        return name

    def run(self, until=lambda: False):
        while not until() and not (self.scheduler.idle and not self.in_flight):
            self._launch()
            self._apply()

    def _launch(self):
        while len(self.in_flight) < self.depth and not self.scheduler.idle:
            plan = self.scheduler.plan()
            prompts = sum(row.count for row in plan.rows if row.count > 1)
            rows = sum(row.count == 1 for row in plan.rows)
            begun = max(self.free_at, self.now)
            seconds_taken = self.step_s(prompts, rows, self.steps) if plan.rows else 0.0
            self.steps += 1
            self.free_at = begun + seconds_taken
            self.in_flight.append((plan, prompts, seconds_taken, self.free_at))

    def _apply(self):
        plan, prompts, seconds, at = self.in_flight.pop(0)
        self.now = max(self.now, at)
        result = StepResult([(7,) if row.wants is Wants.TOKEN else () for row in plan.rows])
        for update in self.scheduler.apply(plan, result):
            self._observe(update)
        self.scheduler.observe_step(prompts, seconds)

    def _observe(self, update):
        name = update.request_id
        if update.token_ids:
            if name in self.last:
                self.gaps.append(self.now - self.last[name])
            else:
                self.first[name] = self.now - self.sent[name]
            self.last[name] = self.now
        if update.finish:
            self.on_finish(name)


def ms(values, share):
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1e3, 1)


def serve(clients, target_ms):
    loop = SchedulerLoop(h200_step_s, target_ms / 1e3)
    left = itertools.count(4 * clients, -1)
    loop.on_finish = lambda name: loop.send(INPUT, OUTPUT) if next(left) > 0 else None
    for _ in range(clients):
        next(left)
        loop.send(INPUT, OUTPUT)
    loop.run()
    first = list(loop.first.values())
    return dict(
        bench="pacing serve",
        concurrency=clients,
        target_ms=target_ms,
        out_tok_s=round(4 * clients * OUTPUT / loop.now),
        ttft_p50=ms(first, 0.5),
        ttft_p99=ms(first, 0.99),
        itl_p50=ms(loop.gaps, 0.5),
        itl_p99=ms(loop.gaps, 0.99),
    )


def beside(device, target_ms, streams, tokens, prompts):
    """Return the prompts' seconds, the streams' rate over that alone, and the streams' gaps."""
    loop = SchedulerLoop(device.step_s, target_ms / 1e3, depth=1, max_len=1 << 20)
    first_steps = iter([device.first_s] * 3)
    loop.step_s = lambda p, r, step: device.step_s(p, r, step) + (next(first_steps, 0) if p else 0)
    for _ in range(streams):
        loop.send(16, 1 << 18)
    loop.run(lambda: len(loop.first) == streams)
    before, began = len(loop.gaps), loop.now
    loop.run(lambda: loop.now - began > 1.0)
    alone = (len(loop.gaps) - before) / (loop.now - began)
    loop.gaps.clear()
    began = loop.now
    names = [loop.send(tokens, 1) for _ in range(prompts)]
    loop.run(lambda: all(name in loop.first for name in names))
    seconds_taken = loop.now - began
    return seconds_taken, len(loop.gaps) / seconds_taken / alone, loop.gaps


def long(name, target_ms, streams, seconds, prompts):
    device = DEVICES[name]
    tokens = int(seconds / device.prompt_token_s / prompts)
    alone = SchedulerLoop(device.step_s, target_ms / 1e3, depth=1, max_len=1 << 20)
    for _ in range(prompts):
        alone.send(tokens, 1)
    alone.run()
    seconds_taken, kept, gaps = beside(device, target_ms, streams, tokens, prompts)
    unpaced_took, unpaced_kept, _ = beside(device, 0, streams, tokens, prompts)
    share, unpaced_share = alone.now / seconds_taken, alone.now / unpaced_took
    return dict(
        bench="pacing long",
        device=name,
        streams=streams,
        tokens=tokens,
        prompts=prompts,
        target_ms=target_ms,
        prompt=round(share, 2),
        streams_keep=round(kept, 2),
        total=round((share + kept) / (unpaced_share + unpaced_kept), 2),
        itl_p50=ms(gaps, 0.5),
        itl_p99=ms(gaps, 0.99),
    )


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("case", choices=("serve", "long"))
    ap.add_argument("--concurrency", default="32,128,256")
    ap.add_argument("--streams", default="1,4,16")
    ap.add_argument("--seconds", type=float, default=5.0, help="of the prompt alone")
    ap.add_argument("--prompts", type=int, default=1, help="long prompts at once")
    ap.add_argument("--targets", default="40", help="ms; 0: none")
    a = ap.parse_args()
    for target in map(float, a.targets.split(",")):
        if a.case == "serve":
            for clients in map(int, a.concurrency.split(",")):
                print(json.dumps(serve(clients, target)), flush=True)
            continue
        for name, streams in itertools.product(DEVICES, map(int, a.streams.split(","))):
            print(json.dumps(long(name, target, streams, a.seconds, a.prompts)), flush=True)


if __name__ == "__main__":
    main()

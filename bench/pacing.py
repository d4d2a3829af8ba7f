"""How prompts share steps with decoding rows: clients in a closed loop over the real scheduler, with
made-up step times. No model and no GPU: what it shows is the scheduler's policy alone. JSON lines.

usage: python bench/pacing.py [--concurrency 32,128,256] [--targets 0,50,30] [--host-ms 10]

A step takes what an 8B model took on an H200 for so many rows (STEPS), and the KV reads of its
decoding rows (131 KB a token at 4.2 TB/s); one of more than a thousand rows at least --host-ms if
there is a prompt in it. 512 tokens in, 128 out, 4 requests a client.
"""

import argparse
import itertools
import json
import random

from quire.core.kv.block_pool import BlockPool
from quire.core.kv.kv_cache import KVCache
from quire.core.scheduling.limits.base import by_contract
from quire.core.scheduling.limits.itl_target import InterTokenLatencyLimit
from quire.core.scheduling.limits.max_seqs import MaxSeqsLimit
from quire.core.scheduling.limits.token_budget import TokenBudget
from quire.core.scheduling.order.fifo import Fifo
from quire.core.scheduling.scheduler import Scheduler
from quire.core.types import Request, StepResult, StopConditions, Wants

INPUT, OUTPUT, DEPTH, BUDGET = 512, 128, 2, 8192


STEPS = (
    *((1, 3.7), (32, 4.1), (64, 4.3), (128, 4.8), (256, 6.2), (512, 10.9), (640, 14.1)),
    *((1024, 21.9), (2048, 47.2), (16384, 386.0)),
)  # rows, ms
CAPTURED = 1024


def step_s(prompts, rows, host_s):
    total = prompts + rows
    low, high = next(pair for pair in itertools.pairwise(STEPS) if total <= pair[1][0])
    share = (total - low[0]) / (high[0] - low[0])
    products = (low[1] + share * (high[1] - low[1])) / 1e3
    kv = rows * (INPUT + OUTPUT / 2) * 131e3 / 4.2e12
    return max(products + kv, host_s if prompts and total > CAPTURED else 0.0)


class Loop:
    """Clients, each of which sends its next request when the last has ended; a clock of its own."""

    def __init__(self, clients, target_s, host_s):
        limits = [TokenBudget(BUDGET), MaxSeqsLimit(1024)]
        if target_s:
            limits.append(InterTokenLatencyLimit(target_s))
        kv = KVCache(BlockPool(56000), 16)
        self.scheduler = Scheduler(
            kv, Fifo(), **by_contract(limits), max_seqs=1024, max_len=4096, steps_in_flight=DEPTH
        )
        self.host_s = host_s
        self.left = 4 * clients
        self.now = self.free_at = 0.0
        self.sent, self.last, self.first, self.gaps = {}, {}, [], []
        self.ids, self.draw = itertools.count(), random.Random(1)
        self.flights = []
        for _ in range(clients):
            self.send()

    def send(self):
        if self.left:
            self.left -= 1
            name = f"r{next(self.ids)}"
            prompt = tuple(self.draw.randrange(10, 99999) for _ in range(INPUT))
            self.sent[name] = self.now
            self.scheduler.add(
                Request(name, prompt, StopConditions(OUTPUT), read_prefix_cache=False)
            )

    def run(self):
        while not self.scheduler.idle or self.flights:
            self.launch()
            self.land()

    def launch(self):
        while len(self.flights) < DEPTH and not self.scheduler.idle:
            plan = self.scheduler.plan()
            prompts = sum(row.count for row in plan.rows if row.count > 1)
            rows = sum(row.count == 1 for row in plan.rows)
            begun = max(self.free_at, self.now)
            self.free_at = begun + (step_s(prompts, rows, self.host_s) if plan.rows else 0.0)
            self.flights.append((plan, prompts, self.free_at - begun, self.free_at))

    def land(self):
        plan, prompts, seconds, at = self.flights.pop(0)
        self.now = max(self.now, at)
        result = StepResult([(7,) if row.wants is Wants.TOKEN else () for row in plan.rows])
        for update in self.scheduler.apply(plan, result):
            self.tell(update)
        self.scheduler.observe_step(prompts, seconds)

    def tell(self, update):
        name = update.request_id
        if update.token_ids:
            if name in self.last:
                self.gaps.append(self.now - self.last[name])
            else:
                self.first.append(self.now - self.sent[name])
            self.last[name] = self.now
        if update.finish:
            self.send()


def ms(values, share):
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1e3, 1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--concurrency", default="32,128,256")
    ap.add_argument("--targets", default="0,50,30", help="ms; 0: none")
    ap.add_argument("--host-ms", type=float, default=10)
    a = ap.parse_args()
    for clients in map(int, a.concurrency.split(",")):
        for target in map(float, a.targets.split(",")):
            loop = Loop(clients, target / 1e3, a.host_ms / 1e3)
            loop.run()
            print(
                json.dumps(
                    dict(
                        bench="pacing",
                        concurrency=clients,
                        target_ms=target,
                        out_tok_s=round(4 * clients * OUTPUT / loop.now),
                        ttft_p50=ms(loop.first, 0.5),
                        ttft_p99=ms(loop.first, 0.99),
                        itl_p50=ms(loop.gaps, 0.5),
                        itl_p99=ms(loop.gaps, 0.99),
                    )
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()

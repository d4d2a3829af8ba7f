"""Time of one sampling step, per batch size, vocabulary and kind of request. JSON lines.

usage: python bench/sampler.py [--rows 1,32,256] [--vocab 4096,152064] [--threads 1] [--kinds ...]

Logits are random and peaked like a language model's (a few likely tokens over a flat rest); "flat"
kinds use plain normal ones, the worst case for top-p. `us` is the best of several repeats, which
includes reading the errors, as the runner does; `cpu_us` is the same in time of the calling
thread's CPU, which a busy machine disturbs less.
"""

import argparse
import json
import os
import platform
import subprocess
import time

import torch

from quire.core.params import SamplingParams
from quire.core.types import Request, Sequence, StopConditions
from quire.sampling.sampler import Sampler
from quire.sampling.slot_join import SlotJoin

KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"top_p": 0.9},
    "top_p flat": {"top_p": 0.9},
    "top_k": {"top_k": 50},
    "top_k top_p": {"top_k": 50, "top_p": 0.9, "temperature": 0.7},
    "min_p": {"min_p": 0.05},
    "greedy logprobs": {"temperature": 0.0, "logprobs": 5},
    "penalties logprobs": {
        "temperature": 0.8,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
        "logprobs": 5,
    },
}
PROMPT = 500


def logits_like(rows, vocab, flat, dtype):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, vocab, generator=g)
    if not flat:
        x *= 2.5
        best = torch.randint(vocab, (rows, 20), generator=g)
        x.scatter_(1, best, torch.rand(rows, 20, generator=g) * 8 + 12)
    return x.to(dtype)


def measure(kind, rows, vocab, dtype):
    """Return the best times of a step in microseconds: wall, CPU of this thread."""
    params = SamplingParams(**KINDS[kind])
    sampler = Sampler(vocab, rows)
    for slot in range(rows):
        prompt = tuple(i % vocab for i in range(slot, slot + PROMPT))
        request = Request(str(slot), prompt, StopConditions(10_000), params, seed=slot)
        sampler.join(SlotJoin.from_sequence(Sequence(request, 0, list(prompt), ([],)), slot))
    logits, slots = logits_like(rows, vocab, "flat" in kind, dtype), list(range(rows))
    best, best_cpu, spent, position = float("inf"), float("inf"), 0.0, 0
    while position < 5 or (spent < 0.4 and position < 400):
        started, cpu = time.perf_counter(), time.thread_time()
        found = sampler.sample(logits, slots, [position] * rows)
        assert not found.all_errors
        took = time.perf_counter() - started
        best_cpu = min(best_cpu, time.thread_time() - cpu)
        best, spent, position = min(best, took), spent + took, position + 1
    return best * 1e6, best_cpu * 1e6


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--vocab", default="4096,152064")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    where = {
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()} {os.cpu_count()} cores",
        "torch": torch.__version__,
    }
    print(json.dumps({"bench": "sampler", **where}))
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[args.dtype]
    for vocab in map(int, args.vocab.split(",")):
        for rows in map(int, args.rows.split(",")):
            for kind in args.kinds.split(","):
                us, cpu_us = measure(kind, rows, vocab, dtype)
                line = {
                    "bench": "sampler",
                    "kind": kind,
                    "rows": rows,
                    "vocab": vocab,
                    "dtype": args.dtype,
                    "threads": args.threads,
                    "us": round(us, 1),
                    "cpu_us": round(cpu_us, 1),
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

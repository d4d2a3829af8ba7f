"""Time of one sampling step on a GPU, per batch size and kind of request. JSON lines.

usage: python bench/sampler_gpu.py [--rows 1,256,1024] [--vocab 151936] [--dtype bfloat16] [--kinds
...]

`us` is the median of replays of a captured graph (the cost in a decode step), over several inputs
so that the cache of the chip does not hold them; `gbs` is the logits' bytes over that time. Kinds
that no graph holds (logprobs, penalties) are timed without a graph, between events: `host_us` is
what the launching thread spends.
"""

import argparse
import json
import statistics
import subprocess
import time

import torch

from quire.core.params import SamplingParams
from quire.core.types import Request, Sequence, StopConditions
from quire.sampling.sampler import Sampler
from quire.sampling.slot_join import SlotJoin

CUDA = torch.device("cuda")
KINDS = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "top_k top_p": {"top_k": 50, "top_p": 0.9},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "top_p flat": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "mixed": None,
    "greedy logprobs": {"temperature": 0.0, "logprobs": 5},
    "random logprobs": {"top_k": 50, "top_p": 0.9, "logprobs": 5},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "penalties top_p": {"top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    "penalties logprobs": {"repetition_penalty": 1.1, "logprobs": 5},
}
PROMPT = 500


def logits_like(rows, vocab, flat, dtype, seed):
    g = torch.Generator(CUDA).manual_seed(seed)
    x = torch.randn(rows, vocab, generator=g, device=CUDA)
    if not flat:
        x *= 2.5
        best = torch.randint(vocab, (rows, 20), generator=g, device=CUDA)
        x.scatter_(1, best, torch.rand(rows, 20, generator=g, device=CUDA) * 8 + 12)
    return x.to(dtype)


def params_of(kind, row):
    if kind == "mixed":
        kind = ("greedy", "plain", "top_k top_p", "min_p")[row % 4]
    return SamplingParams(**KINDS[kind])


def sampler_of(kind, rows, vocab):
    sampler = Sampler(vocab, rows, CUDA)
    for slot in range(rows):
        prompt = tuple(i % vocab for i in range(slot, slot + PROMPT))
        request = Request(
            str(slot), prompt, StopConditions(10_000), params_of(kind, slot), seed=slot
        )
        sampler.join(SlotJoin.from_sequence(Sequence(request, 0, list(prompt), ([],)), slot))
    return sampler


def replayed(sampler, inputs, how):
    """Return the median seconds of a replay."""
    rows = len(inputs[0])
    slots = torch.arange(rows, dtype=torch.int32, device=CUDA)
    outputs = torch.full((rows,), 3, dtype=torch.int32, device=CUDA)
    for x in inputs:
        sampler.choose(x, slots, outputs, how)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in inputs:
            sampler.choose(x, slots, outputs, how)
    return timed(graph.replay, 15) / len(inputs)


def timed(run, times, ahead=0):
    """ahead: cycles the device is kept busy first, so that it does not wait for launches."""
    run()
    found = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if ahead:
            torch.cuda._sleep(ahead)
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(found)


def launched(sampler, inputs):
    """Return the median seconds of a step on the device, and of the launching thread."""
    rows, position = len(inputs[0]), 0
    slots, host = range(rows), []

    def step():
        nonlocal position
        for x in inputs:
            started = time.perf_counter()
            sampler.sample(x, slots, [position] * rows).fetch()
            host.append(time.perf_counter() - started)
            position += 1

    step()
    torch.cuda.synchronize()
    device = timed(step, 5, ahead=60_000_000) / len(inputs)
    return device, statistics.median(host)


def measure(kind, rows, vocab, dtype):
    sampler = sampler_of(kind, rows, vocab)
    size = rows * vocab * dtype.itemsize
    inputs = [
        logits_like(rows, vocab, "flat" in kind, dtype, seed)
        for seed in range(max(2, min(32, 200_000_000 // size)))
    ]
    how = sampler.kind(range(rows))
    line = {"bench": "sampler_gpu", "kind": kind, "rows": rows, "vocab": vocab}
    if how is not None:
        seconds = replayed(sampler, inputs, how)
        return line | {"us": round(seconds * 1e6, 1), "gbs": round(size / seconds * 1e-9)}
    seconds, host = launched(sampler, inputs)
    return line | {"us": round(seconds * 1e6, 1), "host_us": round(host * 1e6, 1)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1,256,1024")
    parser.add_argument("--vocab", default="151936")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--kinds", default=",".join(KINDS))
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    where = {"commit": commit.stdout.strip(), "machine": torch.cuda.get_device_name()}
    print(json.dumps({"bench": "sampler_gpu", **where, "dtype": args.dtype}), flush=True)
    for vocab in map(int, args.vocab.split(",")):
        for kind in args.kinds.split(","):
            for rows in map(int, args.rows.split(",")):
                made = measure(kind, rows, vocab, getattr(torch, args.dtype))
                print(json.dumps(made), flush=True)


if __name__ == "__main__":
    main()

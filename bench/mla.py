"""Latent attention on the GPU: bytes/s and FLOP/s at DeepSeek's shapes, compared with expanded
heads.

    python bench/mla.py [--json FILE]

decode    what a step's rows read of the cache (L + R numbers a token) and multiply
prompt    FLOPs of the expanded form, P + R + V a pair, for any algorithm
sdpa      torch's attention over keys and values made for every head, the reference

Times are medians of graph replays (of eager runs for prompts). Weights and cache are random.
"""

import argparse
import json
import statistics

import torch
import torch.nn.functional as F

from quire.kernels.mla_attention import mla_attention
from quire.kernels.mla_write import mla_write

LATENT, ROTATED, PLAIN, VALUE, BLOCK = 512, 64, 128, 128, 16
BF16 = torch.bfloat16
WIDTH = 4096  # blocks of the longest sequence


def rand(*shape):
    return torch.randn(*shape, device="cuda").to(BF16)


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def timed_us(call, *, graphed=True, repeats=11):
    """Return the median time of a call in microseconds."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    run = call
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        run = graph.replay
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


class Step:
    """Return arguments of mla_attention for sequences of (queries, context)."""

    def __init__(self, rows, heads):
        queries = [q for q, _ in rows]
        held = [-(-c // BLOCK) for _, c in rows]
        self.cache = rand(sum(held), 1, 1, BLOCK, LATENT + ROTATED)
        free, at = torch.randperm(sum(held)).int(), 0
        tables = torch.zeros(len(rows), WIDTH, dtype=torch.int32)
        for s, used in enumerate(held):
            tables[s, :used] = free[at : at + used]
            at += used
        both = rand(sum(queries), heads, PLAIN + ROTATED)
        up = rand(heads, PLAIN + VALUE, LATENT)
        latents = rand(sum(queries), LATENT + ROTATED)
        decodes = next((i for i, q in enumerate(queries) if q != 1), len(queries))
        starts = ints([0, *queries]).cumsum(0).int()
        contexts = ints([c for _, c in rows])
        past = max((c - q for q, c in rows[decodes:]), default=0)
        self.args = (both[..., :PLAIN], both[..., PLAIN:], latents, up, self.cache, tables.cuda())
        self.args += (starts, contexts, (PLAIN + ROTATED) ** -0.5, None, decodes, past)
        self.graphed = decodes == len(rows)

    def us(self):
        return timed_us(lambda: mla_attention(*self.args), graphed=self.graphed)


def decode(sequences, context, heads):
    us = Step([(1, context)] * sequences, heads).us()
    tokens = sequences * context
    return us, {
        "TB/s": tokens * (LATENT + ROTATED) * 2 / us / 1e6,
        "TFLOP/s": 2 * tokens * heads * (2 * LATENT + ROTATED) / us / 1e6,
    }


def prompt(queries, past, heads):
    us = Step([(queries, queries + past)], heads).us()
    pairs = queries * past + queries * (queries + 1) / 2
    return us, {"TFLOP/s": 2 * pairs * heads * (PLAIN + ROTATED + VALUE) / us / 1e6}


def sdpa_decode(sequences, context, heads):
    q = rand(sequences, heads, 1, PLAIN + ROTATED)
    k, v = rand(sequences, heads, context, PLAIN + ROTATED), rand(sequences, heads, context, VALUE)
    us = timed_us(lambda: F.scaled_dot_product_attention(q, k, v))
    return us, {"TB/s": (k.nbytes + v.nbytes) / us / 1e6}


def sdpa_prompt(queries, past, heads):
    q, k = (rand(1, heads, queries, PLAIN + ROTATED) for _ in range(2))
    v = rand(1, heads, queries, VALUE)
    us = timed_us(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), graphed=False)
    pairs = queries * (queries + 1) / 2
    return us, {"TFLOP/s": 2 * pairs * heads * (PLAIN + ROTATED + VALUE) / us / 1e6}


def write(tokens, _, heads):
    q, kv = rand(tokens, heads, PLAIN + ROTATED)[..., PLAIN:], rand(tokens, LATENT + ROTATED)
    cache = rand(-(-tokens // BLOCK), 1, 1, BLOCK, LATENT + ROTATED)
    positions, slots = ints(range(tokens)), torch.arange(tokens, device="cuda")
    table, weight = torch.rand(tokens, ROTATED, device="cuda"), rand(LATENT)
    us = timed_us(lambda: mla_write(q, kv, weight, 1e-6, positions, table, cache, slots))
    moved = 2 * tokens * (heads * ROTATED + 1.5 * (LATENT + ROTATED)) * 2
    return us, {"TB/s": moved / us / 1e6}


CASES = [
    (decode, 64, 4096, 128),
    (decode, 64, 4096, 16),
    (decode, 1, 4096, 128),
    (decode, 1, 4096, 16),
    (decode, 1, 65536, 16),
    (decode, 8, 8192, 128),
    (decode, 256, 1024, 16),
    (sdpa_decode, 4, 4096, 128),
    (sdpa_decode, 32, 4096, 16),
    (prompt, 4096, 0, 16),
    (prompt, 2048, 6144, 16),
    (prompt, 64, 4096, 16),
    (prompt, 4096, 0, 128),
    (sdpa_prompt, 4096, 0, 16),
    (sdpa_prompt, 4096, 0, 128),
    (write, 64, 0, 16),
    (write, 8192, 0, 16),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also append the lines to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    for case, first, second, heads in CASES:
        us, rates = case(first, second, heads)
        line = {"case": case.__name__, "size": [first, second], "heads": heads, "us": round(us, 1)}
        line |= {name: round(rate, 2) for name, rate in rates.items()}
        line |= {"device": torch.cuda.get_device_name()}
        print(json.dumps(line), flush=True)
        if args.json:
            with open(args.json, "a") as out:
                out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

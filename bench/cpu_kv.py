"""Compares attention over KV caches of 8 bits with that over bfloat16 on a CPU, in turn.

usage: python bench/cpu_kv.py [--rounds 9] [--cases ...] [--heads llama-8b,qwen3-0.6b] [--json FILE]

One line per case: microseconds of the best round over bfloat16 by processor time, then each cache's
time over that. For a decode caches of several layers, 64 MiB in bfloat16, follow each other: keys
come from memory. OMP_NUM_THREADS=1 is one thread, QUIRE_CPU_ISA a lower instruction set.
"""

import argparse
import json
import time

import torch

from quire.kernels.formats.kv_cache import allocate_blocks, encode, encode_per_token
from quire.kernels.paged_attention import paged_attention

B, D = 16, 128
HEADS = {"llama-8b": (32, 8), "qwen3-0.6b": (16, 8), "qwen3-30b-a3b": (32, 4)}
CASES = {
    "decode 1 of 512": [(1, 512)],
    "decode 1 of 8192": [(1, 8192)],
    "decode 8 of 2048": [(1, 2048)] * 8,
    "prompt of 1024": [(1024, 1024)],
    "chunk of 256 after 4096": [(256, 4352)],
}
CODES = {
    "int8_per_token_head": torch.int8,
    "fp8_per_token_head": torch.float8_e4m3fn,
    "fp8": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def coded(cache, name):
    """The cache's codes, and their scales."""
    dtype = CODES[name]
    if not name.endswith("head"):
        return {"cache": encode(cache, 0.05, dtype), "k_scale": 0.05, "v_scale": 0.05}
    codes, scales = allocate_blocks(cache.shape, dtype, cache.device)
    made, measured = encode_per_token(cache.flatten(0, 3)[:, None], dtype)
    codes.copy_(made.view(cache.shape))
    scales.copy_(measured.view(scales.shape))
    return {"cache": codes, "scales": scales}


def calls(rows, heads, kv_heads, dtype):
    """Name of the cache -> a call for each layer."""
    blocks = [-(-context // B) for _, context in rows]
    shape = (sum(blocks), 2, kv_heads, B, D)
    decodes = all(queries == 1 for queries, _ in rows)
    layers = max(1, (64 << 20) // (2 * torch.Size(shape).numel())) if decodes else 1
    starts = torch.tensor([0, *(n for n, _ in rows)]).cumsum(0).int()
    tables = torch.zeros(len(rows), max(blocks), dtype=torch.int32)
    for row, mine in zip(tables, torch.randperm(sum(blocks)).split(blocks), strict=True):
        row[: len(mine)] = mine.int()
    step = {
        "q": torch.randn(int(starts[-1]), heads, D).to(dtype),
        "tables": tables,
        "q_starts": starts,
        "contexts": torch.tensor([c for _, c in rows], dtype=torch.int32),
        "scale": D**-0.5,
    }
    made = {"plain": [], **{name: [] for name in CODES}}
    for _ in range(layers):
        cache = torch.randn(shape)
        made["plain"].append({**step, "cache": cache.to(dtype)})
        for name in CODES:
            made[name].append({**step, **coded(cache, name)})
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--heads", default=",".join(HEADS))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", help="append one line per figure to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    for model in args.heads.split(","):
        for case in args.cases.split(","):
            made = calls(CASES[case], *HEADS[model], getattr(torch, args.dtype))
            best = dict.fromkeys(made, float("inf"))
            for _ in range(args.rounds):
                for name, layers in made.items():
                    began = time.process_time()
                    for layer in layers:
                        paged_attention(**layer)
                    best[name] = min(best[name], (time.process_time() - began) / len(layers))
            plain = best.pop("plain")
            line = {"model": model, "case": case, "plain_us": round(plain * 1e6, 1)}
            line |= {name: round(seconds / plain, 2) for name, seconds in best.items()}
            print(json.dumps(line), flush=True)
            if args.json:
                with open(args.json, "a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

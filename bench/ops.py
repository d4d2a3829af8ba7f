"""Compares the speed of CPU kernels with the machine's limits at the same time.

usage: python bench/ops.py [--only linear] [--dtype fp32] [--rounds 3]

One JSON line per op and shape: best and median time, bytes/s and FLOP/s of the best round, and the
ceiling measured in the same rounds by a small program (a read of 512 MiB on every thread; bf16 or
fp32 dot products that touch no memory). On a shared machine compare `share`, not the absolute
figure. Weights and caches rotate over more than the last-level cache holds, as in a real model.
"""

import argparse
import json
import math
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from quire.kernels.act import act_mul
from quire.kernels.embedding import embedding
from quire.kernels.kv_write import kv_write
from quire.kernels.linear import linear, pack
from quire.kernels.native.library import load_library
from quire.kernels.paged_attention import paged_attention
from quire.kernels.rms_norm import rms_norm
from quire.kernels.rope import rope
from quire.platform.native_build import FLAGS

CEILING = r"""
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>
#include "simd.h"
static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
vi factor = vi{} + 0x3f803f80;
template <class T> __attribute__((noinline)) void dots(long n, float* out) {
  vf acc[12];
  UNROLL for (int i = 0; i < 12; i++) acc[i] = splat(i);
  for (long k = 0; k < n; k++) {
    asm volatile("" ::: "memory");  // so that the product is not taken out of the loop
    const vi x = factor;
    UNROLL for (int i = 0; i < 12; i++) acc[i] = dot_step<T>(acc[i], x, x);
  }
  UNROLL for (int i = 0; i < 12; i++) *out += sum(acc[i]);
}
__attribute__((noinline)) void reads(const char* p, long n, float* out) {
  vi a{}, b{}, c{}, d{};
  const long s = sizeof(vi);
  for (long i = 0; i + 4 * s <= n; i += 4 * s) {
    a += *(const vi*)(p + i); b += *(const vi*)(p + i + s);
    c += *(const vi*)(p + i + 2 * s); d += *(const vi*)(p + i + 3 * s);
  }
  *out += (float)(a + b + c + d)[0];
}
template <class F> double timed(int threads, F f) {
  double from = now();
  std::vector<std::thread> all;
  for (int i = 0; i < threads; i++) all.emplace_back([=] { f(i); });
  for (auto& t : all) t.join();
  return now() - from;
}
int main(int, char** v) {
  const int threads = atoi(v[1]);
  const long bytes = 512L << 20, n = 3000000;
  std::vector<float> sink(threads * 64);
  char* data = (char*)aligned_alloc(1 << 21, bytes);
  for (long i = 0; i < bytes; i += 8) *(long*)(data + i) = i;
  double read = 1e9, half = 1e9, whole = 1e9;
  for (int r = 0; r < 3; r++) {
    read = std::min(read, timed(threads, [&](int i) {
      reads(data + bytes / threads * i / 64 * 64, bytes / threads, &sink[i * 64]); }));
    half = std::min(half, timed(threads, [&](int i) { dots<bf16>(n, &sink[i * 64]); }));
    whole = std::min(whole, timed(threads, [&](int i) { dots<float>(n, &sink[i * 64]); }));
  }
  const double steps = 12.0 * n * W * threads;
  printf("{\"gb_s\": %.2f, \"bf16\": %.1f, \"fp32\": %.1f, \"sink\": \"%g\"}\n", bytes / read / 1e9,
         steps * 4 / half / 1e9, steps * 2 / whole / 1e9, sink[0]);
}
"""


def ceiling_program(folder):
    """Compile the ceiling program. Returns the command to run it."""
    source, binary = Path(folder) / "ceiling.cpp", Path(folder) / "ceiling"
    source.write_text(CEILING)
    flags = [f for f in FLAGS if f not in ("-fPIC", "-shared")]
    headers = Path(__file__).parent.parent / "quire/kernels/native"
    subprocess.run(["c++", *flags, f"-I{headers}", "-o", binary, source], check=True)
    return [str(binary), str(load_library().threads)]


def copies_of(nbytes):
    """Return the number of copies to rotate over, so that they exceed the last-level cache."""
    return max(1, min(48, math.ceil(192e6 / nbytes)))


def linear_cases(dtype):
    for inputs, outputs in [(1024, 4096), (1024, 6144), (3072, 1024), (256, 1536)]:
        nbytes = inputs * outputs * dtype.itemsize
        n = copies_of(nbytes) if inputs > 256 else 1
        weights = [pack((torch.randn(outputs, inputs) / 32).to(dtype)) for _ in range(n)]
        for rows in (1, 4, 8, 32, 128, 512):
            x = torch.randn(rows, inputs).to(dtype)
            calls = [lambda x=x, w=w: linear(x, w) for w in weights]
            yield f"{rows}x{inputs}x{outputs}", calls, nbytes, 2 * rows * inputs * outputs


def attention_cases(dtype):
    for heads, kv_heads, size, rows, context, queries in [
        (16, 8, 128, 1, 2048, 1),
        (16, 8, 128, 32, 150, 1),
        (8, 4, 32, 32, 100, 1),
        (16, 8, 128, 1, 512, 512),
        (16, 8, 128, 1, 4096, 512),
    ]:
        width = -(-context // 16)
        nbytes = rows * width * 2 * kv_heads * 16 * size * dtype.itemsize
        q = torch.randn(rows * queries, heads, size).to(dtype)
        tables = torch.randperm(rows * width).int().view(rows, width)
        starts = torch.arange(0, rows * queries + 1, queries, dtype=torch.int32)
        contexts = torch.full((rows,), context, dtype=torch.int32)
        calls = [
            lambda q=q, c=cache, t=tables, s=starts, n=contexts: paged_attention(q, c, t, s, n, 0.1)
            for cache in (
                torch.randn(rows * width, 2, kv_heads, 16, size).to(dtype)
                for _ in range(copies_of(nbytes))
            )
        ]
        seen = queries * (context - queries / 2)
        name = f"S{rows} q{queries} ctx{context} H{heads}/{kv_heads} D{size}"
        yield name, calls, nbytes, 4 * rows * seen * heads * size


def small_cases(dtype):
    for rows in (1, 32, 512):
        x, w = torch.randn(rows, 1024).to(dtype), torch.ones(1024, dtype=dtype)
        wide = torch.randn(rows, 6144).to(dtype)
        qkv = torch.randn(rows, 32, 128).to(dtype)
        q, k, v = qkv.split([16, 8, 8], 1)
        positions, table = torch.arange(rows).int(), torch.randn(512, 128)
        cache, slots = torch.randn(64, 2, 8, 16, 128).to(dtype), torch.arange(rows)
        ids, embed = torch.arange(rows).int(), pack(torch.randn(4096, 1024).to(dtype))
        item = dtype.itemsize
        for name, call, nbytes in [
            ("rms_norm", lambda x=x, w=w: rms_norm(x, w, 1e-6, x), 4 * x.numel()),
            ("act_mul", lambda x=wide: act_mul(x, "silu"), 1.5 * wide.numel()),
            ("rope", lambda q=q, k=k, p=positions, t=table: rope(q, k, p, t), 48 * rows * 128),
            ("kv_write", lambda k=k, v=v, c=cache, s=slots: kv_write(k, v, c, s), 32 * rows * 128),
            ("embedding", lambda i=ids, w=embed: embedding(i, w), 2 * x.numel()),
        ]:
            yield f"{name} {rows}", [call], nbytes * item, 0


CASES = {"linear": linear_cases, "attention": attention_cases, "small": small_cases}


def round_of(calls, seconds):
    """Return the seconds per call in one short round."""
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        calls[count % len(calls)]()
        count += 1
    return (time.perf_counter() - start) / count


def report(op, name, calls, nbytes, flops, args, ceiling):
    tops, times = [], []
    calls[0]()
    for _ in range(args.rounds):
        tops.append(json.loads(subprocess.run(ceiling, capture_output=True, check=True).stdout))
        times.append(round_of(calls, args.seconds))
    best = min(times)
    most_bytes = max(t["gb_s"] for t in tops)
    most_flops = max(t[args.dtype] for t in tops)
    row = {"op": op, "case": name, "dtype": args.dtype, "threads": int(ceiling[1])}
    row |= {"best_us": round(best * 1e6, 1), "median_us": round(statistics.median(times) * 1e6, 1)}
    row |= {"gb_s": round(nbytes / best / 1e9, 1), "gflop_s": round(flops / best / 1e9, 1)}
    row |= {"ceiling_gb_s": most_bytes, "ceiling_gflop_s": most_flops}
    row["share"] = round(max(row["gb_s"] / most_bytes, row["gflop_s"] / most_flops), 2)
    print(json.dumps(row), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=sorted(CASES))
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.1)
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        ceiling = ceiling_program(folder)
        for op in [args.only] if args.only else sorted(CASES):
            for name, calls, nbytes, flops in CASES[op](dtype):
                report(op, name, calls, nbytes, flops, args, ceiling)


if __name__ == "__main__":
    main()

"""Dense ops on the GPU: achieved bytes/s or FLOP/s compared with the card's limits.

    python bench/gpu_ops.py [elementwise] [gemm] [host] [--json FILE]

Ceilings are measured first: a large copy (bytes read and written) and a large bf16 product.
Times are medians of graph replays over inputs that do not fit the cache together.
"""

import argparse
import itertools
import json
import time

import torch

from quire.kernels import act, add, embedding, layer_norm, linear, rms_norm, rope
from quire.kernels.framework.op import OPS

FILES = (act, add, embedding, layer_norm, linear, rms_norm, rope)  # the import registers its ops
SHAPES = {
    "llama-8b": {"E": 4096, "F": 14336, "H": 32, "K": 8, "D": 128},
    "qwen3-0.6b": {"E": 1024, "F": 3072, "H": 16, "K": 8, "D": 128},
}
BF16 = torch.bfloat16


def graph_ms(calls, repeats=10):
    """Median time of one call when all of them replay as one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # copies of inputs may be in progress
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        for _ in range(2):
            graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return times[len(times) // 2] / len(calls)


def rand(*shape):
    return torch.randn(*shape, device="cuda").to(BF16)


def ceilings():
    """Return (bytes/s of a copy, FLOP/s of a product)."""
    a, b = (torch.empty(1 << 30, dtype=BF16, device="cuda") for _ in range(2))
    copy = (
        2 * a.nbytes / graph_ms([lambda: torch.neg(a, out=b)]) * 1e3
    )  # by a kernel, not the copy engine
    x, w = rand(8192, 8192), rand(8192, 8192)
    return copy, 2 * 8192**3 / graph_ms([lambda: torch.mm(x, w.t())] * 4) * 1e3


def prepared(name, args):
    outs = OPS[name].gpu.outputs(*args)
    assert outs is not NotImplemented, name
    return lambda: OPS[name].gpu.launch(outs, *args)


def element_cases(s, t):
    """(label, op, arguments, bytes that must move)."""
    e, f, h, k, d = (s[c] for c in "EFHKD")
    qkv = rand(t, h + 2 * k, d)
    table = torch.randn(4096, d, device="cuda")
    positions = torch.arange(t, device="cuda", dtype=torch.int32) % 4096
    ids = torch.randint(0, 32000, (t,), device="cuda", dtype=torch.int32)
    w = rand(e)
    yield "rms_norm", "rms_norm", (rand(t, e), w, 1e-5), 4 * t * e
    yield "rms_norm + residual", "rms_norm", (rand(t, e), w, 1e-5, rand(t, e)), 8 * t * e
    yield "layer_norm + residual", "layer_norm", (rand(t, e), w, w, 1e-5, rand(t, e)), 8 * t * e
    yield "rms_norm of q heads", "rms_norm", (qkv[:, :h], rand(d), 1e-6), 4 * t * h * d
    args = (qkv[:, :h], qkv[:, h : h + k], positions, table)
    yield "rope", "rope", args, 4 * t * (h + k) * d
    yield "act_mul", "act_mul", (rand(t, 2 * f), "silu"), 6 * t * f
    yield "act", "act", (rand(t, f), "gelu_tanh"), 4 * t * f
    yield "add", "add", (rand(t, e), rand(t, e)), 6 * t * e
    yield "softcap", "softcap", (rand(t, e), 30.0), 4 * t * e
    yield "embedding", "embedding", (ids, rand(32000, e)), 4 * t * e


def elementwise(copy):
    for model, s in SHAPES.items():
        for t in (1, 256, 16384):
            for label, name, args, size in element_cases(s, t):
                ms = graph_ms([prepared(name, args)] * (20 if t < 1000 else 1))
                yield {"kind": "elementwise", "model": model, "op": label, "rows": t,
                       "us": ms * 1e3, "TB/s": size / ms / 1e9, "of": copy / 1e12}  # fmt: skip


def products(s):
    e, f, h, k, d = (s[c] for c in "EFHKD")
    yield "qkv", (h + 2 * k) * d, e
    yield "o", e, h * d
    yield "gate_up", 2 * f, e
    yield "down", e, f


def gemm(flops, rows=(16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)):
    for model, s in SHAPES.items():
        for name, o, i in products(s):
            copies = max(1, min(8, int(4e8 // (2 * o * i))))
            weights = [(torch.randn(o, i, device="cuda") * i**-0.5).to(BF16) for _ in range(copies)]
            for t in rows:
                x = rand(t, i)
                ms = graph_ms([prepared("linear", (x, w)) for w in weights])
                yield {"kind": "gemm", "model": model, "op": name, "rows": t, "us": ms * 1e3,
                       "TFLOP/s": 2 * t * o * i / ms / 1e9, "of": flops / 1e12,
                       "TB/s": 2 * (o * i + t * o + t * i) / ms / 1e9}  # fmt: skip


def host():
    """Return the host microseconds of an op call with a tiny input."""
    s = SHAPES["qwen3-0.6b"]
    cases = list(element_cases(s, 4))
    cases.append(("linear", "linear", (rand(4, 1024), rand(1024, 1024)), 0))
    for label, name, args, _ in cases:
        body = OPS[name].gpu
        for part in ("outputs", "both"):
            torch.cuda.synchronize()
            for n in (20, 400):
                began = time.perf_counter()
                for _ in range(n):
                    outs = body.outputs(*args)
                    if part == "both":
                        body.launch(outs, *args)
                us = (time.perf_counter() - began) / n * 1e6
                torch.cuda.synchronize()
            yield {"kind": "host", "op": label, "part": part, "us": us}


def show(row):
    values = [f"{v:9.2f} {k}" if isinstance(v, float) else f"{v!s:22}" for k, v in row.items()]
    print(" ".join(values), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=["elementwise", "gemm", "host"])
    parser.add_argument("--json", help="append the rows to this file, one a line")
    args = parser.parse_args()
    copy, flops = ceilings()
    print(
        f"{torch.cuda.get_device_name()}: copy {copy / 1e12:.2f} TB/s, {flops / 1e12:.0f} TFLOP/s"
    )
    rows = []
    for what in args.what:
        make = {"elementwise": lambda: elementwise(copy), "gemm": lambda: gemm(flops), "host": host}
        for row in make[what]():
            show(row)
            rows.append(row)
    if args.json:
        with open(args.json, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()

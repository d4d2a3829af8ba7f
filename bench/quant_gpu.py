"""Weights of few bits on the GPU: each layer of a model against bfloat16 and FP8, in one run.

    python bench/quant_gpu.py [--rows 1,8,16,32,64,128,2048,8192] [--models llama-8b,...]
                              [--formats w4g128,awq,...] [--json FILE]

A time is the median of graph replays over weights that do not fit the cache together. Then the sums
over all layers of a model, and over bfloat16; `fused` and `widened` show where the border between
them should be; and the banks of experts of a mixture, per step.
"""

import argparse
import json
from functools import partial

import torch
from gpu_ops import ceilings, graph_ms, rand

from quire.kernels.formats.fp8_weight import quantize_channels
from quire.kernels.formats.tiled_weight import pack_tiled_experts, pack_tiles
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.gpu.linear import fp8_linear, grouped_gemm, grouped_linear, grouped_widen
from quire.kernels.gpu.moe import moe_experts
from quire.kernels.moe_experts import ExpertActivation

LAYERS = {  # outputs, inputs
    "llama-8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    "qwen3-0.6b": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)],
    "qwen3-14b": [(7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408)],
    "llama-70b": [(10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)],
}
FORMATS = {  # bits, group (0: all inputs), kind
    "w4g128": (4, 128, "symmetric"),
    "w4g32": (4, 32, "symmetric"),
    "awq": (4, 128, "zeros"),
    "desc_act": (4, 128, "permuted"),
    "nf4": (4, 64, "table"),
    "mxfp4": (4, 32, "powers"),
    "q4_k": (4, 32, "offsets"),
    "q6_k": (6, 16, "factored"),
    "w8g128": (8, 128, "symmetric"),
    "q8_0": (8, 32, "symmetric"),
    "w8": (8, 0, "symmetric"),
    "w5g32": (5, 32, "symmetric"),
    "w3g128": (3, 128, "symmetric"),
    "w2g16": (2, 16, "offsets"),
}
EXPERTS = 128, 8, 2048, 768  # experts, of a token, hidden size, width: qwen3-30b-a3b


def codes_of(shape, name):
    """Random codes of a matrix [O, I], or of [X, O, I], whose products have a sane size."""
    bits, group, kind = FORMATS[name]
    inputs, most = shape[-1], (1 << bits) - 1
    group = group or inputs
    size = (*shape[:-1], inputs // group)
    q = torch.randint(0, most + 1, shape, dtype=torch.uint8, device="cuda")
    unit = 4 / most / inputs**0.5
    scale = GroupFactors(((torch.rand(size, device="cuda") + 0.5) * unit).half())
    sixes = torch.randint(1, 64, size, dtype=torch.uint8, device="cuda")
    values = torch.full((*size[:-1], -(-size[-1] // 8)), unit / 32, device="cuda").half()
    found = {"q": q, "bits": bits, "group": group, "scale": scale, "zero": most // 2 + 1}
    if kind == "zeros":
        found["zero"] = torch.randint(0, most + 1, size, dtype=torch.uint8, device="cuda")
    elif kind == "permuted":
        found["perm"] = torch.randperm(inputs, device="cuda").int()
    elif kind in ("table", "powers"):
        found.update(zero=0, table=torch.randn(16, device="cuda"))
        if kind == "powers":
            powers = torch.full(size, 121, dtype=torch.uint8, device="cuda")
            found["scale"] = GroupFactors(powers.view(torch.float8_e8m0fnu))
    elif kind in ("factored", "offsets"):
        found["scale"] = GroupFactors(values, sixes)
        if kind == "offsets":
            found.update(zero=0, offset=GroupFactors(-values * most / 2, sixes))
    return WeightCodes(**found)


def widened(y, x, weight):
    x = x if weight.perm is None else grouped_linear.gather_columns(x, weight.perm)
    torch.mm(x, grouped_widen.widen(weight, x.dtype).t(), out=y)


def fused(y, x, weight):
    x = x if weight.perm is None else grouped_linear.gather_columns(x, weight.perm)
    _, hopper, *_ = grouped_linear.gluon_modules(x)
    if hopper is not None and hopper.supports(x, weight):
        hopper.launch(y, x, weight)
    else:
        grouped_gemm.launch(y, x, weight)


def layer_lines(models, formats, rows, copy):
    for model in models:
        sums = {}
        for o, i in LAYERS[model]:
            copies = max(2, min(8, int(4e8 // (o * i)) + 1))
            plain = [rand(o, i) / i**0.5 for _ in range(copies)]
            small = [quantize_channels(w) for w in plain]
            times = {}
            for t in rows:
                x, y = rand(t, i), torch.empty(t, o, dtype=torch.bfloat16, device="cuda")
                times[t] = (x, y)
                wide = graph_ms([partial(torch.mm, x, w.t(), out=y) for w in plain])
                eight = graph_ms([partial(fp8_linear.launch, y, x, w) for w in small])
                for name, ms in (("bf16", wide), ("fp8", eight)):
                    sums[name, t] = sums.get((name, t), 0.0) + ms
            del plain, small
            for name in formats:
                few = [pack_tiles(codes_of((o, i), name), torch.bfloat16) for _ in range(copies)]
                for t in rows:
                    x, y = times[t]
                    ms = graph_ms([partial(grouped_linear.launch, y, x, w) for w in few])
                    line = {"model": model, "outputs": o, "inputs": i, "rows": t, "format": name,
                            "us": ms * 1e3, "TB/s": few[0].nbytes / ms / 1e9,
                            "of TB/s": copy / 1e12, "TFLOP/s": 2 * t * o * i / ms / 1e9}  # fmt: skip
                    if t > 64 and few[0].slices == 4:
                        for way in (fused, widened):
                            both = graph_ms([partial(way, y, x, w) for w in few])
                            line[f"{way.__name__} us"] = both * 1e3
                    sums[name, t] = sums.get((name, t), 0.0) + ms
                    yield line
        for (name, t), ms in sums.items():
            yield {"model": model, "format": name, "rows": t, "us of all layers": ms * 1e3,
                   "over bf16": sums["bf16", t] / ms, "over fp8": sums["fp8", t] / ms}  # fmt: skip


def expert_lines(formats, rows):
    count, top, size, width = EXPERTS
    gate = ExpertActivation()
    plain = [(rand(count, 2 * width, size) / size**0.5, rand(count, size, width) / width**0.5)]
    for name in formats:
        shapes = ((count, 2 * width, size), (count, size, width))
        if FORMATS[name][2] == "permuted":
            continue
        few = [tuple(pack_tiled_experts(codes_of(s, name), torch.bfloat16) for s in shapes)]
        for t in rows:
            x, y = rand(t, size), torch.empty(t, size, dtype=torch.bfloat16, device="cuda")
            ids = torch.rand(t, count, device="cuda").argsort(-1)[:, :top].int().contiguous()
            weights = torch.rand(t, top, device="cuda")
            wide, ms = (
                graph_ms([partial(moe_experts.launch, y, x, ids, weights, *one, gate) for one in b])
                for b in (plain, few)
            )
            yield {"experts": EXPERTS, "rows": t, "format": name, "us": ms * 1e3,
                   "over bf16": wide / ms}  # fmt: skip


def pack_line():
    """Seconds that all layers of llama-8b take to pack, and the peak of memory beside them."""
    total = 0.0
    for o, i in LAYERS["llama-8b"]:
        codes = codes_of((o, i), "w4g128")
        pack_tiles(codes, torch.bfloat16)
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin.record()
        for _ in range(4):
            pack_tiles(codes, torch.bfloat16)
        end.record()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        total += begin.elapsed_time(end) / 4 * 32 / 1e3
    return {"pack": "llama-8b", "seconds": total, "peak bytes of the last layer": peak}


def main():
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--rows", default="1,8,16,32,64,128,2048,8192")
    parse.add_argument("--models", default="llama-8b,qwen3-0.6b")
    parse.add_argument("--formats", default=",".join(FORMATS))
    parse.add_argument("--json")
    args = parse.parse_args()
    rows, formats = [int(n) for n in args.rows.split(",")], args.formats.split(",")
    copy, _ = ceilings()
    lines = []

    def note(line):
        lines.append(line)
        print(json.dumps(line), flush=True)

    note(pack_line())
    for line in layer_lines(args.models.split(","), formats, rows, copy):
        note(line)
    for line in expert_lines(formats, rows):
        note(line)
    if args.json:
        with open(args.json, "a", encoding="utf-8") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()

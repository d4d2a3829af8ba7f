"""Products of 4 bits on Hopper by plan: each checked, then timed beside bfloat16 and other kernels.

    python bench/quant_tiles.py check|time SHAPE,SHAPE [--rows 128,256] [--json FILE]

SHAPE: of the four products of llama-8b, from 0. A time is the median of graph replays over weights
that do not fit the cache together.
"""

import argparse
import json
from functools import partial

import torch
from gpu_ops import graph_ms, rand
from quant_gpu import LAYERS, codes_of, fused, widened

from quire.kernels.formats.tiled_weight import pack_tiles
from quire.kernels.gpu.linear import grouped_gemm, grouped_gemm_tiles, grouped_linear
from quire.kernels.gpu.runtime.target import sm_count

ROWS = "1,8,16,32,64,96,128,192,256,384,512,768,1024,2048,4096,8192"


def plans(rows, weight):
    """(name, plan) of the splits worth a measurement."""
    found, bands = {}, weight.shape[0] // 128
    for tall, stages in ((128, 5), (256, 3)):
        tiles = -(-rows // tall) * bands
        for parts in (1, 2, 3, 4):
            for tail in (False, True) if parts > 1 else (False,):
                split = tiles % 132 if tail else tiles
                if weight.blocks % parts or weight.blocks // parts < stages:
                    continue
                if parts > 1 and (
                    tiles > 8 * bands or split * parts > 270 or (tail and tiles < 132)
                ):
                    continue
                name = f"t{tall} p{parts}" + (" tail" if tail else "")
                found[name] = grouped_gemm_tiles.GroupedTilesPlan(tall, parts, tail, stages)
    return found


def check(shape, rows, share, shares):
    weight = pack_tiles(codes_of(shape, "awq"), torch.bfloat16)
    plain = weight.dequantize(torch.bfloat16).float()
    for t in rows:
        x, y = rand(t, shape[1]), torch.empty(t, shape[0], dtype=torch.bfloat16, device="cuda")
        want = x.float() @ plain.t()
        bound = want.abs() * 2**-8 + 2**-9 * want.std()
        for name, plan in [*plans(t, weight).items()][share::shares]:
            line = {"check": shape, "rows": t, "plan": name}
            try:
                y.fill_(float("nan"))
                grouped_gemm_tiles.launch(y, x, weight, None, plan)
                first = y.clone()
                over = ((first.float() - want).abs() / bound).max().item()
                grouped_gemm_tiles.launch(y, x, weight, None, plan)
                line |= {"error over bound": over, "same": torch.equal(first, y),
                         "counters": int(weight.counters.abs().sum())}  # fmt: skip
            except Exception as error:  # noqa: BLE001 - other plans are measured
                line["failed"] = repr(error)[-300:]
            yield line


def checked(path, shape):
    """Names of the plans that passed all their checks."""
    good = {}
    with open(path, encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            if line.get("check") == list(shape):
                passed = line.get("error over bound", 9) < 1.5 and line.get("same")
                good[line["plan"]] = good.get(line["plan"], True) and passed
    return {name for name, passed in good.items() if passed}


def time(shape, rows, good):
    o, i = shape
    copies = max(2, min(8, int(4e8 // (o * i)) + 1))
    plain = [rand(o, i) / i**0.5 for _ in range(copies)]
    few = [pack_tiles(codes_of(shape, "awq"), torch.bfloat16) for _ in range(copies)]
    for t in rows:
        x, y = rand(t, i), torch.empty(t, o, dtype=torch.bfloat16, device="cuda")
        line = {"us": shape, "rows": t}

        def measure(name, calls, line=line):
            try:
                line[name] = round(graph_ms(calls, 7) * 1e3, 2)
            except Exception as error:  # noqa: BLE001 - other plans are measured
                line[name] = repr(error)[-200:]

        measure("bf16", [partial(torch.mm, x, w.t(), out=y) for w in plain])
        measure("rule", [partial(grouped_linear.launch, y, x, w) for w in few])
        if 64 < t <= 1024:
            measure("before", [partial(fused, y, x, w) for w in few])
        if t == 64:
            measure("mma", [partial(grouped_gemm.launch, y, x, w) for w in few])
        if t >= 256:
            measure("widened", [partial(widened, y, x, w) for w in few])
        if t > 64:
            plan = grouped_gemm_tiles.plan_grouped_tiles(t, few[0], sm_count(x.device))
            line["plan"] = f"t{plan.rows} p{plan.parts}" + (" tail" if plan.tail else "")
            for name, plan in plans(t, few[0]).items():
                if good is not None and name not in good:
                    continue
                measure(
                    name, [partial(grouped_gemm_tiles.launch, y, x, w, None, plan) for w in few]
                )
        yield line


def main():
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("what", choices=("check", "time"))
    parse.add_argument("shapes")
    parse.add_argument("--rows", default=ROWS)
    parse.add_argument("--share", default="0/1", help="of the plans that are checked")
    parse.add_argument("--checked", help="file of checks: only plans that passed are timed")
    parse.add_argument("--json")
    args = parse.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    for at in args.shapes.split(","):
        shape, rows = LAYERS["llama-8b"][int(at)], [int(n) for n in args.rows.split(",")]
        share = [int(n) for n in args.share.split("/")]
        good = checked(args.checked, shape) if args.checked else None
        lines = check(shape, rows, *share) if args.what == "check" else time(shape, rows, good)
        for line in lines:
            print(json.dumps(line), flush=True)
            if args.json:
                with open(args.json, "a", encoding="utf-8") as out:
                    out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

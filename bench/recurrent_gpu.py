"""Recurrent layers on the GPU: microseconds of each op beside its bytes, then engines, in one run.

    python bench/recurrent_gpu.py [MODELS] [--rows 1,8,64,256] [--prompts 1x512,1x4096,32x4096]
                                  [--tiles 512,2048] [--reference] [--seconds 165] [--json FILE]

Layer shapes are those of Qwen3-Next-80B-A3B and mamba2-2.7b. A time is the median of graph replays
over states that do not fit the cache together; "floor" is its bytes at the rate of a copy, measured
first. --prompts: of a step, also token by token. --tiles: other numbers of a state for each program. MODELS: a folder of make_models.py, whose
qwen3-next-cut (12 of 48 layers) and mamba2-2.7b run bench/offline.py with dummy weights; their floor
is the bytes that a step reads and writes, of prompts the products. One JSON line for each result,
then a table. --seconds: nothing is begun later than this.
"""

import argparse
import json
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from gpu_ops import ceilings, graph_ms, rand

from quire.kernels.causal_conv import causal_conv
from quire.kernels.framework import lazy_fusion
from quire.kernels.framework.op import OPS
from quire.kernels.gated_delta_rule import gated_delta_rule
from quire.kernels.gated_norm import gated_rms_norm
from quire.kernels.gpu.recurrent import gated_delta_rule as delta_body
from quire.kernels.gpu.recurrent import ssd_scan as ssd_body
from quire.kernels.ssd_scan import ssd_scan
from quire.kernels.state_rows import StateRows

BEGAN = time.monotonic()
OFFLINE = Path(__file__).resolve().parent / "offline.py"
CUDA = torch.device("cuda")
STATES = 320  # rows of state tensors: many times the cache
SCANS = ("gated_delta_rule", "ssd_scan")
ENGINES = {"qwen3-next-cut": "decode1,rows32,prefill", "mamba2-2.7b": "decode1,rows32,prefill"}


def float32(*shape):
    return torch.rand(*shape, device=CUDA)


def ops_of(tokens):
    """model -> (op, arguments without state and rows, shape and dtype of the state, bytes)."""
    wide, mixed, ba = rand(tokens, 12288), rand(tokens, 8192), rand(tokens, 64)
    q, k, v = (one.view(tokens, -1, 128) for one in torch.split(mixed, [2048, 2048, 4096], dim=1))
    y = float32(tokens, 4096)
    bf16, f32 = torch.bfloat16, torch.float32
    yield ("qwen3-next", causal_conv, dict(x=wide[:, :8192], weight=rand(8192, 4), bias=None, silu=True),
           (8192, 3), bf16, tokens * 8192 * 4)  # fmt: skip
    yield ("qwen3-next", gated_delta_rule,
           dict(q=q, k=k, v=v, a=ba[:, 32:], b=ba[:, :32], a_log=float32(32), dt_bias=float32(32)),
           (32, 128, 128), f32, tokens * (8192 * 2 + 128 + 4096 * 4))  # fmt: skip
    yield ("qwen3-next", gated_rms_norm,
           dict(x=y, gate=wide[:, 8192:], weight=rand(128), eps=1e-6, size=128, gate_first=False),
           None, f32, tokens * 4096 * 8)  # fmt: skip
    wide, mixed, y = rand(tokens, 10576), rand(tokens, 5376), float32(tokens, 5120)
    x, b, c = torch.split(mixed, [5120, 128, 128], dim=1)
    yield ("mamba2-2.7b", causal_conv,
           dict(x=wide[:, 5120:10496], weight=rand(5376, 4), bias=rand(5376), silu=True),
           (5376, 3), bf16, tokens * 5376 * 4)  # fmt: skip
    yield ("mamba2-2.7b", ssd_scan,
           dict(x=x.view(tokens, 80, 64), dt=wide[:, 10496:], b=b.view(tokens, 1, 128),
                c=c.view(tokens, 1, 128), a_log=float32(80), d=float32(80), dt_bias=float32(80),
                dt_limit=(0.0, float("inf"))),
           (80, 64, 128), f32, tokens * (5376 * 2 + 160 + 5120 * 4))  # fmt: skip
    yield ("mamba2-2.7b", gated_rms_norm,
           dict(x=y, gate=wide[:, :5120], weight=rand(5120), eps=1e-5, size=5120, gate_first=True),
           None, f32, tokens * 5120 * 8)  # fmt: skip


def rows_of(count, tokens):
    """StateRows of calls that take turns over all states."""
    calls = max(2, min(16, STATES // (2 * count)))
    for i in range(calls):
        rows = (torch.arange(count, device=CUDA) * 7 + i * count * 11) % (STATES - 1)
        decodes, each = count if tokens == count else 0, tokens // count
        spans = () if decodes else tuple((at, at + each) for at in range(0, tokens, each))
        starts = torch.arange(0, tokens + 1, each, dtype=torch.int32, device=CUDA)
        yield StateRows(rows, decodes, spans, starts=starts)


def call(op, args):
    op(**args)
    lazy_fusion.flush()


def op_lines(rows, tokens, copy, only=()):
    for model, op, args, shape, dtype, size in ops_of(tokens):
        if only and op.__name__ not in only:
            continue
        steps = [args]
        if shape is not None:
            state = torch.zeros(STATES, *shape, dtype=dtype, device=CUDA)
            size += 2 * rows * state[0].nbytes
            steps = [{**args, "state": state, "rows": one} for one in rows_of(rows, tokens)]
        us = (
            graph_ms([partial(call, op, one) for one in steps] * (4 if len(steps) < 4 else 1)) * 1e3
        )
        floor = size / copy * 1e6
        yield {"kind": "op", "model": model, "op": op.__name__, "rows": rows, "tokens": tokens,
               "us": us, "floor us": floor, "of floor": floor / us}  # fmt: skip


@contextmanager
def token_by_token():
    """Within, no row goes in chunks."""
    bodies = [(body, body.takes_chunks) for body in (delta_body, ssd_body)]
    for body, _ in bodies:
        body.takes_chunks = lambda *_: False
    try:
        yield
    finally:
        for body, takes in bodies:
            body.takes_chunks = takes


def prompt_lines(text, copy):
    """text: prompts x tokens of each."""
    count, length = map(int, text.split("x"))
    yield from op_lines(count, count * length, copy)
    with token_by_token():
        for line in op_lines(count, count * length, copy, SCANS):
            yield {**line, "form": "token by token"}


def reference_lines(rows, tokens):
    """What ran before: PyTorch, launch by launch."""
    for model, op, args, shape, dtype, _ in ops_of(tokens):
        given = dict(args)
        if shape is not None:
            state = torch.zeros(STATES, *shape, dtype=dtype, device=CUDA)
            given |= {"state": state, "rows": next(rows_of(rows, tokens))}
        for _ in range(2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            OPS[op.__name__].reference(**given)
            torch.cuda.synchronize()
        us = (time.perf_counter() - began) * 1e6
        yield {"kind": "reference", "model": model, "op": op.__name__, "rows": rows,
               "tokens": tokens, "us": us}  # fmt: skip


def weights_of(model, rows):
    """(numbers of weights that a step of so many rows reads, those that one token multiplies)."""
    if model == "mamba2-2.7b":
        e, inner = 2560, 5120
        whole = 64 * (e * (2 * inner + 256 + 80) + inner * e + 5376 * 4) + 50288 * e
        return whole, whole
    e, expert = 2048, 3 * 2048 * 512
    delta = e * (12288 + 64) + 4096 * e + 8192 * 4
    attention = e * (8192 + 1024) + 4096 * e
    dense = 9 * delta + 3 * attention + 12 * (e * 513 + expert) + 151936 * e
    read = 512 * (1 - (1 - 10 / 512) ** rows)  # experts, of rows that choose at random
    return dense + 12 * read * expert, dense + 12 * 10 * expert


def state_bytes(model):
    """Of one sequence."""
    if model == "mamba2-2.7b":
        return 64 * (80 * 64 * 128 * 4 + 5376 * 3 * 2)
    return 9 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)


def floor_of(model, case, copy, flops):
    """Tokens a second that the card's limits allow."""
    rows = {"decode1": 1, "rows32": 32}.get(case)
    read, multiplied = weights_of(model, rows or 1)
    if rows is None:
        return flops / (2 * multiplied)
    return rows * copy / (2 * read + 2 * rows * state_bytes(model))


def engine_lines(models, model, cases, deadline, copy, flops):
    kw = {"max_model_len": 4608, "max_num_seqs": 64, "gpu_memory_utilization": 0.9}
    command = [sys.executable, str(OFFLINE), "--engine", "quire", "--model", f"{models}/{model}",
               "--cases", cases, "--repeat", "1", "--vocab", "50000", "--kw", json.dumps(kw)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        out, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
    for text in out.splitlines():
        if text[:1] != "{":
            continue
        line = json.loads(text)
        if line["case"] != "startup":
            rate = line["total_tok_s" if line["case"] == "prefill" else "out_tok_s"]
            floor = floor_of(model, line["case"], copy, flops)
            line = {**line, "tok/s": rate, "limit tok/s": floor, "of limit": rate / floor}
        yield {"kind": "engine", **line}
    if process.returncode:
        yield {"kind": "engine", "model": model, "case": "ended", "status": process.returncode}


def lines_of(args, deadline):
    copy, flops = ceilings()
    rows = [int(n) for n in args.rows.split(",")]
    yield {"kind": "card", "TB/s": copy / 1e12, "TFLOP/s": flops / 1e12}
    for count in rows:
        yield from op_lines(count, count, copy)
    for prompts in args.prompts.split(","):
        yield from prompt_lines(prompts, copy)
    for tile in [int(n) for n in args.tiles.split(",") if n]:
        before, delta_body.TILE, ssd_body.TILE = delta_body.TILE, tile, tile
        for count in (1, 64):
            for line in op_lines(count, count, copy, SCANS):
                yield {**line, "tile": tile}
        delta_body.TILE = ssd_body.TILE = before
    if args.reference:
        yield from reference_lines(64, 64)
        yield from reference_lines(1, 4096)
    torch.cuda.empty_cache()
    for model, cases in ENGINES.items() if args.models else ():
        if time.monotonic() < deadline - 20:
            yield from engine_lines(args.models, model, cases, deadline, copy, flops)


def show(line):
    print(
        " ".join(f"{v:9.2f} {k}" if isinstance(v, float) else f"{v!s:18}" for k, v in line.items())
    )


def main():
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("models", nargs="?")
    parse.add_argument("--rows", default="1,8,64,256")
    parse.add_argument("--prompts", default="1x512,1x4096,32x4096")
    parse.add_argument("--tiles", default="512,2048")
    parse.add_argument("--reference", action="store_true")
    parse.add_argument("--seconds", type=float, default=165)
    parse.add_argument("--json")
    args = parse.parse_args()
    found = []
    for line in lines_of(args, BEGAN + args.seconds):
        found.append(line)
        print(json.dumps(line), flush=True)
    if args.json:
        with open(args.json, "a", encoding="utf-8") as out:
            out.writelines(json.dumps(line) + "\n" for line in found)
    for line in found:
        show({k: v for k, v in line.items() if k not in ("engine", "version", "stages")})


if __name__ == "__main__":
    main()

"""Adapters on the GPU: what they add to each linear layer, over the base product, in one run.

    python bench/lora_gpu.py [--forms together,apart,beside] [--rows 1,8,32,64,4096] [--adapters 1,8,32] [--ranks 16,64]
                             [--models llama-8b,...] [--max-rank 0] [--slots 0]
                             [--json FILE]

A time is the median of graph replays over weights and banks that do not fit the cache together. A
line has the base product alone and with the adapters of all its rows, the activation after gate
and up in both; then the sums of a model's layers. --max-rank: the rank of the banks, if they are to be larger than the adapters.
"""

import argparse
import itertools
import json
from functools import partial

import torch
from gpu_ops import graph_ms, rand

from quire.kernels.act import act_mul
from quire.kernels.formats.lora_bank import LoraBank, LoraPart, LoraRows
from quire.kernels.framework import lazy_fusion
from quire.kernels.gpu.linear import gemv
from quire.kernels.gpu.linear.gemv import FusedActivation
from quire.kernels.gpu.lora import gemv_lora
from quire.kernels.gpu.lora import lora_linear as body
from quire.kernels.linear import linear
from quire.kernels.lora import lora_linear, sort_rows
from quire.kernels.rms_norm import rms_norm

LAYERS = {  # parts, inputs
    "llama-8b": {"qkv": ((4096, 1024, 1024), 4096), "o": ((4096,), 4096),
                 "gate_up": ((14336, 14336), 4096), "down": ((4096,), 14336)},
    "qwen3-0.6b": {"qkv": ((2048, 1024, 1024), 1024), "o": ((1024,), 2048),
                   "gate_up": ((3072, 3072), 1024), "down": ((1024,), 3072)},
}  # fmt: skip
DEPTH = {"llama-8b": 32, "qwen3-0.6b": 28}
CUDA = torch.device("cuda", 0)
SIDE = torch.cuda.Stream()


def bank_of(adapters, slots, rank, most, parts, inputs):
    bank = LoraBank.allocate(slots, most, inputs, parts, torch.bfloat16, CUDA)
    for slot in range(adapters):
        bank.write(slot, [LoraPart(rand(rank, inputs) / 64, rand(rank, o) / 64) for o in parts])
    return bank


def first(x, norm):
    return x if norm is None else rms_norm(x, norm, 1e-6)[0]


def base(x, norm, w, gated):
    finish(linear(first(x, norm), w), gated)


def together(x, norm, w, gated, bank, rows):
    x = first(x, norm)
    finish(lora_linear(linear(x, w), x, bank, rows), gated)


def apart(x, norm, w, gated, bank, rows):
    x = first(x, norm)
    y = linear(x, w)
    lazy_fusion.flush()
    body.launch(y, y, x, bank, rows, act_of(y, gated), body.launch_shrink(y, x, bank, rows))


def beside(x, norm, w, gated, bank, rows):
    x = first(x, norm)
    lazy_fusion.flush()
    main = torch.cuda.current_stream()
    y = x.new_empty(len(x), len(w))
    SIDE.wait_stream(main)
    with torch.cuda.stream(SIDE):
        v = body.launch_shrink(y, x, bank, rows)
    torch.mm(x, w.t(), out=y)
    main.wait_stream(SIDE)
    body.launch(y, y, x, bank, rows, act_of(y, gated), v)


FORMS = {"together": together, "apart": apart, "beside": beside}


def act_of(y, gated):
    return FusedActivation("silu", y.new_empty(len(y), y.shape[1] // 2)) if gated else None


def finish(y, gated):
    if gated:
        act_mul(y, "silu")
    lazy_fusion.flush()


def set_plan(text):
    """Other splits of gate_up for one row."""
    shape, _, numbers = text.partition("=")
    sizes = tuple(int(n) for n in shape.split("x"))
    plan, before = gemv.GemvPlan(*(int(n) for n in numbers.split(","))), gemv_lora.plan_gemv
    gemv_lora.plan_gemv = lambda *shape: plan if shape == (*sizes, True) else before(*shape)


def lines(model, counts, adapters, ranks, most, slots, form):
    sums = {}
    for layer, (parts, inputs) in LAYERS[model].items():
        outputs, gated = sum(parts), layer == "gate_up"
        copies = max(2, min(8, int(2e8 // (outputs * inputs)) + 1))
        weights = [rand(outputs, inputs) / inputs**0.5 for _ in range(copies)]
        for rank in ranks:
            for some in adapters:
                size = max(most, rank)
                room = max(slots, some)
                banks = [bank_of(some, room, rank, size, parts, inputs) for _ in range(copies)]
                for t in counts:
                    if some > t:
                        continue
                    rows = LoraRows.allocate(t, room, CUDA)
                    rows.slots.copy_(torch.arange(t, device=CUDA) * some // t)
                    sort_rows(rows)
                    x, used = rand(t, inputs), [(bank, rows) for bank in banks]
                    norm = rand(inputs) if layer in ("qkv", "gate_up") else None
                    plain = graph_ms([partial(base, x, norm, w, gated) for w in weights])
                    calls = [partial(form, x, norm, w, gated, *b) for w, b in zip(weights, used)]
                    both = graph_ms(calls)
                    key = (t, some, rank)
                    before = sums.get(key, (0.0, 0.0))
                    sums[key] = before[0] + plain, before[1] + both
                    yield {"model": model, "layer": layer, "rows": t, "adapters": some,
                           "rank": rank, "base us": plain * 1e3, "more us": (both - plain) * 1e3,
                           "ratio": plain / both}  # fmt: skip
                del banks
    for (t, some, rank), (plain, both) in sums.items():
        yield {"model": model, "rows": t, "adapters": some, "rank": rank,
               "base us of a layer": plain * 1e3, "more us of a layer": (both - plain) * 1e3,
               "more ms of a step": (both - plain) * DEPTH[model], "ratio": plain / both}  # fmt: skip


def main():
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--rows", default="1,8,32,64,4096")
    parse.add_argument("--adapters", default="1,8,32")
    parse.add_argument("--ranks", default="16,64")
    parse.add_argument("--models", default="llama-8b")
    parse.add_argument("--max-rank", type=int, default=0)
    parse.add_argument("--slots", type=int, default=0)
    parse.add_argument("--forms", default="together")
    parse.add_argument("--plan")
    parse.add_argument("--json")
    args = parse.parse_args()
    rows, adapters, ranks = (
        [int(n) for n in text.split(",")] for text in (args.rows, args.adapters, args.ranks)
    )
    found = []
    if args.plan:
        set_plan(args.plan)
    for model, form in itertools.product(args.models.split(","), args.forms.split(",")):
        for line in lines(model, rows, adapters, ranks, args.max_rank, args.slots, FORMS[form]):
            line = {**line, "slots": args.slots, "form": form}
            found.append(line)
            print(json.dumps(line), flush=True)
    if args.json:
        with open(args.json, "a", encoding="utf-8") as out:
            out.writelines(json.dumps(line) + "\n" for line in found)


if __name__ == "__main__":
    main()

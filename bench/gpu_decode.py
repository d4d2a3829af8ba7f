"""One decode step, layers and head in one CUDA graph, fused and op by op.

    python bench/gpu_decode.py [--model llama-8b,qwen3-0.6b] [--rows 1,8] [--quantize fp8]
                               [--context 0] [--plans JSON] [--adapters 1,8] [--slots 32] [--max-rank 16]

Attention over --context tokens; with 0 it is left out, and rotated queries are the input of the
output projection. The rest should take the time that reading the weights takes, which is printed
as the ceiling.

--plans: a list of objects, each a run of its own, fused: names of shapes ("28672x4096") to fields of
GroupedSmallMPlan for weights in few bits; {} is the plans in use.

--adapters: steps with so many adapters of rank 16 on all products of a layer, in banks of --slots and
--max-rank, over the step without.
"""

import argparse
import functools
import json
from contextlib import ExitStack
from unittest import mock

import torch
from gpu_ops import SHAPES, ceilings, graph_ms
from quant_gpu import codes_of

from quire.kernels.act import act_mul
from quire.kernels.embedding import embedding
from quire.kernels.formats.fp8_weight import quantize_blocks, quantize_channels
from quire.kernels.formats.lora_bank import LoraBank, LoraRows
from quire.kernels.formats.tiled_weight import pack_tiles
from quire.kernels.framework import lazy_fusion
from quire.kernels.gpu.linear import grouped_small_m
from quire.kernels.kv_write import kv_write
from quire.kernels.linear import linear
from quire.kernels.lora import lora_linear, sort_rows
from quire.kernels.paged_attention import paged_attention
from quire.kernels.rms_norm import rms_norm
from quire.kernels.rope import rope

DEPTH = {"llama-8b": (32, 128256, False), "qwen3-0.6b": (28, 151936, True)}
BLOCK = 16  # tokens of a block of the cache


def in_four_bits(weight):
    return pack_tiles(codes_of(tuple(weight.shape), "awq"), torch.bfloat16)


QUANTIZE = {"fp8": quantize_channels, "fp8_block": quantize_blocks, "awq": in_four_bits,
            "none": lambda weight: weight}  # fmt: skip


class Stack:
    """Random layers and a head of one model's shape."""

    def __init__(self, model, quantize):
        self.s = SHAPES[model]
        layers, vocab, self.head_norms = DEPTH[model]
        e, f, h, k, d = (self.s[c] for c in "EFHKD")
        shapes = {
            "qkv": ((h + 2 * k) * d, e),
            "o": (e, h * d),
            "gate_up": (2 * f, e),
            "down": (e, f),
        }
        self.layers = [
            {name: quantize(self._weight(*shape)) for name, shape in shapes.items()}
            for _ in range(layers)
        ]
        self.parts = {"qkv": (h * d, k * d, k * d), "o": (e,), "gate_up": (f, f), "down": (e,)}
        self.banks = None
        self.head = self._weight(vocab, e)
        self.norm = torch.ones(e, device="cuda", dtype=torch.bfloat16)
        self.head_norm = torch.ones(d, device="cuda", dtype=torch.bfloat16)

    def _weight(self, outputs, inputs):
        shape = (outputs, inputs)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * inputs**-0.5

    def add_banks(self, slots, rank, most):
        """Adapters of one rank in every slot of banks that have room for `most` ranks."""
        self.banks = []
        for layer in self.layers:
            banks = {}
            for name, parts in self.parts.items():
                given = (
                    slots,
                    most,
                    layer[name].shape[1],
                    parts,
                    torch.bfloat16,
                    torch.device("cuda"),
                )
                bank = LoraBank.allocate(*given)
                bank.a.normal_(std=1 / 64)
                bank.b.normal_(std=1 / 64)
                bank.ranks.fill_(rank)
                banks[name] = bank.narrow(rank)
            self.banks.append(banks)

    def bytes(self):
        return self.head.nbytes + sum(w.nbytes for layer in self.layers for w in layer.values())

    def inputs(self, rows, context):
        k, d = self.s["K"], self.s["D"]
        numbers = functools.partial(torch.arange, device="cuda", dtype=torch.int32)
        length = max(context, 1)
        width = -(-length // BLOCK)
        shape = rows * width, 2, k, BLOCK, d
        return {
            "ids": torch.zeros(rows, device="cuda", dtype=torch.int32),
            "positions": torch.full((rows,), length - 1, device="cuda", dtype=torch.int32),
            "table": torch.randn(4096, d, device="cuda"),
            "slots": numbers(rows).long() * (width * BLOCK) + length - 1,
            "cache": torch.zeros(shape, device="cuda", dtype=torch.bfloat16),
            "attention": {
                "tables": numbers(rows * width).view(rows, width),
                "q_starts": numbers(rows + 1),
                "contexts": torch.full((rows,), length, device="cuda", dtype=torch.int32),
                "scale": d**-0.5, "decodes": rows, "max_context": length,
                "counters": torch.zeros(1 << 16, device="cuda", dtype=torch.int32),
            } if context else None,
        }  # fmt: skip

    def step(self, t):
        """Return the logits of every row."""
        h, k, d = (self.s[c] for c in "HKD")
        x, res = embedding(t["ids"], self.head), None
        rows = x.shape[0]
        for i in range(len(self.layers)):
            product = functools.partial(self._product, i, t.get("adapters"))
            x, res = rms_norm(x, self.norm, 1e-5, res)
            heads = product("qkv", x).view(rows, -1, d)
            q, key, value = torch.split(heads, [h, k, k], dim=1)
            q, key = self._turned(q, key, t)
            kv_write(key, value, t["cache"], t["slots"])
            if t["attention"] is not None:
                q = paged_attention(q, t["cache"], k=key, v=value, **t["attention"])
            x = product("o", q.view(rows, -1))
            x, res = rms_norm(x, self.norm, 1e-5, res)
            x = product("down", act_mul(product("gate_up", x), "silu"))
        out = linear(rms_norm(x, self.norm, 1e-5, res)[0], self.head)
        lazy_fusion.flush()
        return out

    def _product(self, i, adapters, name, x):
        y = linear(x, self.layers[i][name])
        return y if adapters is None else lora_linear(y, x, self.banks[i][name], adapters)

    def _turned(self, q, k, t):
        if self.head_norms:
            return rope(self._normed(q), self._normed(k), t["positions"], t["table"])
        return rope(q, k, t["positions"], t["table"])

    def _normed(self, heads):
        return rms_norm(heads, self.head_norm, 1e-6)[0]


def compare_adapters(stack, rows, args):
    """Print the step without adapters and with so many, in turn."""
    given = stack.inputs(rows, args.context)
    for count in args.adapters:
        if count > rows:
            continue
        some = LoraRows.allocate(rows, args.slots, torch.device("cuda"))
        some.slots.copy_(torch.arange(rows, device="cuda") * count // rows)
        sort_rows(some)
        plain, adapted = (
            graph_ms([functools.partial(stack.step, t)])
            for t in (given, given | {"adapters": some})
        )
        more = (adapted - plain) * 1e3 / len(stack.layers)
        found = {"rows": rows, "adapters": count, "slots": args.slots, "max rank": args.max_rank,
                 "ms": plain, "ms adapted": adapted, "ratio": plain / adapted,
                 "more us of a layer": more}  # fmt: skip
        print(json.dumps(found), flush=True)


def with_plans(plans, stack):
    """Multiply by weights in few bits with these plans, until the stack closes."""
    own = grouped_small_m.plan_grouped_small_m

    def plan(rows, weight, pair):
        found = plans.get("x".join(map(str, weight.shape)))
        return grouped_small_m.GroupedSmallMPlan(*found) if found else own(rows, weight, pair)

    stack.enter_context(mock.patch.object(grouped_small_m, "plan_grouped_small_m", plan))


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-8b,qwen3-0.6b")
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--quantize", default="none", choices=QUANTIZE)
    parser.add_argument("--context", type=int, default=0)
    parser.add_argument("--plans", type=json.loads, default=[])
    parser.add_argument("--adapters", type=lambda text: [*map(int, text.split(","))], default=[])
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--max-rank", type=int, default=16)
    args = parser.parse_args()
    copy, _ = ceilings()
    for model in args.model.split(","):
        stack = Stack(model, QUANTIZE[args.quantize])
        if args.adapters:
            stack.add_banks(args.slots, 16, args.max_rank)
        for rows in map(int, args.rows.split(",")):
            step = functools.partial(stack.step, stack.inputs(rows, args.context))
            for plans in args.plans:
                with ExitStack() as patches:
                    with_plans(plans, patches)
                    print(f"{model} {rows} rows: {graph_ms([step]):.3f} ms, {plans}", flush=True)
            if args.adapters:
                compare_adapters(stack, rows, args)
            if args.plans or args.adapters:
                continue
            fused = graph_ms([step])
            with lazy_fusion.disabled():
                alone = graph_ms([step])
            rate, size = stack.bytes() / fused / 1e9, stack.bytes() / 1e9
            print(
                f"{model} {args.quantize} {rows} rows: {fused:.3f} ms fused, {alone:.3f} op by op; "
                f"{size:.2f} GB at {rate:.2f} TB/s (a copy: {copy / 1e12:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Attention on the GPU: bytes/s of decode and FLOP/s of prompts, compared with torch's own and with
the card.

    python bench/attention.py [decode] [one] [prefill] [--json FILE]

decode   many rows: keys and values read once, over the time
one      one row at several contexts: microseconds of a launch, alone and from the raw qkv product
prefill  whole prompts, chunks and short prompts; cuDNN's attention on the same tensors
"""

import argparse
import json
import random

import torch
from gpu_ops import ceilings, graph_ms, rand
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from quire.kernels.gpu.attention import norm_rope_write, paged_attention_fused
from quire.kernels.gpu.attention.split_plan import AttentionExtras
from quire.kernels.paged_attention import paged_attention

B, D = 16, 128
HEADS = {"llama-8b": (32, 8), "qwen3-0.6b": (16, 8), "qwen3-30b-a3b": (32, 4)}
MIXED = random.Random(1).choices(range(64, 1500), k=1024)
CROWDS = {
    "1024x800": [800] * 1024,
    "256x2000": [2000] * 256,
    "1024 of 64..1500": MIXED,
    "256 of 64..1500": MIXED[:256],
    "64 of 64..1500": MIXED[:64],
    "256x100": [100] * 256,
    "32x800": [800] * 32,
    "8x800": [800] * 8,
    "16x32000": [32000] * 16,
    "9x32000": [32000] * 9,
    "32000 and 15x300": [32000] + [300] * 15,
    "32000 and 63x600": [32000] + [600] * 63,
}
PROMPTS = {
    "4x4096": [(4096, 4096)] * 4,
    "4x2048 after 4096": [(2048, 6144)] * 4,
    "16x512": [(512, 512)] * 16,
    "1x32000": [(32000, 32000)],
    "8192 after 24000": [(8192, 32192)],
    "64 of 64..900": [(n, n) for n in random.Random(2).choices(range(64, 900), k=64)],
}


class Cached:
    """Sequences of (queries, context) in a cache of random blocks, in `copies` copies."""

    def __init__(self, rows, heads, kv_heads, copies=1):
        self.heads, self.kv_heads, self.rows = heads, kv_heads, rows
        blocks = [-(-c // B) for _, c in rows]
        self.caches = [rand(sum(blocks) + 1, 2, kv_heads, B, D) for _ in range(copies)]
        tables = torch.zeros(len(rows), 4096 // B + max(blocks), dtype=torch.int32)
        for row, mine in zip(tables, torch.randperm(sum(blocks)).split(blocks), strict=True):
            row[: len(mine)] = mine.int()
        self.tables = tables.cuda()
        starts = torch.tensor([0, *(n for n, _ in rows)]).cumsum(0)
        self.starts = starts.int().cuda()
        self.contexts = torch.tensor([c for _, c in rows], dtype=torch.int32, device="cuda")
        qkv = rand(int(starts[-1]), heads + 2 * kv_heads, D)
        self.q, self.k, self.v = qkv.split([heads, kv_heads, kv_heads], 1)
        self.counters = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
        self.decodes = len(rows) if all(n == 1 for n, _ in rows) else 0

    def calls(self, balanced=False):
        return [
            lambda cache=cache: paged_attention(
                self.q, cache, self.tables, self.starts, self.contexts, D**-0.5,
                decodes=self.decodes, k=self.k, v=self.v, counters=self.counters,
                balanced=balanced,
            )
            for cache in self.caches
        ]  # fmt: skip

    def fused(self):
        """Return one launch from the raw qkv product for each copy."""
        table = torch.randn(8192, D, device="cuda")
        norms = (norm_rope_write.QKNorm(rand(D), 1e-6, 0.0),) * 2
        positions = self.contexts - 1
        last = positions.long()
        block = self.tables.gather(1, (last // B)[:, None])[:, 0].long()
        slots = block * B + last % B
        out, extras = torch.empty_like(self.q), AttentionExtras(D**-0.5, counters=self.counters)
        return [
            lambda cache=cache: paged_attention_fused.launch(
                out, self.q, self.k, self.v, positions, table, False, norms,
                slots, cache, self.tables, self.contexts, extras,
            )
            for cache in self.caches
        ]  # fmt: skip

    def flops(self):
        pairs = sum(n * (c - n) + n * (n + 1) // 2 for n, c in self.rows)
        return 4 * pairs * self.heads * D

    def bytes(self):
        return sum(c for _, c in self.rows) * self.kv_heads * D * 2 * 2


def decode(report, copy):
    for model, heads in HEADS.items():
        for name, contexts in CROWDS.items():
            cached = Cached([(1, c) for c in contexts], *heads)
            ms, even = (graph_ms(cached.calls(balanced)) for balanced in (False, True))
            rate = cached.bytes() / ms * 1e3
            report(what="decode", model=model, case=name, us=ms * 1e3, tb_s=rate / 1e12,
                   share=rate / copy, balanced_us=even * 1e3)  # fmt: skip


def one(report, copy):
    for model, heads in HEADS.items():
        for context in (16, 128, 512, 1000, 4000):
            cached = Cached([(1, context)], *heads, copies=32)
            report(what="one row", model=model, case=context, us=graph_ms(cached.calls()) * 1e3,
                   fused_us=graph_ms(cached.fused()) * 1e3)  # fmt: skip


def prefill(report, product):
    for model, heads in HEADS.items():
        for name, rows in PROMPTS.items():
            cached = Cached(rows, *heads)
            ms = graph_ms(cached.calls())
            figures = {"ms": ms, "tflop_s": cached.flops() / ms / 1e9}
            figures["share"] = figures["tflop_s"] * 1e12 / product
            if len(set(rows)) == 1 and rows[0][0] == rows[0][1]:
                figures["cudnn_tflop_s"] = cached.flops() / cudnn_ms(cached) / 1e9
            report(what="prefill", model=model, case=name, **figures)


def cudnn_ms(cached):
    n, count = cached.rows[0][0], len(cached.rows)
    q, k, v = (x.reshape(count, n, -1, D).transpose(1, 2) for x in (cached.q, cached.k, cached.v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return graph_ms(
            [lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)]
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["decode", "one", "prefill"])
    parser.add_argument("--json", help="append one line per figure to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    copy, product = ceilings()
    print(f"copy {copy / 1e12:.2f} TB/s, bf16 product {product / 1e12:.0f} TFLOP/s")

    def report(**figures):
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}
        print("  ".join(f"{k} {v}" for k, v in rounded.items()), flush=True)
        if args.json:
            with open(args.json, "a") as file:
                file.write(json.dumps(rounded | {"device": torch.cuda.get_device_name()}) + "\n")

    if "decode" in args.parts:
        decode(report, copy)
    if "one" in args.parts:
        one(report, copy)
    if "prefill" in args.parts:
        prefill(report, product)


if __name__ == "__main__":
    assert torch.cuda.is_available(), "needs a GPU"
    main()

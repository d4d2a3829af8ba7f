"""e4m3 weights on the GPU: products and passes compared with bfloat16 and with the card's limits.

    python bench/fp8.py [products] [passes] [--blocks] [--rows 16384,256,32] [--json FILE]

A product is timed with the pass that quantizes its rows, as a step has it; bfloat16 is
the library's. Medians of graph replays over weights that do not fit the cache together.
"""

import argparse
import json
from functools import partial

import torch
from gpu_ops import SHAPES, ceilings, graph_ms, products, rand

from quire.kernels.formats.fp8_weight import BLOCK_SIZE, quantize_blocks, quantize_channels
from quire.kernels.gpu.linear import fp8_linear, quantize_fp8, quantize_fused

MODEL = "llama-8b"


def product_rows(rows, blocks, copy):
    quantize = quantize_blocks if blocks else quantize_channels
    for t in rows:
        for name, o, i in products(SHAPES[MODEL]):
            copies = max(2, min(8, int(4e8 // (o * i)) + 1))
            plain = [rand(o, i) / i**0.5 for _ in range(copies)]
            small = [quantize(w) for w in plain]
            x, y = rand(t, i), torch.empty(t, o, dtype=torch.bfloat16, device="cuda")
            calls = [partial(fp8_linear.launch, y, x, w) for w in small]
            ms = graph_ms(calls)
            wide = graph_ms([partial(torch.mm, x, w.t(), out=y) for w in plain])
            yield {"kind": "product", "op": name, "rows": t, "scales": "blocks" if blocks else
                   "channels", "us": ms * 1e3, "bf16 us": wide * 1e3, "TB/s": o * i / ms / 1e9,
                   "TFLOP/s": 2 * t * o * i / ms / 1e9, "of TB/s": copy / 1e12}  # fmt: skip


def pass_rows(rows, blocks, copy):
    s, block = SHAPES[MODEL], BLOCK_SIZE if blocks else 0
    e, f = s["E"], s["F"]
    for t in rows:
        x, residual, r, y = (rand(t, e) for _ in range(4))
        norm, both, inner = rand(e), rand(t, 2 * f), rand(t, f)
        small = quantize_fp8.empty_quantized(t, e, block, x.device)
        large = quantize_fp8.empty_quantized(t, f, block, x.device)
        for name, call, size in (
            ("quantize E", partial(quantize_fp8.launch, small, x, block), 3 * t * e),
            ("quantize F", partial(quantize_fp8.launch, large, inner, block), 3 * t * f),
            (
                "add, norm, quantize E",
                partial(
                    quantize_fused.rms_norm_quantize, small, x, norm, 1e-5, residual, 0.0, y, r
                ),
                9 * t * e,
            ),
            (
                "gate, quantize F",
                partial(quantize_fused.act_mul_quantize, large, both, "silu"),
                5 * t * f,
            ),
        ):
            ms = graph_ms([call] * (20 if t < 1000 else 2))
            yield {"kind": "pass", "op": name, "rows": t, "us": ms * 1e3,
                   "TB/s": size / ms / 1e9, "of TB/s": copy / 1e12}  # fmt: skip


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("what", nargs="*", default=["products", "passes"])
    ap.add_argument("--blocks", action="store_true")
    ap.add_argument("--rows", default="16384,1024,256,64,32,8")
    ap.add_argument("--json")
    given = ap.parse_args()
    rows = [int(one) for one in given.rows.split(",")]
    copy, flops = ceilings()
    print(f"copy {copy / 1e12:.2f} TB/s, bf16 product {flops / 1e12:.0f} TFLOP/s")
    parts = {"products": product_rows, "passes": pass_rows}
    found = []
    for what in given.what:
        for row in parts[what](rows, given.blocks, copy):
            found.append(row)
            print(
                "  ".join(
                    f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
                ),
                flush=True,
            )
    if given.json:
        with open(given.json, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)


if __name__ == "__main__":
    main()

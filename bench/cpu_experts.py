"""Compares one layer of experts over weights of few bits with bfloat16, in turn, in one process.

usage: QUIRE_NUM_THREADS=1 taskset -c 0 python bench/cpu_experts.py [--shape qwen3-30b-a3b] [--formats w4,w8]

One JSON line per number of rows: the best milliseconds of each format by processor time (by wall
time with more than one thread), and bfloat16's as a multiple of it. Rows choose experts at random.
"""

import argparse
import json
import time

import torch

from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.grouped_linear import pack_experts
from quire.kernels.moe_experts import ExpertActivation, moe_experts

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SHAPES = {
    "qwen3-30b-a3b": (64, 768, 2048, 8, "silu"),
    "gpt-oss-20b": (32, 2880, 2880, 4, "clamped"),
}
"""Name -> experts held (qwen3 has 128), their width, hidden size, experts of a row, activation."""
FORMATS = {
    "w2": (2, 32), "w3": (3, 32), "w4": (4, 128), "w8": (8, 128), "q4_0": (4, 32), "q5_0": (5, 32),
    "q6_k": (6, 16), "q8_0": (8, 32), "mxfp4": (4, 32),
}  # fmt: skip
"""Name -> bits and inputs that share a scale."""


def random_bank(name: str, experts: int, outputs: int, inputs: int) -> WeightCodes:
    bits, group = FORMATS[name]
    group = group if inputs % group == 0 else 32
    q = torch.randint(0, 1 << bits, (experts, outputs, inputs), dtype=torch.uint8)
    scale = (torch.rand(experts, outputs, inputs // group) + 0.5) * 0.04 / (1 << bits)
    table = torch.tensor([*E2M1, *(-v for v in E2M1)]) if name == "mxfp4" else None
    zero = 0 if name == "mxfp4" else 1 << bits - 1
    factors = GroupFactors(scale.half())
    return WeightCodes(q=q, bits=bits, group=group, scale=factors, zero=zero, table=table)


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--shape", default="qwen3-30b-a3b", choices=SHAPES)
    ap.add_argument("--formats", default="w4,w8")
    ap.add_argument("--rows", default="1,4,16,64,256")
    ap.add_argument("--rounds", type=int, default=8)
    a = ap.parse_args()
    torch.manual_seed(0)
    experts, width, hidden, top, kind = SHAPES[a.shape]
    plain = torch.randn(experts, 2 * width, hidden).bfloat16()
    banks = {"bf16": (plain, torch.randn(experts, hidden, width).bfloat16())}
    for name in a.formats.split(","):
        first = random_bank(name, experts, 2 * width, hidden)
        second = random_bank(name, experts, hidden, width)
        banks[name] = tuple(pack_experts(one, torch.bfloat16) for one in (first, second))
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for rows in map(int, a.rows.split(",")):
        best = dict.fromkeys(banks, 1e9)
        for _ in range(a.rounds if rows < 64 else 3):
            x, weights = torch.randn(rows, hidden).bfloat16(), torch.rand(rows, top)
            ids = torch.rand(rows, experts).argsort(-1)[:, :top].int().contiguous()
            for name, bank in banks.items():
                began = clock()
                moe_experts(x, ids, weights, *bank, ExpertActivation(kind))
                best[name] = min(best[name], clock() - began)
        line = {
            "shape": a.shape,
            "rows": rows,
            "ms": {k: round(v * 1e3, 2) for k, v in best.items()},
        }
        line["ratio"] = {k: round(best["bf16"] / v, 2) for k, v in best.items()}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

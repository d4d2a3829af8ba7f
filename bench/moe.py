"""One sparse layer on the GPU: router and experts, by number of rows, compared with the card's
limits.

    python bench/moe.py [--model qwen3-30b-a3b] [--rows 1 8 64 1024 16384] [--layers 6]

One JSON line per number of rows: microseconds of the router and of the experts, how many experts
were used, the bytes of their weights a second and the products' FLOP/s, and the share of the larger
of the two floors (weights at the bandwidth of a large copy, FLOPs at the rate of a large bf16
product) that the experts reach. Times are medians of graph replays over several layers' weights,
so that none of them is in the cache. Small rows read few experts, large ones all.
"""

import argparse
import json

import torch
from gpu_ops import ceilings, graph_ms

from quire.kernels.moe_experts import ExpertActivation, moe_experts
from quire.kernels.moe_router import RoutingMethod, moe_router

MODELS = {  # experts, top k, hidden, width
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "qwen1.5-moe": (60, 4, 2048, 1408),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "deepseek-v2-lite": (64, 6, 2048, 1408),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Layer:
    """Random weights of one sparse layer."""

    def __init__(self, model):
        experts, top, size, width = MODELS[model]
        self.routing = RoutingMethod(top, renormalise=True)
        self.router = self._rand(experts, size) * size**-0.5
        self.gate_up = self._rand(experts, 2 * width, size).mul_(size**-0.5)
        self.down = self._rand(experts, size, width).mul_(width**-0.5)

    def _rand(self, *shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def route(self, x):
        return moe_router(x, self.router, self.routing)

    def apply(self, x, ids, weights):
        return moe_experts(x, ids, weights, self.gate_up, self.down, ExpertActivation())


def measure(model, layers, rows, bandwidth, rate):
    _, top, size, width = MODELS[model]
    x = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16)
    routed = [layer.route(x) for layer in layers]
    used = sum(len(ids.unique()) for ids, _ in routed) / len(layers)
    per_expert = 3 * size * width
    read, flops = used * per_expert * 2, rows * top * per_expert * 2
    router = graph_ms([lambda one=one: one.route(x) for one in layers])
    experts = graph_ms(
        [lambda one=one, to=to: one.apply(x, *to) for one, to in zip(layers, routed)]
    )
    return {
        "model": model,
        "rows": rows,
        "router_us": round(router * 1e3, 1),
        "experts_us": round(experts * 1e3, 1),
        "experts_used": round(used, 1),
        "weights_TB_s": round(read / experts / 1e9, 2),
        "TFLOP_s": round(flops / experts / 1e9, 1),
        "of_floor": round(max(read / bandwidth, flops / rate) * 1e3 / experts, 3),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b-a3b")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--layers", type=int, default=6)
    args = parser.parse_args()
    bandwidth, rate = ceilings()
    machine = {"copy_TB_s": round(bandwidth / 1e12, 2), "product_TFLOP_s": round(rate / 1e12)}
    print(json.dumps({"machine": torch.cuda.get_device_name(), **machine}), flush=True)
    layers = [Layer(args.model) for _ in range(args.layers)]
    for rows in args.rows:
        found = measure(args.model, layers, rows, bandwidth, rate)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

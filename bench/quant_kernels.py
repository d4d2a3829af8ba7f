"""Time on the device by kernel, of captured decoding steps with weights of 4 bits.

python bench/quant_kernels.py [--rows 1,8,32] [--context 300] [--json FILE]
"""

import argparse
import collections
import json

import torch
from gpu_decode import QUANTIZE, Stack

from quire.kernels.framework import lazy_fusion


@torch.inference_mode()
def main():
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--rows", default="1,8,32")
    parse.add_argument("--context", type=int, default=300)
    parse.add_argument("--json")
    args = parse.parse_args()
    stack = Stack("llama-8b", QUANTIZE["awq"])
    for rows in map(int, args.rows.split(",")):
        inputs = stack.inputs(rows, args.context)
        stack.step(inputs)
        lazy_fusion.flush()
        torch.cuda.synchronize()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            stack.step(inputs)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                stack.step(inputs)
        graph.replay()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
        sums, counts = collections.Counter(), collections.Counter()
        for event in profile.events():
            sums[event.name[:60]] += event.device_time / 3
            counts[event.name[:60]] += 1 / 3
        for name, us in sums.most_common(14):
            line = {
                "kernel": name,
                "rows": rows,
                "us a step": round(us, 1),
                "launches": round(counts[name]),
            }
            print(json.dumps(line), flush=True)
            if args.json:
                with open(args.json, "a", encoding="utf-8") as out:
                    out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

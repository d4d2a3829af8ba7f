"""Compares streams over weights of few bits with those over bfloat16, in turn, in one process.

usage: python bench/cpu_codes.py MODEL_DIR [--formats q8_0,q4_0] [--rounds 3] [--whole]

One JSON line per format and case: tokens/s and processor seconds of the best round, and both as
ratios to bfloat16 within the run. Weights are random codes of that layout. --whole: the head and
its embedding have it too, as with `+lm_head`; else layers only.
"""

import argparse
import json
import random
import time

import torch
from offline import case_specs

from quire import LLM, SamplingParams
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.grouped_linear import pack
from quire.quant import online

FORMATS = {"q8_0": (8, 32), "w8": (8, 128), "q4_0": (4, 32), "w4": (4, 128), "q4_k": (4, 32)}
"""Name -> bits and inputs that share a scale."""


def random_codes(name: str, outputs: int, inputs: int) -> WeightCodes:
    bits, group = FORMATS[name]
    q = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)
    groups = inputs // group
    step = 0.04 / (1 << bits)
    if name != "q4_k":
        scale = GroupFactors(((torch.rand(outputs, groups) + 0.5) * step).half())
        return WeightCodes(q=q, bits=bits, group=group, scale=scale, zero=1 << bits - 1)
    small = torch.randint(1, 64, (outputs, groups), dtype=torch.uint8)
    large = torch.full((outputs, inputs // 256), step / 32).half()
    return WeightCodes(
        q=q, bits=bits, group=group, scale=GroupFactors(large, small),
        offset=GroupFactors(large * -7.5, small.clone()),
    )  # fmt: skip


def quantize_randomly(name: str) -> None:
    """Make `quantization="int4"` mean random codes."""

    def process_after_load(_self, layer, dtype):
        for matrix in layer.matrices:
            shape = layer.take_params(matrix).pop("weight").shape
            layer.set_param(matrix, pack(random_codes(name, *shape), dtype))

    online.Method.process_after_load = process_after_load


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("model")
    ap.add_argument("--formats", default="q8_0,q4_0")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--cases", default="cpu_decode1,cpu_prefill,cpu_batch32")
    ap.add_argument("--whole", action="store_true")
    ap.add_argument("--vocab", type=int, default=100000)
    a = ap.parse_args()
    torch.manual_seed(0)
    engines = {}
    for name in ["bf16", *a.formats.split(",")]:
        settings = {}
        if name != "bf16":
            quantize_randomly(name)
            settings = {"quantization": "int4+lm_head" if a.whole else "int4"}
        engines[name] = LLM(
            a.model, load_format="dummy", dtype="bfloat16", max_model_len=2048, **settings
        )
    for case in a.cases.split(","):
        best = dict.fromkeys(engines, (1e9, 1e9))
        for rep in range(a.rounds + 1):
            prompts, outs = case_specs(random.Random(f"{case}-{rep}"), a.vocab)[case]
            params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=0) for n in outs]
            for name, llm in engines.items():
                wall, cpu = time.perf_counter(), time.process_time()
                llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                if rep:  # the first is for warming up
                    best[name] = (min(best[name][0], wall), min(best[name][1], cpu))
        tokens = sum(map(len, prompts)) if case == "cpu_prefill" else sum(outs)
        for name, (wall, cpu) in best.items():
            line = {"case": case, "weights": name, "whole": a.whole}
            line |= {"tok_s": round(tokens / wall, 1), "processor_s": round(cpu, 3)}
            line["ratio"] = round(best["bf16"][0] / wall, 2)
            line["ratio_processor"] = round(best["bf16"][1] / cpu, 2)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

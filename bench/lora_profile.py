"""Kernels of decode steps with adapters in an engine, beside those without: one JSON line a case.

    python bench/lora_profile.py MODEL [--load-format dummy] [--rank 16] [--max-rank 16] [--slots 32]
                                 [--cases 1x0,1x1,8x1,32x0,32x1,32x8,64x0,64x32] [--json FILE] [--top 24]

A case is ROWSxADAPTERS. `step us`: the time between tokens, without the profiler. `busy us`: of a step
in which some kernel ran; `idle us`: in which none did. `kernels`: name -> [launches, microseconds] of
a step, of kernels that run beside each other in full, those of the most time first.
"""

import argparse
import collections
import json
import random
import tempfile
import time
from pathlib import Path

import torch
from lora import Adapters

from quire import LLM, SamplingParams

STEPS = 48


def decode(llm, rows, requests, tokens, rng):
    """Seconds of one call."""
    prompts = [
        {"prompt_token_ids": [rng.randrange(10, 100000) for _ in range(16)]} for _ in range(rows)
    ]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)
    began = time.perf_counter()
    llm.generate(prompts, params, lora_request=requests, use_tqdm=False)
    return time.perf_counter() - began


def covered(spans):
    """Microseconds in which some span lies."""
    total, end = 0.0, 0.0
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def last_steps(events, steps):
    """The kernels of the last steps: what comes before each is found by the one that a step ends with."""
    ends = [i for i, one in enumerate(events) if "store_decode" in one[0]]
    if len(ends) <= steps:
        return events, max(len(ends), 1)
    return events[ends[-steps - 1] + 1 : ends[-1] + 1], steps


def profile(llm, rows, requests, top):
    rng = random.Random(0)
    decode(llm, rows, requests, 16, rng)
    times = [decode(llm, rows, requests, n, rng) for n in (STEPS, 3 * STEPS)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        decode(llm, rows, requests, STEPS, rng)
        torch.cuda.synchronize()
    events = sorted(
        ((one.name, one.time_range.start, one.time_range.end) for one in found.events()
         if one.device_type == torch.autograd.DeviceType.CUDA),
        key=lambda one: one[1],
    )  # fmt: skip
    chosen, steps = last_steps(events, STEPS // 2)
    by_name = collections.defaultdict(lambda: [0, 0.0])
    for name, start, stop in chosen:
        by_name[name[:70]][0] += 1
        by_name[name[:70]][1] += stop - start
    busy = covered((start, stop) for _, start, stop in chosen)
    whole = chosen[-1][2] - chosen[0][1] if chosen else 0.0
    longest = sorted(by_name.items(), key=lambda item: -item[1][1])[:top]
    return {
        "step us": round((times[1] - times[0]) / (2 * STEPS) * 1e6, 1),
        "busy us": round(busy / steps, 1),
        "idle us": round((whole - busy) / steps, 1),
        "launches": round(len(chosen) / steps, 1),
        "kernels": {name: [round(n / steps, 2), round(us / steps, 1)] for name, (n, us) in longest},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-rank", type=int, default=16)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--cases", default="1x0,1x1,8x1,32x0,32x1,32x8,64x0,64x32")
    parser.add_argument("--top", type=int, default=24)
    parser.add_argument("--kw", default="{}", help="options of the engine")
    parser.add_argument("--json")
    a = parser.parse_args()
    config = json.loads((Path(a.model) / "config.json").read_text())
    given = {"load_format": a.load_format, "max_model_len": 2048} | json.loads(a.kw)
    llm = LLM(a.model, enable_lora=True, max_loras=a.slots, max_cpu_loras=a.slots,
              max_lora_rank=a.max_rank, **given)  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="quire-lora-") as folder:
        adapters = Adapters(Path(folder), config)
        for case in a.cases.split(","):
            rows, count = map(int, case.split("x"))
            some = [adapters.get(a.rank, n) for n in range(count)]
            requests = [some[row % count] for row in range(rows)] if count else None
            line = {"model": Path(a.model).name, "case": case, "rank": a.rank,
                    "max rank": a.max_rank, **profile(llm, rows, requests, a.top)}  # fmt: skip
            print(json.dumps(line), flush=True)
            if a.json:
                with open(a.json, "a", encoding="utf-8") as out:
                    out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

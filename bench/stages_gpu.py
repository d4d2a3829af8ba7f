"""Pipeline stages beside one GPU: the same tokens, speed, and how long the first stage waits.

    python bench/stages_gpu.py MODEL --stages 1 --tokens /tmp/one.json
    python bench/stages_gpu.py MODEL --stages 2 --same-as /tmp/one.json

Weights are random. One JSON line a result: whether greedy tokens are those of the other run, then
the cases of offline.py, then (with several stages) what the first stage's GPU did in some steps of
1, 8 and 32 rows: microseconds of a step, of kernels that compute, of those that wait for tokens and
of those that hand states on.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from offline import LATER, case_specs

from quire import LLM, SamplingParams

STEPS = 60
VOCAB = 4000  # of the smallest model


def tokens_of(llm):
    """Greedy tokens of prompts of many lengths, which share steps."""
    rng = random.Random(5)
    prompts = [[rng.randrange(10, VOCAB) for _ in range(n)] for n in (1, 7, 40, 130, 300, 900, 33)]
    found = run(llm, prompts, [40, 64, 9, 64, 30, 20, 64])
    return [list(one.outputs[0].token_ids) for one in found]


def run(llm, prompts, outs):
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in outs]
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def case_of(name, turn):
    rng = random.Random(f"{name}-{turn}")
    prompts, outs = LATER[name](rng, VOCAB) if name in LATER else case_specs(rng, VOCAB)[name]
    cut = max(1, len(prompts) // 8) if not turn else None  # the first turn warms up
    return prompts[:cut], outs[:cut]


def measure(llm, name):
    for turn in (0, 1):
        prompts, outs = case_of(name, turn)
        began = time.perf_counter()
        run(llm, prompts, outs)
        seconds = time.perf_counter() - began
    return {"case": name, "s": round(seconds, 3), "out_tok_s": round(sum(outs) / seconds, 1)}


def waits(llm, rows):
    """What this process's GPU does while it decodes so many rows."""
    rng = random.Random(rows)
    prompts = [[rng.randrange(10, VOCAB) for _ in range(64)] for _ in range(rows)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(llm, prompts, [STEPS] * rows)
        torch.cuda.synchronize()
    kinds = {"tokens": "_receive_tokens", "states": "nccl"}
    spans = sorted(
        (one.time_range.start, one.time_range.end, one.name)
        for one in profile.events()
        if one.device_type == torch.autograd.DeviceType.CUDA
    )
    spans = spans[len(spans) // 3 : -len(spans) // 6 or None]  # no prompts, no end
    took = dict.fromkeys((*kinds, "computes"), 0.0)
    for start, end, name in spans:
        kind = next((key for key, part in kinds.items() if part in name), "computes")
        took[kind] += end - start
    steps = sum("nccl" in name for *_, name in spans) or 1
    took["period"] = max(end for _, end, _ in spans) - spans[0][0]
    return {"rows": rows, "steps": steps} | {key: round(us / steps, 1) for key, us in took.items()}


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("model")
    ap.add_argument("--stages", type=int, default=2)
    ap.add_argument("--cases", default="decode1,rows8,rows32,mixed512")
    ap.add_argument("--kw", default="{}", help="more options of the engine, as JSON")
    ap.add_argument("--tokens", help="file to write the tokens to")
    ap.add_argument("--same-as", help="file with the tokens of another run")
    ap.add_argument("--no-waits", action="store_true")
    a = ap.parse_args()
    base = {"model": Path(a.model).name, "stages": a.stages, "kw": a.kw}

    def show(line):
        print(json.dumps(base | line), flush=True)

    began = time.perf_counter()
    options = {"load_format": "dummy", "max_model_len": 4096, "pipeline_parallel_size": a.stages}
    llm = LLM(a.model, **options | json.loads(a.kw))
    config = llm.llm_engine.config
    show({
        "start_s": round(time.perf_counter() - began, 1),
        "sends_tokens": config.parallel.sends_tokens,
        "steps_in_flight": config.scheduler.steps_in_flight,
        "stage_layers": list(config.parallel.stage_layers),
    })  # fmt: skip
    if a.tokens or a.same_as:
        found = tokens_of(llm)
        if a.tokens:
            Path(a.tokens).write_text(json.dumps(found))
        if a.same_as:
            want = json.loads(Path(a.same_as).read_text())
            show({"same": found == want, "rows_same": [x == y for x, y in zip(found, want)]})
    for name in a.cases.split(","):
        show(measure(llm, name))
    for rows in () if a.no_waits or a.stages == 1 else (1, 8, 32):
        show(waits(llm, rows))
    llm.llm_engine.engine.shutdown()


if __name__ == "__main__":
    main()

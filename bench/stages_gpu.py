"""Pipeline stages beside one GPU: the same tokens, speed, and what waits for what.

    python bench/stages_gpu.py MODEL --stages 1 --tokens /tmp/one.json
    python bench/stages_gpu.py MODEL --stages 2 --same-as /tmp/one.json

Weights are random. One JSON line a result: how many greedy tokens are those of the other run (in
bfloat16 rows round otherwise in steps of other sizes), then the cases of offline.py, with the
seconds that the engine waited for results (none: it is what limits). With several stages then what
the first stage's GPU did in some steps, in microseconds a step: kernels that compute, those that
wait for tokens, and neither.
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


class Waits:
    """Counts steps of an engine, and the seconds it waits for their results."""

    def __init__(self, llm):
        self.executor = llm.llm_engine.engine.executor
        self.submit, self.executor.submit = self.executor.submit, self.begin
        self.steps = self.seconds = 0

    def begin(self, plan):
        self.steps += bool(plan.rows)
        self.pending = self.submit(plan)
        return Waited(self, self.pending)


class Waited:
    def __init__(self, waits, pending):
        self.waits, self.pending = waits, pending

    def wait(self):
        began = time.perf_counter()
        result = self.pending.wait()
        self.waits.seconds += time.perf_counter() - began
        return result


def measure(llm, name, waits):
    for turn in (0, 1):
        prompts, outs = case_of(name, turn)
        waits.steps = waits.seconds = 0
        began = time.perf_counter()
        run(llm, prompts, outs)
        seconds = time.perf_counter() - began
    rate = {"s": round(seconds, 3), "out_tok_s": round(sum(outs) / seconds, 1)}
    rate["total_tok_s"] = round((sum(outs) + sum(map(len, prompts))) / seconds, 1)
    return {"case": name, **rate, "steps": waits.steps, "waited_s": round(waits.seconds, 3)}


def trace(llm, rows, length):
    """What this process's GPU does while it decodes so many rows behind prompts of a length."""
    rng = random.Random(rows)
    prompts = [[rng.randrange(10, VOCAB) for _ in range(length)] for _ in range(rows)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(llm, prompts, [STEPS] * rows)
        torch.cuda.synchronize()
    spans = sorted(
        (one.time_range.start, one.time_range.end, one.name)
        for one in profile.events()
        if one.device_type == torch.autograd.DeviceType.CUDA
    )
    sent = [i for i, span in enumerate(spans) if "nccl" in span[2]]
    first, last = sent[len(sent) // 2], sent[-4]  # no prompts, and no end
    steps = sum(first <= i < last for i in sent)
    found = {"period": spans[last][0] - spans[first][0], "computes": 0.0, "tokens": 0.0}
    until = spans[first][0]
    for start, end, name in spans[first:last]:
        kind = "tokens" if "_receive_tokens" in name else "computes"
        found[kind] += max(0.0, end - max(start, until))  # kernels overlap
        until = max(until, end)
    found["idle"] = found["period"] - found["computes"] - found["tokens"]
    return {"rows": rows, "steps": steps} | {key: round(us / steps) for key, us in found.items()}


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("model")
    ap.add_argument("--stages", type=int, default=2)
    ap.add_argument("--cases", default="decode1,rows8,rows32,mixed512")
    ap.add_argument("--kw", default="{}", help="more options of the engine, as JSON")
    ap.add_argument("--tokens", help="file to write the tokens to")
    ap.add_argument("--same-as", help="file with the tokens of another run")
    ap.add_argument("--traces", default="1x64,8x64,32x64,256x300", help="rows x prompt, or none")
    a = ap.parse_args()
    base = {"model": Path(a.model).name, "stages": a.stages, "kw": a.kw}

    def show(line):
        print(json.dumps(base | line), flush=True)

    began = time.perf_counter()
    options = {"load_format": "dummy", "max_model_len": 8192, "pipeline_parallel_size": a.stages}
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
            same = [sum(i == j for i, j in zip(x, y)) / len(x) for x, y in zip(found, want)]
            show({"same": [round(share, 2) for share in same]})
    waits = Waits(llm)
    for name in a.cases.split(","):
        show(measure(llm, name, waits))
    for one in a.traces.split(",") if a.stages > 1 and a.traces else ():
        show(trace(llm, *map(int, one.split("x"))))


if __name__ == "__main__":
    main()

"""One GPU beside several of the same machine, in one run: tensor parallelism and replicas.

    python bench/tp_gpu.py MODELS [--rows llama-8b,qwen3-30b-a3b,qwen3-0.6b] [--ranks 1,2]
                           [--cases decode1,rows8,rows32,mixed512,prefill] [--ways nccl,replicas]
                           [--kw JSON] [--repeat 1] [--seconds 500]

make_models.py writes MODELS. Each row of models runs bench/offline.py once with each number of ranks;
then with NCCL in place of quire's own sums (nccl), in pipeline stages (stages), with whole experts on
ranks (experts), and as independent engines that run at once, each on a GPU of its own (replicas).
Before them all, starts without any compiled kernel and starts with those (starts). One JSON line for
each result, and for each ratio to one GPU, with the goal. --seconds: nothing is begun later than this.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OFFLINE = Path(__file__).resolve().parent / "offline.py"
GOALS = {  # (model, case) -> ratio of two GPUs to one
    ("llama-8b", "decode1"): 1.6, ("llama-8b", "rows8"): 1.55, ("llama-8b", "rows32"): 1.55,
    ("llama-8b", "mixed512"): 1.7, ("llama-8b", "prefill"): 1.75,
    ("qwen3-30b-a3b", "decode1"): 1.35, ("qwen3-30b-a3b", "mixed512"): 1.6,
    ("qwen3-0.6b", "decode1"): 1.0,
}  # fmt: skip
NCCL_GOALS = {("llama-8b", "decode1"): 1.4}
STAGE_GOALS = {("llama-8b", "decode1"): 0.95, ("llama-8b", "mixed512"): 1.7}
REPLICA_GOALS = {"mixed512": 1.95}  # times the number of replicas over 2


def start(model, cases, a, gpus=None, cache=None, **more):
    kw = json.loads(a.kw) | more
    command = [sys.executable, str(OFFLINE), "--engine", "quire", "--model", f"{a.models}/{model}",
               "--cases", cases, "--repeat", str(a.repeat), "--kw", json.dumps(kw)]  # fmt: skip
    env = os.environ | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
    env |= {} if cache is None else {"QUIRE_CACHE": cache}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def finish(process):
    """case -> the best line."""
    lines = [json.loads(one) for one in process.communicate()[0].splitlines() if one[:1] == "{"]
    if process.returncode:
        say(status=process.returncode, command=" ".join(process.args[3:]))
    best = {}
    for line in lines:
        old = best.get(line["case"])
        if old is None or rate(line) > rate(old):
            best[line["case"]] = line
    return best


def rate(line):
    """Tokens a second: all of them for prompts. Of a start: the less seconds the better."""
    if line["case"] == "startup":
        return -line["init_s"]
    return line["total_tok_s" if line["case"] == "prefill" else "out_tok_s"]


def say(**line):
    print(json.dumps(line), flush=True)


def compare(model, how, found, one, goals):
    for case, line in found.items():
        say(**line, how=how)
        if case == "startup":
            if case in one:
                more = line["init_s"] - one[case]["init_s"]
                say(model=model, how=how, what="seconds of a start more than one GPU's",
                    measured=round(more, 2), goal=3.0, met=more <= 3.0)  # fmt: skip
        elif case in one:
            ratio, goal = rate(line) / rate(one[case]), goals.get((model, case))
            say(model=model, how=how, case=case, ratio=round(ratio, 3), goal=goal,
                met=None if goal is None else ratio >= goal)  # fmt: skip


def replicas(model, a, one):
    """Independent engines on GPUs of their own, at the same time."""
    count = max(2, *(int(n) for n in filter(None, a.ranks.split(","))))
    case = "mixed512"
    if case not in one:
        return
    running = [start(model, case, a, gpus=str(i)) for i in range(count)]
    rates = [rate(found[case]) for found in map(finish, running) if case in found]
    if len(rates) == count:
        ratio, goal = sum(rates) / rate(one[case]), REPLICA_GOALS[case] * count / 2
        say(model=model, how=f"{count} replicas", case=case, out_tok_s=round(sum(rates), 1),
            ratio=round(ratio, 3), goal=goal, met=ratio >= goal)  # fmt: skip


def starts(model, a):
    """Seconds of LLM(...) with one GPU and with two: twice each, with an empty folder of kernels."""
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        for kernels in ("none", "compiled"):
            for ranks in (1, 2):
                cache = f"{folder}/{ranks}"
                found = finish(start(model, "", a, cache=cache, tensor_parallel_size=ranks))
                for line in found.values():
                    say(**line, how=f"tp {ranks}", kernels=kernels)
                    seconds[kernels, ranks] = line["init_s"]
            if len(seconds) % 2 == 0:
                more = seconds[kernels, 2] - seconds[kernels, 1]
                say(model=model, what="seconds of a start more than one GPU's", kernels=kernels,
                    measured=round(more, 2), goal=3.0, met=more <= 3.0)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models")
    parser.add_argument("--rows", default="llama-8b,qwen3-30b-a3b,qwen3-0.6b")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--cases", default="decode1,rows8,rows32,mixed512,prefill")
    parser.add_argument("--ways", default="nccl,replicas")
    parser.add_argument("--kw", default='{"max_model_len": 8192}')
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=500)
    a = parser.parse_args()
    began, ways, first = time.time(), a.ways.split(","), {}
    plans = [
        (model, "ranks", int(n))
        for model in a.rows.split(",")
        for n in filter(None, a.ranks.split(","))
    ]
    main_model = a.rows.split(",")[0]
    if "starts" in ways:
        starts(main_model, a)
    plans += [(main_model, "nccl", 2)] * ("nccl" in ways)
    plans += [(main_model, how, 2) for how in ("stages", "experts", "replicas") if how in ways]
    for model, how, count in plans:
        if time.time() - began > a.seconds:
            say(model=model, how=f"{how} {count}", status="not run: no time is left")
            continue
        one = first.get(model, {})
        if how == "replicas":
            replicas(model, a, one)
        elif how == "nccl":
            found = finish(start(model, "decode1,rows32", a, tensor_parallel_size=count,
                                 disable_custom_all_reduce=True))  # fmt: skip
            compare(model, f"tp {count}, NCCL", found, one, NCCL_GOALS)
        elif how == "stages":
            found = finish(start(model, a.cases, a, pipeline_parallel_size=count))
            compare(model, f"pp {count}", found, one, STAGE_GOALS)
        elif how == "experts":
            found = finish(start(model, a.cases, a, tensor_parallel_size=count,
                                 enable_expert_parallel=True))  # fmt: skip
            compare(model, f"ep {count}", found, one, GOALS)
        elif count == 1:
            first[model] = finish(start(model, a.cases, a))
            for line in first[model].values():
                say(**line, how="one GPU")
        else:
            found = finish(start(model, a.cases, a, tensor_parallel_size=count))
            compare(model, f"tp {count}", found, one, GOALS if count == 2 else {})


if __name__ == "__main__":
    main()

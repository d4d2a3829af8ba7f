"""Runs the steps of one script of this folder within a number of seconds. See the tables below.

    python bench/gpu/run_steps.py quant [SECONDS] [--steps "llama-8b awq,gguf types"]

540 seconds by default. --steps: only those, in their order here; goals are of what they measured.
Each step is a process group of its own, and is killed at its limit. JSON lines of all steps go to
$OUT/NAME.jsonl with date, machine, commit, step and command; all output to $OUT/NAME.log. At the end
each goal has a line with its measured value. The exit status is the number of steps that failed.
"""

import argparse
import json
import os
import selectors
import shlex
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import sweep  # noqa: E402
from offline import drawn  # noqa: E402
from table import CEILING  # noqa: E402


def tests_of(*names):
    return [f"tests/gpu/test_{name}.py" for name in names]


MODELS = os.environ.get("MODELS", "/tmp/quire-models")
OUT = Path(os.environ.get("OUT", ROOT / "build" / "gpu"))
PY = sys.executable
AWQ, W8A8 = "/tmp/quire-llama-8b-awq", "/tmp/quire-llama-8b-w8a8"
PYTHON = {"quire": [PY], "vllm": ["bash", "bench/gpu/in_vllm.sh", PY]}
TESTS = [PY, "-m", "pytest", "-p", "bench.gpu.json_report", "-p", "no:cacheprovider",
         "-p", "no:benchmark", "--dist", "worksteal"]  # fmt: skip
# HEAVY takes longest. ALONE is alone on the card: it measures memory and seconds.
HEAVY = ["tests/gpu/test_models.py", "tests/gpu/test_fallback.py"]
ALONE = ["tests/gpu/test_memory.py", "tests/gpu/test_start.py", "tests/gpu/test_fault_isolation.py"]
SUMS = "tests/gpu/test_peer_all_reduce.py"
RANKS = tests_of("tp", "stages", "recurrent_ranks", "data_parallel_attention", "context_parallel")
TWO_GPUS = [SUMS, *RANKS]
SMALL_ENGINES = ["-n", "8", "--dist", "loadscope", "--long", *RANKS]  # on the same two GPUs


@dataclass(frozen=True)
class Step:
    name: str
    command: list[str]
    limit_s: float


def offline(name, model, cases, limit_s, repeat=1, engine="quire", **kw):
    """A step of bench/offline.py. kw: options of the engine."""
    load = kw.pop("load_format", "dummy")
    command = [*PYTHON[engine], "bench/offline.py", "--engine", engine, "--model", model,
               "--cases", cases, "--repeat", str(repeat), "--load-format", load,
               "--kw", json.dumps(kw)]  # fmt: skip
    return Step(name, command, limit_s)


def test_steps():
    """Every file of tests/gpu; those that take longest come last."""
    others = [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "tests/gpu").glob("test_*.py"))
        if str(file.relative_to(ROOT)) not in (*HEAVY, *ALONE, *TWO_GPUS)
    ]
    return [
        Step("tests", [*TESTS, "-n", "7", *others], 330),
        Step("tests alone", [*TESTS, "-n", "0", *ALONE], 120),
        Step("tests of two processes", [*TESTS, "-n", "0", *TWO_GPUS], 60),
        Step("tests of models", [*TESTS, "-n", "7", *HEAVY], 400),
    ]


def quant_steps():
    llama, moe = f"{MODELS}/llama-8b", f"{MODELS}/qwen3-30b-a3b"
    most = "decode1,rows8,rows32,mixed512,prefill"
    some = "decode1,mixed512,prefill"
    size = {"max_model_len": 8192}
    files = tests_of("quant", "fp8", "kv_quant", "moe")
    return [
        Step("tests", [*TESTS, "-n", "7", *files], 150),
        Step("write AWQ", [PY, "bench/gpu/checkpoints.py", "awq", llama, AWQ], 60),
        offline("llama-8b awq", AWQ, most, 110, load_format="auto", **size),
        offline("llama-8b bf16", llama, most, 110, **size),
        offline("llama-8b awq again", AWQ, "decode1", 40, load_format="auto", **size),
        offline("llama-8b fp8", llama, some, 90, quantization="fp8", **size),
        Step("write W8A8", [PY, "bench/gpu/checkpoints.py", "w8a8", llama, W8A8], 20),
        offline("llama-8b w8a8", W8A8, some, 90, **size),
        Step("gguf types", [PY, "bench/quant_gpu.py", "--rows", "1", "--models", "llama-8b",
                            "--formats", "w4g128,w4g32,q8_0,q4_k,q6_k,nf4,mxfp4"], 90),
        offline("30b-a3b int4", moe, "decode1,mixed512", 90, quantization="int4", **size),
        offline("30b-a3b bf16", moe, "decode1,mixed512", 90, **size),
    ]  # fmt: skip


def lora_steps():
    llama = f"{MODELS}/llama-8b"
    engine = [PY, "bench/lora.py", llama, "--load-format", "dummy", "--repeat", "2", "--host", "40",
              "--cases"]  # fmt: skip
    return [
        Step("tests", [*TESTS, "-n", "7", *tests_of("lora", "lora_engine", "lora_load")], 120),
        Step("engine", [*engine, "1x0,32x0,1x1,8x1,32x1,8x8,32x8,64x32,32h8,1r64,mixed512,first"],
             330),
        Step("layers", [PY, "bench/lora_gpu.py", "--rows", "1,8,32,64", "--adapters", "1,8,32",
                        "--ranks", "16"], 120),
    ]  # fmt: skip


def speculation_steps():
    """Methods with weights first: their passes depend on the GPU most. A server with a head of
    simulated acceptance, and one without, have the same load."""
    llama, small = f"{MODELS}/llama-8b", f"{MODELS}/qwen3-0.6b"
    dummy = ["--load-format", "dummy"]
    heads = [PY, "bench/heads.py", llama, *dummy, "--lengths", "3", "--kv-cache", "8GiB"]
    pace = [PY, "bench/speculation.py", "pace"]
    edits = ["--rows", "1,8", "--acceptance", "edit-ngram,edit-suffix", "--drafts", "16",
             "--tokens", "256", "--turns", "1"]  # fmt: skip
    head = {"method": "eagle3", "model": f"{llama}-eagle3", "num_speculative_tokens": 3,
            "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3}  # fmt: skip
    server = f"{PY} -m quire serve {llama} --load-format dummy --max-model-len 4096"
    load = [PY, "bench/load.py", "--model", llama, "--concurrency", "8,32,128", "--start"]
    spec = f"{server} --speculative-config {shlex.quote(json.dumps(head))}"
    return [
        Step("tests", [*TESTS, "-n", "7", *tests_of("drafts"), "-k", "continue or models"], 150),
        Step("heads", [*heads, "--rows", "8,32", "--tokens", "256", "--rounds", "3"], 110),
        Step("heads, one row", [*heads, "--rows", "1", "--tokens", "768", "--rounds", "2"], 90),
        Step("serve head", [*load, spec], 90),
        Step("serve plain", [*load, server], 70),
        Step("edits 8B", [*pace, llama, *dummy, *edits], 70),
        Step("edits 0.6B", [*pace, small, *dummy, *edits], 60),
        Step("never 8B", [*pace, llama, *dummy, "--rows", "1,8,32,128,256", "--acceptance", "0",
                          "--turns", "2", "--rounds", "3"], 100),
        Step("never 0.6B", [*pace, small, *dummy, "--rows", "1,8,32,128,256", "--acceptance", "0"],
             80),
        Step("verify", [PY, "bench/gpu_verify.py", "--model", llama, "--rows", "1,4,8", "--drafts",
                        "0,1,3,7", "--context", "300,8000"], 60),
        Step("sweep", [*pace, llama, *dummy, "--rows", "1,8,32,128,256,64,16", "--acceptance",
                       "0.9,0.6,0.3", "--turns", "2", "--rounds", "2"], 230),
    ]  # fmt: skip


def two_gpus_steps():
    compare = [PY, "bench/tp_gpu.py", MODELS]
    host = [PY, "bench/host.py", "--model", f"{MODELS}/qwen3-0.6b", "--rows", "1,8,32", "--kw"]
    death = [PY, "bench/rank_death.py", f"{MODELS}/llama-8b"]
    standby = "-tp 2 --load-format dummy --max-model-len 4096 --engine-standby"
    return [
        Step("starts", [*compare, "--rows", "llama-8b", "--ranks", "", "--ways", "starts"], 130),
        Step("sums", [*TESTS, "-n", "0", SUMS], 60),
        Step("tests", [*TESTS, *SMALL_ENGINES], 330),
        Step("8B", [*compare, "--rows", "llama-8b", "--seconds", "170"], 230),
        Step("failures", death, 120),
        Step("failures with standby", [*death, "--faults", "kill", "--serve", standby], 70),
        Step("host of one", [*host, "{}"], 40),
        Step("host of two", [*host, '{"tensor_parallel_size": 2}'], 40),
        Step("collectives", [PY, "bench/collectives.py"], 60),
        Step("8B in stages", [*compare, "--rows", "llama-8b", "--ranks", "1", "--ways",
                              "stages", "--cases", "decode1,mixed512"], 190),
        Step("whole experts", [*compare, "--rows", "qwen3-30b-a3b", "--ranks", "1,2", "--ways",
                               "experts", "--cases", "decode1,mixed512"], 200),
        Step("others", [*compare, "--rows", "qwen3-30b-a3b,qwen3-0.6b", "--ways", "none",
                        "--cases", "decode1,mixed512"], 200),
        Step("contexts", [PY, "bench/context_parallel.py", "--model", f"{MODELS}/deepseek-v2-lite"],
             150),
    ]  # fmt: skip


# Later sweeps come first: the kernels of sampled requests are compiled there. No ratio is of them.
SWEEP = ",".join(f"sweep{number}" for number in (50, 52, *range(40)))
COMPARED = {  # part -> model, cases, max_model_len, limits of quire and of vLLM in seconds
    "llama": ("llama-8b", f"rows8x512,prefix256,prefill,long32k,rows256,{SWEEP},batch", 33792,
              250, 400),
    "small": ("qwen3-0.6b", "rows8x512,prefix256,prefill,long32k,rows256,batch,decode1", 33792,
              100, 170),
    "moe": ("qwen3-30b-a3b", "decode1,rows8x512,prefill,rows32,mixed512", 8192, 120, 240),
}  # fmt: skip


def side_by_side_steps():
    """Each part with vLLM, then with quire."""
    steps, llama = [], f"{MODELS}/llama-8b"
    for engine, module in (("vllm", "vllm.entrypoints.cli.main"), ("quire", "quire")):
        for part, (model, cases, length, *limits) in COMPARED.items():
            limit_s = limits[engine == "vllm"]
            steps.append(offline(f"{part} {engine}", f"{MODELS}/{model}", cases, limit_s,
                                 engine=engine, max_model_len=length))  # fmt: skip
        server = f"{PY} -m {module} serve {llama} --load-format dummy --max-model-len 33792"
        load = [*PYTHON[engine], "bench/load.py", "--start", server, "--model", llama,
                "--concurrency", "32,128,256"]  # fmt: skip
        media = ["env", f"ENGINE={engine}", *PYTHON[engine], "bench/media.py", "--repeat", "3"]
        steps += [Step(f"serve {engine}", load, 300), Step(f"media {engine}", media, 200)]
    return sorted(steps, key=lambda step: step.name.split()[0])


STEPS = {
    "tests": test_steps, "quant": quant_steps, "lora": lora_steps, "two_gpus": two_gpus_steps,
    "side_by_side": side_by_side_steps, "speculation": speculation_steps,
}  # fmt: skip


def value(found, step, key, **where):
    """Return what the last line of a step says under a key, or None."""
    for line in reversed(found):
        if line["step"] == step and all(line.get(k) == v for k, v in where.items()) and key in line:
            return line[key]
    return None


def ratio(a, b):
    return a / b if a and b else None


def quant_goals(found):
    """Yield (what, measured or None, goal)."""
    rate = lambda step, case, key="out_tok_s": value(found, step, key, case=case)  # noqa: E731
    four = [("decode1", 600), ("rows8", 3800), ("rows32", 9500), ("mixed512", 11500)]
    for case, goal in four:
        yield f"8B AWQ {case}, tok/s", rate("llama-8b awq", case), goal
        over = ratio(rate("llama-8b awq", case), rate("llama-8b bf16", case))
        yield f"8B AWQ {case} over bf16", over, None
    yield "8B AWQ prefill, tok/s", rate("llama-8b awq", "prefill", "total_tok_s"), 40000
    for case, goal in (("decode1", 0.97), ("mixed512", 0.97), ("prefill", 0.95)):
        two = (rate(f"llama-8b {kind}", case, "total_tok_s") for kind in ("w8a8", "fp8"))
        yield f"8B W8A8 over fp8, {case}", ratio(*two), goal
    for case, goal in (("decode1", 1.3), ("mixed512", 1.25)):
        two = (rate(f"30b-a3b {kind}", case) for kind in ("int4", "bf16"))
        yield f"30B-A3B int4 over bf16, {case}", ratio(*two), goal
    for name in ("w4g32", "q8_0", "q4_k", "q6_k"):
        lines = [one for one in found if one["step"] == "gguf types" and one.get("format") == name]
        shares = [one["TB/s"] / one["of TB/s"] for one in lines if "TB/s" in one]
        yield f"{name} at one row, least share of bandwidth", min(shares, default=None), 0.7
    again = value(found, "llama-8b awq again", "stages", case="startup") or {}
    yield "8B AWQ, load from the page cache, s (at most)", again.get("weights"), 5.0


def lora_goals(found):
    goals = {"1x0": 0.995, "32x0": 0.995, "1x1": 0.93, "8x1": 0.93, "32x1": 0.93, "8x8": 0.9,
             "32x8": 0.9, "mixed512": 0.92, "64x32": 0.8, "1r64": 0.9}  # fmt: skip
    for case, goal in goals.items():
        yield f"LoRA {case} (rows x adapters)", value(found, "engine", "ratio", case=case), goal
    mixed = value(found, "engine", "ratio", case="32h8")
    yield "time between tokens, half of 32 rows without (at most)", ratio(1, mixed), 1.08
    for place, goal in (("slot ms", None), ("host ms", 6.0), ("disk ms", 80.0)):
        first = value(found, "engine", place, case="first")
        slot = value(found, "engine", "slot ms", case="first")
        more = None if first is None else first - (slot if goal else 0)
        yield (
            f"first token, adapter in {place[:-3]}, ms{' more (at most)' if goal else ''}",
            more,
            goal,
        )


def speculation_goals(found):
    for step, rows, goal in (("heads, one row", 1, 2.2), ("heads", 8, 2.1), ("heads", 32, 1.7)):
        for adaptive in (False, True):
            what = f"EAGLE-3, {rows} rows{', its own choice of drafts' if adaptive else ''}"
            yield what, value(found, step, "ratio", rows=rows, adaptive=adaptive), goal
    for clients in (8, 32, 128):
        two = (
            value(found, f"serve {kind}", "out_tok_s", concurrency=clients)
            for kind in ("head", "plain")
        )
        yield f"served with EAGLE-3, {clients} clients", ratio(*two), 0.98
    for step, goal in (("edits 8B", 6.0), ("edits 0.6B", 4.5)):
        for method in ("ngram", "suffix"):
            yield (
                f"{step}, {method}",
                value(found, step, "ratio", rows=1, drafts=f"edit-{method}"),
                goal,
            )
    for step in ("never 8B", "never 0.6B", "sweep"):
        ratios = [one["ratio"] for one in found if one["step"] == step and "ratio" in one]
        yield f"{step}, least over off", min(ratios, default=None), 0.98


RATES = ("out_tok_s", "requests/s")
TIMES = ("init_s", "ttft_p50", "ttft_p99", "itl_p99", "image ms", "text ms")
ALL_TOKENS = ("prefill", "prefix256", "long32k")  # cases that are mostly prompts


def side_by_side_goals(_):
    """Yield quire over vLLM from all lines in $OUT, the last of each case, and shares of limits."""
    sides = {"quire": {}, "vllm": {}}
    for text in (OUT / "side_by_side.jsonl").read_text().splitlines():
        line = json.loads(text)
        part, _, engine = line["step"].rpartition(" ")
        case = line.get("case", line.get("concurrency"))
        if engine in sides and case is not None:
            sides[engine][part, case] = line
    shape = sweep.Shape(json.loads(Path(MODELS, "llama-8b", "config.json").read_text()))
    sweeps = []
    for (part, case), ours in sides["quire"].items():
        peer = sides["vllm"].get((part, case))
        if peer is None:
            continue
        if not str(case).startswith("sweep"):
            for key in (*RATES, *TIMES):
                key = "total_tok_s" if key == "out_tok_s" and case in ALL_TOKENS else key
                most = " (at most)" if key in TIMES else ""
                if key in ours:
                    yield f"{part} {case}, {key}{most}", ratio(ours[key], peer[key]), 1.0
        elif int(case.removeprefix("sweep")) < 40:
            prompts, outputs, what = drawn(int(case.removeprefix("sweep")), 1, 100000)
            least = sweep.limit_s(shape, prompts, outputs, what["shared"])
            faster, share, peers = peer["s"] / ours["s"], least / ours["s"], least / peer["s"]
            sweeps.append((what["sampled"], faster, share, peers))
            yield f"{case}, share of the limit {share:.2f} (vLLM {peers:.2f})", faster, 1.0
    for sampled, kind in ((False, "greedy"), (True, "sampled")):
        some = [one for one in sweeps if one[0] == sampled]
        for what, at in (("over vLLM", 1), ("of the limit", 2), ("of the limit, vLLM", 3)):
            values = [one[at] for one in some]
            yield f"{len(some)} {kind} sweeps {what}, least", min(values, default=None), None
            middle = statistics.median(values) if values else None
            yield f"{len(some)} {kind} sweeps {what}, median", middle, None


GOALS = {
    "quant": quant_goals, "lora": lora_goals, "side_by_side": side_by_side_goals,
    "speculation": speculation_goals,
}  # fmt: skip


class Report:
    """Writes $OUT/NAME.jsonl and $OUT/NAME.log."""

    def __init__(self, name):
        OUT.mkdir(parents=True, exist_ok=True)
        self.lines, self.base = [], {"date": time.strftime("%Y-%m-%d"), "commit": commit()}
        self._json = (OUT / f"{name}.jsonl").open("a", encoding="utf-8")
        self.log = (OUT / f"{name}.log").open("ab")

    def add(self, line):
        line = self.base | line
        self.lines.append(line)
        self._json.write(json.dumps(line) + "\n")
        self._json.flush()
        print(
            json.dumps({k: v for k, v in line.items() if k not in ("command", *self.base)}),
            flush=True,
        )


def commit():
    kept = ROOT / ".whl" / "commit"
    if kept.exists():
        return kept.read_text().strip()
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True,
                           text=True, check=False)  # fmt: skip
    return found.stdout.strip() or "?"


def run(step, limit_s, report):
    """Run a step. Returns its exit status, or "time" if it was killed at its limit."""
    print(f"--- {step.name}, at most {limit_s:.0f} s", flush=True)
    report.log.write(f"--- {step.name}: {' '.join(step.command)}\n".encode())
    began, rest, status = time.monotonic(), b"", None
    process = subprocess.Popen(step.command, cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while True:
            left = limit_s - (time.monotonic() - began)
            if left <= 0:
                status = "time"
                break
            if not ready.select(left):
                continue
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                break
            report.log.write(data)
            *whole, rest = (rest + data).split(b"\n")
            for text in whole:
                take(text, step, report)
    if status is None:
        status = process.wait()
    with_children(process)
    report.log.flush()
    if status:
        print(Path(report.log.name).read_bytes()[-2000:].decode(errors="replace"), flush=True)
    return status, time.monotonic() - began


def take(text, step, report):
    if text.startswith(b"{"):
        try:
            line = json.loads(text)
        except ValueError:
            return
        command = " ".join(step.command).replace(PY, "python").replace(MODELS, "MODELS")
        report.add({"step": step.name, "command": command} | line)


def with_children(process):
    """End what the step has left, and wait for the process."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def chosen(steps, names, parser):
    """The steps with these names, in one string with commas; all if there are no names."""
    if names is None:
        return steps
    wanted = [name.strip() for name in names.split(",")]
    known = [step.name for step in steps]
    for name in wanted:
        if name not in known:
            parser.error(f"no step {name!r}; the steps are {', '.join(known)}")
    return [step for step in steps if step.name in wanted]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=STEPS)
    parser.add_argument("seconds", nargs="?", type=float, default=540)
    parser.add_argument("--steps", help="names of steps, with commas between them")
    a = parser.parse_args()
    steps = chosen(STEPS[a.name](), a.steps, parser)
    began, failed = time.monotonic(), 0
    report = Report(a.name)
    card = subprocess.run([PY, "-c", CEILING], capture_output=True, text=True, check=False)
    for text in card.stdout.splitlines():
        if text.startswith("{"):
            report.base["machine"] = json.loads(text)["machine"]
            report.add({"step": "card"} | json.loads(text))
    for step in steps:
        left = a.seconds - (time.monotonic() - began)
        if left < min(20, step.limit_s):
            report.add({"step": step.name, "status": "not run: no time is left"})
            continue
        status, seconds = run(step, min(left, step.limit_s), report)
        report.add({"step": step.name, "status": status, "s": round(seconds, 1)})
        failed += status != 0
    for what, measured, goal in GOALS.get(a.name, lambda found: ())(report.lines):
        if a.steps and measured is None:
            continue
        figure = None if measured is None else round(measured, 3)
        met = None
        if goal is not None and measured is not None:
            met = measured <= goal if "at most" in what else measured >= goal
        report.add({"step": "goals", "what": what, "measured": figure, "goal": goal, "met": met})
    return failed


if __name__ == "__main__":
    sys.exit(main())

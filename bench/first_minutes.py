"""Measures the first minutes of a server that has just become ready against the same load later.

usage: python bench/first_minutes.py MODEL [--options JSON] [--minutes 2] [--schemas] [--wipe]
                                     [--kinds] [--rows 512] [--longest 16000] [--cell-tokens N]
                                     [--cells FILE]

Starts `quire serve` and sends from the first second of ready a sequence of cells: so many requests
of one prompt length and one sampling kind, at once or spread over a part of a second. First each
number of rows, each length and each kind in random order, then random cells until the minutes are
over. The same cells follow a second time with other prompts and other schemas: the steady time.
A folder without weights gets random ones. --wipe: no cache of kernels exists, and the page cache is
dropped where this process may do that. On a CPU fewer rows, shorter prompts and outputs. --kinds
first sends a request of each kind of tests/server/first_requests.py, and three more of it.

One JSON line. `steps`: the times between any two arrivals of tokens of a cell. Per cell (--cells
FILE: a line for each cell; `worst`: those with the largest difference) of both runs: TTFT p50 and
p99, the longest time between two tokens of one stream, the longest step, in ms, and tokens per
second. Differences compare the n-th longest of the first run with the n-th longest of the second:

    longest_step_over_steady   the largest difference of a cell's longest steps, in ms, and as a ratio
    stalls                     steps that take over 100 ms more than in the second run
    late_first_tokens          requests whose TTFT is over 100 ms more
    late_tokens                times between two tokens of one stream that are over 100 ms more
    compilations, captures     the server's counters of what happened after ready, after each run;
                               null if it has none
    kinds                      ms of the first request of each kind, and the median of the others
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from first_answer import free_port, send_request

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from quire.cli.bench import client  # noqa: E402
from quire.cli.bench.workload import SampleRequest  # noqa: E402
from tests.server import first_requests  # noqa: E402

STALL_MS = 100
WORST = 8
GIVE_UP_S = 900
"""Seconds in which a server must become ready."""
SPREAD_S = 0.3
"""Time over which the requests of a cell arrive if they do not arrive at once."""
COUNTERS = {
    "compilations": "quire:kernel_compilations_after_ready_total",
    "captures": "quire:graph_captures_after_ready_total",
}
KINDS = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "seed": {"temperature": 0.8, "seed": 7},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k": {"temperature": 0.8, "top_k": 40},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "top_all": {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.02},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.3,
    },
    "logprobs": {"temperature": 0.8, "logprobs": 5},
    "prompt_logprobs": {"temperature": 0, "prompt_logprobs": 2, "stream": False},
    "logit_bias": {"temperature": 0.8, "logit_bias": {"5": 2.0, "11": -100.0}},
    "min_tokens": {"temperature": 0.8, "min_tokens": 4},
    "several": {"temperature": 0.8, "n": 4},
    "whole": {"temperature": 0, "stream": False},
}
SCHEMAS = {
    "json_schema": lambda name: {
        "structured_outputs": {
            "json": {
                "type": "object",
                "properties": {
                    name: {"type": "string", "maxLength": 12},
                    "count": {"type": "integer"},
                    "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
                },
                "required": [name, "count"],
                "additionalProperties": False,
            }
        }
    },
    "regex": lambda name: {"structured_outputs": {"regex": f"{name}-[a-z]{{2,8}}-[0-9]{{3}}"}},
    "choice": lambda name: {"structured_outputs": {"choice": [name, f"not {name}", "neither"]}},
}
SCHEMA_TOKENS = 48
"""Tokens of a text with a schema at least: it is completed within them."""
PROMPT_LOGPROBS_TOKENS = 2000
"""Prompt tokens of a cell with prompt logprobs: an answer has some hundred bytes a token."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Limits of the cells."""

    rows: int
    longest: int  # tokens of a prompt
    tokens: int  # of all prompts of a cell
    output: int


@dataclasses.dataclass(frozen=True)
class Cell:
    """Requests that are sent together."""

    kind: str
    rows: int
    prompt: int
    spread: bool = False

    @property
    def name(self):
        return f"{self.kind} {self.rows}x{self.prompt}" + (" spread" if self.spread else "")

    def bodies(self, name, output):
        """Return the fields of each request: those of sampling. name: unique to cell and run."""
        if self.kind in KINDS:
            fields = {"max_tokens": output, "ignore_eos": True, **KINDS[self.kind]}
        else:
            most = max(output, SCHEMA_TOKENS)
            fields = {"max_tokens": most, "temperature": 0.8, **SCHEMAS[self.kind](name)}
        return [fields] * max(1, self.rows // fields.get("n", 1))


def sizes_up_to(most):
    """Return numbers of rows: many are no power of two and no other round number."""
    fibonacci = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377]
    return sorted({n for n in (*fibonacci, 4, 16, 32, 64, 128, 256, most) if n <= most})


def lengths_up_to(most):
    listed = (1, 2, 7, 16, 17, 50, 129, 300, 777, 1023, 1500, 3000, 5000, 8192, 11000, 16000, most)
    return sorted({n for n in listed if n <= most})


def make_cells(sizes, kinds, draw):
    """Yield cells without end: each size and each kind once, then random ones."""
    in_turn = itertools.cycle(kinds)
    once = [(next(in_turn), rows, draw.choice((20, 60, 200))) for rows in sizes_up_to(sizes.rows)]
    once += [(next(in_turn), 1, length) for length in lengths_up_to(sizes.longest)]
    once += [(kind, rows, 33) for kind in kinds for rows in (1, max(1, sizes.rows // 5))]
    draw.shuffle(once)
    for kind, rows, prompt in once:
        yield fit(Cell(kind, rows, prompt, draw.random() < 0.3), sizes)
    while True:
        rows = round(sizes.rows ** draw.random())
        prompt = round(sizes.longest ** draw.random())
        yield fit(Cell(draw.choice(kinds), rows, prompt, draw.random() < 0.3), sizes)


def fit(cell, sizes):
    """Return the cell with shorter prompts if all of them have too many tokens."""
    tokens = PROMPT_LOGPROBS_TOKENS if cell.kind == "prompt_logprobs" else sizes.tokens
    longest = max(1, min(cell.prompt, min(tokens, sizes.tokens) // cell.rows))
    return dataclasses.replace(cell, prompt=longest)


# -- load ------------------------------------------------------------------------------------------


async def run_cell(target, cell, output, vocab, name):
    """Send the cell's requests. Returns their results when all have ended."""
    draw = random.Random(name)
    fields = cell.bodies(name, output)
    prompts = [tuple(draw.choices(range(10, vocab), k=cell.prompt)) for _ in fields]

    async def one(prompt, extra, after):
        await asyncio.sleep(after)
        item = SampleRequest(prompt, extra["max_tokens"])
        own = dataclasses.replace(target, extra=extra)
        if extra.get("stream", True):
            return await client.send_request(own, item, time.perf_counter())
        return await send_whole(own, item)

    spread = SPREAD_S / len(fields) if cell.spread else 0.0
    return await asyncio.gather(
        *(one(*each, i * spread) for i, each in enumerate(zip(prompts, fields)))
    )


async def send_whole(target, item):
    """Send a request that is not streamed: its only arrival is the whole answer."""
    answer = client.RequestResult(time.perf_counter())
    body = {"model": target.model, "prompt": list(item.prompt), **target.extra}
    async with target.http.post(target.url, json=body) as response:
        found = await response.json()
        if response.status != 200:
            answer.error = f"{response.status}: {found}"[:300]
            return answer
    answer.chunks_at.append(time.perf_counter())
    answer.output_tokens = found["usage"]["completion_tokens"]
    return answer


@dataclasses.dataclass
class Times:
    """Of one run of a cell, in ms, longest first."""

    ttft: list
    between: list  # two tokens of one stream
    steps: list  # two arrivals of any stream, the sending of the first request included
    seconds: float
    tokens: int
    errors: list

    @classmethod
    def of(cls, results):
        done = [one for one in results if one.error is None]
        arrivals = sorted(at for one in done for at in one.chunks_at)
        arrivals = [min(one.sent_at for one in results), *arrivals]

        def ms(values):
            return sorted((value * 1e3 for value in values), reverse=True)

        return cls(
            ms(t for one in done for t in one.metric_values("ttft")),
            ms(t for one in done for t in one.metric_values("itl")),
            ms(b - a for a, b in itertools.pairwise(arrivals)),
            arrivals[-1] - arrivals[0],
            sum(one.output_tokens for one in done),
            [one.error for one in results if one.error is not None],
        )

    def summary(self):
        return {
            "ttft_p50": round(statistics.median(self.ttft or [0]), 1),
            "ttft_p99": round(self.ttft[len(self.ttft) // 100] if self.ttft else 0, 1),
            "longest_gap": round(max(self.between, default=0), 1),
            "longest_step": round(max(self.steps, default=0), 1),
            "tok_s": round(self.tokens / self.seconds, 1) if self.seconds else 0,
        }


def excess(first, second):
    """Return how much the n-th longest of the first run took longer than that of the second."""
    return [a - b for a, b in itertools.zip_longest(first, second, fillvalue=0.0)]


def stalls(first, second):
    return sum(ms > STALL_MS for ms in excess(first, second))


async def measure(port, model, args, began):
    """Run the cells twice. Returns the report."""
    base = f"http://127.0.0.1:{port}"
    async with client.open_session(None) as http:
        served = await client.find_model(http, base, None)
        async with http.get(f"{base}/v1/models") as got:
            longest = (await got.json())["data"][0]["max_model_len"]
        sizes = Sizes(
            args.rows, min(args.longest, longest - args.output - 1), args.cell_tokens, args.output
        )
        target = client.BenchEndpoint(http, f"{base}/v1/completions", served.name, {})
        kinds = [*KINDS, *(SCHEMAS if args.schemas else ())]
        vocab = served.vocab_size or 1000
        draw = random.Random(args.seed)
        cells, runs, counters = [], ([], []), []

        async def run(number, which):
            name = f"{'ab'[which]}{number}"
            gc.collect()
            results = await run_cell(target, cells[number], args.output, vocab, name)
            runs[which].append(Times.of(results))

        for cell in make_cells(sizes, kinds, draw):
            if time.perf_counter() - began > args.minutes * 60:
                break
            cells.append(cell)
            await run(len(cells) - 1, 0)
        counters.append(read_counters(port))
        for number in range(len(cells)):
            await run(number, 1)
        counters.append(read_counters(port))
    return report(cells, runs, counters, args)


def measure_kinds(port):
    """Return kind -> [ms of the first request, median ms of three more]."""
    names = ("France", "Spain", "Italy", "Peru")
    rounds, times = (
        [first_requests.requests_of(name) for name in names],
        collections.defaultdict(list),
    )
    for same in zip(*rounds):
        for kind, method, path, body in same:
            began = time.perf_counter()
            send_request(port, method, path, body)
            times[kind].append((time.perf_counter() - began) * 1e3)
    return {k: [round(v[0], 1), round(statistics.median(v[1:]), 1)] for k, v in times.items()}


def read_counters(port):
    """Return the counters of /metrics; None for one that the server does not have."""
    text = send_request(port, "GET", "/metrics")[1].decode()
    found = {}
    for short, name in COUNTERS.items():
        values = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        found[short] = int(sum(map(float, values))) if values else None
    return found


def report(cells, runs, counters, args):
    lines = []
    for cell, first, second in zip(cells, *runs):
        over = max(first.steps, default=0) - max(second.steps, default=0)
        line = {"cell": cell.name, "over_ms": round(over, 1)}
        lines.append(line | {"first": first.summary(), "second": second.summary()})
    if args.cells:
        with open(args.cells, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    worst = sorted(lines, key=lambda line: -line["over_ms"])[:WORST]
    pairs = list(zip(*runs))
    largest = worst[0]
    errors = collections.Counter(error for run in runs for one in run for error in one.errors)
    ratio = largest["first"]["longest_step"] / max(largest["second"]["longest_step"], 0.1)
    return {
        "cells": len(cells),
        "requests": sum(len(one.ttft) for one in runs[0]),
        "errors": dict(errors.most_common(5)),
        "seconds": [round(sum(one.seconds for one in run), 1) for run in runs],
        "tok_s": [
            round(sum(one.tokens for one in run) / sum(one.seconds for one in run)) for run in runs
        ],
        "longest_step_over_steady": {"ms": largest["over_ms"], "ratio": round(ratio, 2)},
        "stalls": sum(stalls(a.steps, b.steps) for a, b in pairs),
        "late_first_tokens": sum(stalls(a.ttft, b.ttft) for a, b in pairs),
        "late_tokens": sum(stalls(a.between, b.between) for a, b in pairs),
        **{name: [one[name] for one in counters] for name in COUNTERS},
        "worst": worst,
    }


# -- the server ------------------------------------------------------------------------------------


def flags_of(options):
    """Return the flags of `quire serve` for options by name."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return words


def serve_command(args, port):
    model, options = args.model, json.loads(args.options)
    folder = Path(model)
    if folder.is_dir():
        model = str(folder.resolve())
        if not any(folder.glob("*.safetensors")):
            options.setdefault("load_format", "dummy")
    flags = [*flags_of(options), *(first_requests.FLAGS if args.kinds else ())]
    return ["-m", "quire", "serve", model, "--port", str(port), *flags]


def fresh_environment(folder):
    """Return the environment of a user who has compiled nothing; downloaded models remain."""
    kept = {k: v for k, v in os.environ.items() if k not in ("TRITON_CACHE_DIR", "XDG_CACHE_HOME")}
    models = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    return {**kept, "HOME": folder, "QUIRE_CACHE": f"{folder}/quire", "HF_HOME": models}


def drop_page_cache():
    """Drop it. Returns False where this process may not."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def wait_ready(process, port):
    deadline = time.perf_counter() + GIVE_UP_S
    while (send_request(port, "GET", "/health") or (0,))[0] != 200:
        if process.poll() is not None or time.perf_counter() > deadline:
            raise SystemExit(f"the server did not become ready: status {process.poll()}, see --log")
        time.sleep(0.01)


@contextlib.contextmanager
def running(args, environment):
    """A server that has just become ready: (port, start of the process, time of ready)."""
    port = free_port()
    with open(args.log, "w") as log:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *serve_command(args, port)],
            stdout=log, stderr=log, env=environment, cwd=ROOT,
        )  # fmt: skip
        try:
            wait_ready(process, port)
            yield port, began, time.perf_counter()
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def has_gpu(options):
    return options.get("device") != "cpu" and shutil.which("nvidia-smi") is not None


def parse_args():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("model")
    ap.add_argument("--options", default="{}", help="options of quire serve, JSON by name")
    ap.add_argument("--minutes", type=float, default=2.0, help="of the first run")
    ap.add_argument("--schemas", action="store_true", help="also cells of structured output")
    ap.add_argument("--kinds", action="store_true", help="also requests of each kind, at first")
    ap.add_argument("--wipe", action="store_true", help="start without any cache")
    ap.add_argument("--rows", type=int, help="default: 512, on a CPU 32; at most max_num_seqs")
    ap.add_argument("--longest", type=int, help="tokens of a prompt; default: 16000, CPU 1000")
    ap.add_argument("--cell-tokens", type=int, help="prompt tokens of a cell at most")
    ap.add_argument("--output", type=int, help="tokens of an answer")
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--cells", help="file for a JSON line of each cell")
    ap.add_argument("--log", default=os.devnull, help="file for the server's log")
    args = ap.parse_args()
    options = json.loads(args.options)
    on_gpu = has_gpu(options)
    rows = args.rows or (512 if on_gpu else 32)
    args.rows = min(rows, options.get("max_num_seqs", rows))
    args.longest = args.longest or (16_000 if on_gpu else 1000)
    args.cell_tokens = args.cell_tokens or (65_536 if on_gpu else 2000)
    args.output = args.output or (32 if on_gpu else 12)
    return args, on_gpu


def main():
    args, on_gpu = parse_args()
    gc.disable()  # a collection between two cells, none within
    with contextlib.ExitStack() as stack:
        environment, dropped = dict(os.environ), None
        if args.wipe:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="first-minutes-"))
            environment, dropped = fresh_environment(folder), drop_page_cache()
        port, began, ready_at = stack.enter_context(running(args, environment))
        kinds = measure_kinds(port) if args.kinds else None
        began_at = time.perf_counter()
        found = asyncio.run(measure(port, args.model, args, began_at))
    line = {
        "bench": "first_minutes",
        "model": Path(args.model).name,
        "options": json.loads(args.options),
        "device": "gpu" if on_gpu else "cpu",
        "schemas": args.schemas,
        "wiped": args.wipe,
        "page_cache_dropped": dropped,
        "minutes": args.minutes,
        "rows": args.rows,
        "longest": args.longest,
        "ready_s": round(ready_at - began, 2),
        **found,
        "kinds": kinds,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()

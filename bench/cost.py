"""Compares the throughput of this tree with that of another revision, in one run.

    python bench/cost.py REVISION [--cases offline,served] [--pairs 6] [--model DIR --llm '{...}']
                                  [--only-here "flags of quire serve"]

REVISION may be a folder with a checkout. Both engines (or servers) run at once and take turns, A B
B A ..., so that drift of the machine affects both; the other one is idle meanwhile. Every round is
the same work: token ids, greedy, ignore_eos. Prints one JSON line a case: tokens per second of each
round, the median of the ratios of neighbours, and their quartiles; and the same of tokens per
second of processor time, which is more reliable on a shared machine.
"""

import argparse
import asyncio
import json
import os
import random
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
EMBEDDED = {"kv_cache_memory_bytes": "256MiB", "max_num_seqs": 64}


# -- a process that generates offline ------------------------------------------------------------------


def work(args):
    """Return the (prompts, lengths) of a round."""
    draw = random.Random(args.seed)
    low, high = map(int, args.prompt.split(":"))
    most = list(map(int, args.output.split(":")))
    prompts = [
        [draw.randrange(10, args.vocab) for _ in range(draw.randint(low, high))]
        for _ in range(args.requests)
    ]
    return prompts, [draw.randint(most[0], most[-1]) for _ in prompts]


def child(args):
    """Create an engine, then run a round for every line of stdin."""
    from quire import LLM, SamplingParams

    folder = {} if args.model == "embedded" else {"load_format": args.load_format}
    llm = LLM(model=args.model, **folder, **json.loads(args.llm))
    write_message({"ready": True})
    for line in sys.stdin:
        args.seed = int(line)
        prompts, lengths = work(args)
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in lengths]
        inputs = [{"prompt_token_ids": one} for one in prompts]
        began = time.perf_counter()
        found = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(one.outputs[0].token_ids) for one in found)
        assert tokens == sum(lengths), (tokens, sum(lengths))
        write_message({"tok_s": tokens / seconds})


def write_message(message):
    print("\x00" + json.dumps(message), flush=True)  # marks messages, as the library may print too


class Offline:
    """An engine of one tree."""

    def __init__(self, stack, tree, args, flags):
        words = ["--child", *("--model", args.model), *("--llm", args.llm)]
        for name in ("requests", "prompt", "output", "vocab", "load_format"):
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "-", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(tree),
            cwd=tree,
        )
        stack.callback(self.process.kill)

    def ready(self):
        self._read_message()

    def round(self, seed):
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        return self._read_message()["tok_s"]

    def _read_message(self):
        for line in self.process.stdout:
            if line.startswith("\x00"):
                return json.loads(line[1:])
        raise SystemExit("an engine ended")


# -- a server ------------------------------------------------------------------------------------------


class Served:
    """A server of one tree, and clients that send streaming requests in a closed loop."""

    def __init__(self, stack, tree, args, flags):
        self.args = args
        words = [*flags_of(json.loads(args.llm)), *flags, "--port", "0"]
        if args.model != "embedded":
            words += ["--load-format", args.load_format]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quire", "serve", args.model, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment(tree),
            cwd=tree,
        )
        stack.callback(self.process.wait)
        stack.callback(self.process.terminate)

    def ready(self):
        for line in self.process.stdout:
            if found := re.search(r"  curl (https?://[0-9.:]+)", line):
                self.url = found[1]
                return
        raise SystemExit("a server ended")

    def round(self, seed):
        self.args.seed = seed
        return asyncio.run(self._load())

    async def _load(self):
        import aiohttp

        todo = iter(list(zip(*work(self.args))))
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.url, connector=connector) as session:
            began = time.perf_counter()
            counts = await asyncio.gather(
                *(self._client(session, todo) for _ in range(self.args.clients))
            )
            return sum(counts) / (time.perf_counter() - began)

    async def _client(self, session, todo):
        count = 0
        for prompt, length in todo:
            body = {"prompt": prompt, "max_tokens": length, "ignore_eos": True, "temperature": 0}
            async with session.post("/v1/completions", json={**body, "stream": True}) as got:
                assert got.status == 200, await got.text()
                last = b""
                async for data in got.content.iter_any():
                    last = (last + data)[-40:]
                assert last.endswith(b"data: [DONE]\n\n"), last
            count += length
        return count


def flags_of(options):
    return [word for name, value in options.items() for word in _flag(name, value)]


def _flag(name, value):
    word = "--" + name.replace("_", "-")
    return (
        [word if value else "--no-" + word[2:]] if isinstance(value, bool) else [word, str(value)]
    )


# -- both in turn --------------------------------------------------------------------------------------


def environment(tree):
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), *sys_path()])}


def sys_path():
    path = os.environ.get("PYTHONPATH", "")
    return [one for one in path.split(os.pathsep) if one and Path(one).resolve() != ROOT]


@contextmanager
def tree_of(revision):
    """Yield a folder with a copy of that revision."""
    if Path(revision).is_dir():
        yield Path(revision).resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="cost"))
    try:
        packed = subprocess.run(
            ["git", "-C", ROOT, "archive", revision], check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-x", "-C", folder], check=True, input=packed.stdout)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def processor_s(pid):
    """Return the processor seconds of a process and its descendants."""
    first = psutil.Process(pid)
    times = [one.cpu_times() for one in (first, *first.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def measured(side, seed, tokens):
    """Return (tokens per second, tokens per second of processor time) of a round."""
    before = processor_s(side.process.pid)
    rate = side.round(seed)
    return rate, tokens / (processor_s(side.process.pid) - before)


def compare(kind, base, compared, args):
    with ExitStack() as stack:
        sides = [
            kind(stack, base, args, []),
            kind(stack, compared, args, shlex.split(args.only_here)),
        ]
        for one in sides:
            one.ready()
        for one in sides:
            one.round(0)  # warm-up
        rates = [[], []]
        for pair in range(args.pairs):
            args.seed = pair + 1
            tokens = sum(work(args)[1])
            for side in (0, 1) if pair % 2 == 0 else (1, 0):
                rates[side].append(measured(sides[side], pair + 1, tokens))
    return rates


def ratio(base, compared):
    """Return the median and the quartiles of the ratios of neighbours."""
    ratios = [b / a for a, b in zip(base, compared)]
    spread = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return [round(one, 4) for one in (statistics.median(ratios), spread[0], spread[2])]


def summary(case, args, rates):
    (base, base_cpu), (compared, here_cpu) = (zip(*one) for one in rates)
    return {
        "bench": "cost",
        "case": case,
        "base": args.revision,
        "model": Path(args.model).name,
        "requests": args.requests,
        "base_tok_s": [round(one) for one in base],
        "here_tok_s": [round(one) for one in compared],
        "ratio_and_quartiles": ratio(base, compared),
        "processor_ratio_and_quartiles": ratio(base_cpu, here_cpu),
        "processor_ratio_of_best": round(max(here_cpu) / max(base_cpu), 4),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("revision", help="of git, or a folder with a checkout")
    parser.add_argument("--here", default="HEAD", help="the revision to compare; '.': this tree")
    parser.add_argument("--cases", default="offline,served")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--llm", help="options of the engine, as JSON")
    parser.add_argument("--load-format", default="dummy", help="model folder")
    parser.add_argument("--only-here", default="", help="flags that the base lacks")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--prompt", default="16:128", help="tokens, from:to")
    parser.add_argument("--output", default="32:96", help="tokens, from:to")
    parser.add_argument("--vocab", type=int, default=3000)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.llm is None:
        args.llm = json.dumps(EMBEDDED if args.model == "embedded" else {})
    if args.child:
        child(args)
        return
    compared = str(ROOT) if args.here == "." else args.here
    with tree_of(args.revision) as base, tree_of(compared) as compared_tree:
        for case in args.cases.split(","):
            rates = compare({"offline": Offline, "served": Served}[case], base, compared_tree, args)
            print(json.dumps(summary(case, args, rates)), flush=True)


if __name__ == "__main__":
    main()

"""Runs a server under a mixed load for N minutes: what grows, what fails, what gets slower.

    python bench/soak.py [MODEL] [--minutes 3] [--clients 12] [--cancels 0.05] [--bad 0.02]
                         [--serve "--kv-cache-memory-bytes 64MiB"] [--trace]

Starts `quire serve MODEL` and loads it in a closed loop with chats, completions, n > 1, several
prompts, tools, structured output, Responses (also stored), Messages, beams; streamed and not.
Some are cancelled at a random moment (by a disconnect, by a deadline, by their id), and some are
invalid (those of tests/abuse that are refused). One JSON line:

    slope   of each process, by least squares after the warm-up (a fifth): MiB of RSS an hour with
its standard error (and of the last half alone: caches fill up before); and of its memory measured
from within (bench/probe.py): Python's blocks, malloc's bytes in use. RSS grows without these two if
a heap is fragmented.
    last    at rest after the load: blocks held, files, threads, tasks, temporary files; `first` is
            the same after the warm-up
    errors  wrong answers, by kind and status
    times   TTFT and inter-token times, p50 and p99 in ms, of the first and of the last fifth
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SWITCHES = (
    *("--enable-dev-routes", "--enable-responses-store", "--responses-store-size", "50"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--port", "0"),
    *("--grammar-cache-size", "64"),
)
EMBEDDED = ("--kv-cache-memory-bytes", "64MiB")
KEPT = ("grown", "lines", "garbage", "python_blocks_without", "trimmed_mib")
"""Fields of a probe's last line. garbage: objects in cycles that waited for the collector.
trimmed_mib: RSS after the warm-up and at the end, each after malloc has returned its free memory.
"""
QUIET_S = 4.0
"""Seconds at rest before counting."""
WORDS = ["once", "upon", "a", "time", "there", "was", "one", "who", "would", "not", "count"]
TOOL = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


# -- the server --------------------------------------------------------------------------------------


class Served:
    """A server with a probe in each of its processes."""

    def __init__(self, args):
        self.folder = Path(tempfile.mkdtemp(prefix="q"))
        self.probes, self.temporary = self.folder / "probes", self.folder / "tmp"
        hook = self.folder / "hook"
        for one in (self.probes, self.temporary, hook):
            one.mkdir()
        shutil.copy(ROOT / "bench" / "probe.py", hook / "sitecustomize.py")
        path = os.pathsep.join(filter(None, [str(hook), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, "SOAK_PROBE": str(self.probes)}
        env["TMPDIR"] = str(self.temporary)
        if args.trace:
            env["SOAK_TRACE"] = "1"
        words = [*(EMBEDDED if args.model == "embedded" else ()), *shlex.split(args.serve)]
        self.command = ["quire", "serve", args.model, *SWITCHES, *words]
        self.log = open(args.log, "w") if args.log else tempfile.TemporaryFile("w")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", *self.command],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=env,
            cwd=ROOT,
        )
        self.url = self._wait()
        self.pids = self._processes()

    def _wait(self):
        for line in self.process.stdout:
            found = re.search(r"  curl (https?://[0-9.:]+)", line)
            if found:
                return found[1]
        raise SystemExit("the server did not start")

    def _processes(self):
        first = psutil.Process(self.process.pid)
        return {one.pid: one for one in (first, *first.children(recursive=True))}

    def names(self):
        """Return pid -> kind of process, numbered if there are several."""
        seen, found = collections.Counter(), {}
        for pid, one in self.pids.items():
            line = " ".join(one.cmdline())
            kind = next((k for k in ("engine", "processes", "grammar") if k in line), "supervisor")
            kind = "supervisor" if pid == self.process.pid else kind.replace("processes", "api")
            seen[kind] += 1
            found[pid] = kind if seen[kind] == 1 else f"{kind}{seen[kind]}"
        return found

    def sizes(self):
        """Return pid -> (RSS, files, threads) of running processes."""
        found = {}
        for pid, one in self.pids.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                found[pid] = one.memory_info().rss, one.num_fds(), one.num_threads()
        return found

    def temporary_files(self):
        found = [p for p in self.temporary.rglob("*") if p.is_file()]
        return len(found), sum(p.stat().st_size for p in found)

    def probed(self, pid):
        path = self.probes / f"{pid}.jsonl"
        return [json.loads(line) for line in open(path)] if path.exists() else []

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(30)
        left = self.temporary_files()
        shutil.rmtree(self.folder, ignore_errors=True)
        return status, left


# -- what is asked -----------------------------------------------------------------------------------


def text(draw, most=60):
    """Return words, often ones that other requests have too."""
    draw = random.Random(draw.randrange(20)) if draw.random() < 0.5 else draw
    return " ".join(draw.choice(WORDS) for _ in range(draw.randrange(1, most)))


def chat(draw):
    body = {"messages": [{"role": "user", "content": text(draw)}], "temperature": draw.random()}
    return "/v1/chat/completions", {**body, "max_tokens": draw.randrange(4, 60)}


def tools(draw):
    path, body = chat(draw)
    choice = draw.choice(["auto", "required", "none"])
    tool = {"type": "function", "function": TOOL}
    return path, {**body, "tools": [tool], "tool_choice": choice, "max_tokens": 40}


def several(draw):
    prompts = [text(draw, 30) for _ in range(draw.randrange(1, 4))]
    body = {"prompt": prompts, "n": draw.randrange(1, 4), "temperature": 1.0, "logprobs": 2}
    return "/v1/completions", {**body, "max_tokens": draw.randrange(2, 30)}


def long(draw):
    prompt = [draw.randrange(10, 3000) for _ in range(draw.randrange(200, 900))]
    return "/v1/completions", {"prompt": prompt, "max_tokens": 8, "x_timing": True}


def formed(draw):
    names = [f"f{draw.randrange(4)}" for _ in range(draw.randrange(1, 4))]
    if draw.random() < 0.2:
        names.append(f"u{draw.randrange(10**6)}")  # a schema that is not compiled yet
    schema = {
        "type": "object",
        "properties": {name: {"enum": ["a", "b"]} for name in names},
        "required": sorted({*names}),
        "additionalProperties": False,
    }
    path, body = chat(draw)
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return path, {**body, "response_format": form, "max_tokens": 80}


def response(draw):
    body = {"input": text(draw), "max_output_tokens": draw.randrange(4, 40)}
    return "/v1/responses", {**body, "store": draw.random() < 0.5}


def message(draw):
    messages = [{"role": "user", "content": text(draw)}]
    return "/v1/messages", {"messages": messages, "max_tokens": draw.randrange(4, 40)}


def beams(draw):
    body = {"prompt": text(draw, 10), "use_beam_search": True, "n": 3, "max_tokens": 6}
    return "/v1/completions", body


def simple(draw):
    return "/generate", {"prompt": text(draw), "max_tokens": draw.randrange(2, 20)}


KINDS = {chat: 6, tools: 2, several: 3, long: 1, formed: 3, response: 2, message: 2, beams: 1}
KINDS[simple] = 1
WHOLE = (beams,)
OWN_BAD = [
    {"n": 10**9},
    {"temperature": "hot"},
    {"max_tokens": -1},
    {"stop": ["x"] * 500},
    {"logit_bias": {"999999999": 1}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
]


def bad_inputs():
    """Return (path, body) of requests that must be refused."""
    try:
        from tests.abuse import dialects, numbers
    except ImportError:
        path, body = chat(random.Random(1))
        return [(path, json.dumps({**body, **one}).encode()) for one in OWN_BAD]
    return [
        (route, one.raw or dialects.body(route, one.fields))
        for one in numbers.CASES
        for route in one.routes
        if one.differs.get(route, one.expect) == "refused"
        and len(repr(one.fields)) < 10_000
        and (one.raw or dialects.takes(route, one.fields))
    ]


# -- clients -----------------------------------------------------------------------------------------


class Load:
    """Clients in a closed loop, and the results of their requests."""

    def __init__(self, session, args):
        self.session, self.args = session, args
        self.draw = random.Random(args.seed)
        self.bad = bad_inputs()
        self.sent, self.errors = collections.Counter(), collections.Counter()
        self.firsts, self.gaps = [], []  # (when, ms)
        self.started_at = time.monotonic()
        self.until = self.started_at + args.minutes * 60

    async def run(self):
        await asyncio.gather(*(self.client() for _ in range(self.args.clients)))

    async def client(self):
        while time.monotonic() < self.until:
            chance = self.draw.random()
            if chance < self.args.bad:
                await self.send_invalid()
            else:
                await self.send_valid(chance < self.args.bad + self.args.cancels)

    async def send_invalid(self):
        path, data = self.draw.choice(self.bad)
        self.sent["bad"] += 1
        headers = {"Content-Type": "application/json"}
        async with self.session.post(path.rstrip("?"), data=data, headers=headers) as got:
            await got.read()
            if not (400 <= got.status < 500 or got.status == 501):
                self.errors[f"bad: {got.status}"] += 1

    async def send_valid(self, is_cancelled):
        kind = self.draw.choices([*KINDS], [*KINDS.values()])[0]
        path, body = kind(self.draw)
        if kind not in WHOLE and self.draw.random() < 0.6:
            body["stream"] = True
        self.sent[kind.__name__ + (" cancelled" if is_cancelled else "")] += 1
        if is_cancelled:
            await self.cancelled(path, body)
            return
        try:
            await self.read_whole(kind.__name__, path, body)
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            self.errors[f"{kind.__name__}: {type(error).__name__}"] += 1

    async def read_whole(self, kind, path, body, headers=None):
        started_at = last = time.monotonic()
        async with self.session.post(path, json=body, headers=headers) as got:
            if got.status != 200:
                self.errors[f"{kind}: {got.status} {(await got.text())[:120]}"] += 1
                return
            if not body.get("stream"):
                await got.read()
                return
            async for line in got.content:
                if line.startswith((b"data: {", b"{")):
                    if b'"error":{' in line or b'"type":"error"' in line:
                        self.errors[f"{kind}: in the stream {line[:120]!r}"] += 1
                    now = time.monotonic()
                    latencies = self.firsts if last is started_at else self.gaps
                    latencies.append((now, (now - last) * 1e3))
                    last = now

    async def cancelled(self, path, body):
        """Cancel the request in a random way; any of several outcomes is valid."""
        name = f"soak{self.draw.randrange(1 << 40)}"
        way, after = self.draw.choice(["leave", "deadline", "id"]), self.draw.random() ** 2 * 0.5
        headers = {"X-Request-Id": name}
        if way == "deadline":
            headers["X-Request-Timeout"] = f"{after + 0.001:.4f}"
        task = asyncio.create_task(self.read(path, body, headers))
        if way != "deadline":
            await asyncio.sleep(after)
        if way == "leave":
            task.cancel()
        elif way == "id":
            async with self.session.delete(f"/v1/requests/{name}") as got:
                if got.status not in (200, 404):
                    self.errors[f"cancel: {got.status}"] += 1
        (status,) = await asyncio.gather(task, return_exceptions=True)
        send_valid = (
            200,
            408,
            499,
            *((429,) if way == "deadline" else ()),
        )  # 429: the deadline cannot be met
        if isinstance(status, int) and status not in send_valid:
            self.errors[f"cancelled {way}: {status}"] += 1

    async def read(self, path, body, headers):
        async with self.session.post(path, json=body, headers=headers) as got:
            await got.read()
            return got.status


# -- what is seen ------------------------------------------------------------------------------------


def slope(points):
    """Return the slope per hour of (seconds, value), and its standard error."""
    count = len(points)
    if count < 3:
        return None
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - rise * (x - mean_x)) ** 2 for x, y in points) / (count - 2)
    return [round(rise * 3600, 2), round((rest / spread) ** 0.5 * 3600, 2)]


def quantiles(pairs, start, end):
    """Return p50 and p99 of the values between two times."""
    found = sorted(ms for at, ms in pairs if start <= at < end)
    if not found:
        return None
    return [round(found[int(len(found) * q)], 1) for q in (0.5, 0.99)]


async def watch(served, samples):
    while True:
        samples.append((time.monotonic(), served.sizes()))
        await asyncio.sleep(1.0)


async def engine_stats(session):
    async with session.get("/server_info") as got:
        return (await got.json())["engine"]


def state(served, stats):
    """Return everything that must return to its first value."""
    names = served.names()
    sizes = {names[pid]: each for pid, each in served.sizes().items()}
    probes = {names[pid]: served.probed(pid) for pid in names}
    return {
        "held_blocks": stats["held_blocks"],
        "running": stats["running"] + stats["waiting"],
        "lost_blocks": stats["blocks"]
        - stats["held_blocks"]
        - stats["cached_blocks"]
        - stats["free_blocks"],
        "rss_mib": {name: round(rss / 2**20, 1) for name, (rss, _, _) in sizes.items()},
        "files": {name: files for name, (_, files, _) in sizes.items()},
        "threads": {name: threads for name, (_, _, threads) in sizes.items()},
        "tasks": {name: lines[-1]["tasks"] for name, lines in probes.items() if lines},
        "python_blocks": {n: lines[-1]["python_blocks"] for n, lines in probes.items() if lines},
        "temporary": served.temporary_files(),
    }


async def soak(served, args):
    samples, timeout = [], aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(served.url, connector=connector, timeout=timeout) as session:
        load = Load(session, args)
        watching = asyncio.create_task(watch(served, samples))
        loading = asyncio.create_task(load.run())
        await asyncio.sleep(args.minutes * 60 / 5)
        (served.probes / "mark").touch()
        warm_at = time.monotonic()
        first = state(served, await engine_stats(session))
        await loading
        over_at = time.monotonic()
        await asyncio.sleep(QUIET_S)
        last = state(served, await engine_stats(session))
        (served.probes / "end").touch()
        await asyncio.sleep(QUIET_S)
        watching.cancel()
    return load, samples, (warm_at, over_at), first, last


def report(served, args, load, samples, between, first, last):
    warm_at, over_at = between
    names = served.names()
    slopes, grown = {}, {}
    for pid, name in names.items():
        within = [(at, sizes[pid]) for at, sizes in samples if pid in sizes]
        within = [(at, each) for at, each in within if warm_at <= at <= over_at]
        lines = [one for one in served.probed(pid) if warm_at <= one["at"] <= over_at]
        half = [(at, each) for at, each in within if at >= (warm_at + over_at) / 2]
        slopes[name] = {
            "rss_mib": slope([(at, rss / 2**20) for at, (rss, _, _) in within]),
            "rss_mib_last_half": slope([(at, rss / 2**20) for at, (rss, _, _) in half]),
            "python_blocks": slope([(one["at"], one["python_blocks"]) for one in lines]),
            "malloc_used_mib": slope([(one["at"], one["malloc_used"] / 2**20) for one in lines]),
            "malloc_free_mib": slope([(one["at"], one["malloc_free"] / 2**20) for one in lines]),
        }
        final = served.probed(pid)[-1] if served.probed(pid) else {}
        grown[name] = {key: final[key] for key in KEPT if key in final}
    fifth = args.minutes * 60 / 5
    ends = ((load.started_at, load.started_at + fifth), (over_at - fifth, over_at))
    return {
        "bench": "soak",
        "command": " ".join(served.command),
        "minutes": args.minutes,
        "clients": args.clients,
        "requests": sum(load.sent.values()),
        "sent": dict(load.sent.most_common()),
        "errors": dict(load.errors.most_common(20)),
        "slope_an_hour": slopes,
        "first": first,
        "last": last,
        "ttft_ms_p50_p99": [quantiles(load.firsts, *one) for one in ends],
        "itl_ms_p50_p99": [quantiles(load.gaps, *one) for one in ends],
        "same_processes": all(one.is_running() for one in served.pids.values()),
        "grown": grown,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--cancels", type=float, default=0.05)
    parser.add_argument("--bad", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", default="", help="more flags of quire serve")
    parser.add_argument(
        "--trace", action="store_true", help="report the lines that allocated growing memory"
    )
    parser.add_argument("--log", help="file for the server's log")
    args = parser.parse_args()
    served = Served(args)
    try:
        found = report(served, args, *asyncio.run(soak(served, args)))
    except BaseException:
        served.process.kill()
        raise
    found["status"], found["left_behind"] = served.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main()

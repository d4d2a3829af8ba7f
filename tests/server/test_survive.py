"""Streams go on when the engine's process dies: no token is lost, none comes twice.

With --long an engine is ended 200 times.
"""

import asyncio
import base64
import collections
import io
import json
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import torch

from tests import tiers
from tests.server.running import SMALL, serving, wait_until

ROUNDS = tiers.amount(2, 200)
STREAMS = tiers.amount(18, 32)
LONGEST = tiers.amount(45, 90)
"""Tokens of a stream, at most."""
MANY = ("--max-engine-restarts", 100_000, *(("--engine-standby",) if ROUNDS > 2 else ()))

WORDS = ["Once upon a time", "The capital of France is", "Paris is", "def main():", "1, 2, 3,"]


def embeds():
    """40 vectors, as a client sends them."""
    file = io.BytesIO()
    torch.save(torch.eye(40, 256), file)
    return base64.b64encode(file.getvalue()).decode()


KINDS = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "top_p": 0.9, "seed": 8, "n": 3},
    {"temperature": 0, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 0, "frequency_penalty": 0.6, "presence_penalty": 0.4, "min_tokens": 30},
    {"temperature": 1.0, "seed": 3, "stop": [" the", "\n\n"]},
    {"temperature": 0, "echo": True, "logprobs": 1},
    {"temperature": 0, "prompt": None, "prompt_embeds": embeds()},
    {"temperature": 0.7, "seed": 4, "guided_regex": "[a-z ]{10,50}"},
)


def asked(i):
    """The body of stream i."""
    rng = random.Random(i)
    body = {
        "model": "embedded",
        "prompt": rng.choice(WORDS),
        "max_tokens": rng.randrange(30, LONGEST),
    }
    ignore = {} if "guided_regex" in KINDS[i % len(KINDS)] else {"ignore_eos": True}
    more = {"stream": True, "stream_options": {"include_usage": True}}
    return {**body, **KINDS[i % len(KINDS)], **ignore, **more}


class Said:
    """What one stream said."""

    def __init__(self):
        self.texts, self.ends, self.logprobs, self.prompt = {}, {}, {}, []
        self.usage = self.error = None

    def take(self, line):
        chunk = json.loads(line.removeprefix("data: "))
        self.error = chunk.get("error", self.error)
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if choice.get("finish_reason"):
                assert index not in self.ends, "ended twice"
                self.ends[index] = choice["finish_reason"], choice.get("stop_reason")
            if choice.get("logprobs"):
                self.logprobs.setdefault(index, []).extend(choice["logprobs"]["token_logprobs"])
            if choice.get("prompt_logprobs"):
                self.prompt.append(choice["prompt_logprobs"])

    def told(self):
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        usage = self.usage and {name: self.usage[name] for name in counts}
        return self.texts, self.ends, self.logprobs, self.prompt, usage, self.error


class Scene:
    """Streams of one server, and how many chunks have come."""

    def __init__(self, url):
        self.url = url
        self.chunks = 0
        self.comments = 0

    async def stream(self, client, body):
        said = Said()
        async with client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                self.comments += line.startswith(":")
                if line.startswith("data: ") and line != "data: [DONE]":
                    said.take(line)
                    self.chunks += 1
        return said.told()

    async def all(self, bodies, disturb=None):
        """What every stream says, and what disturb() gives, which runs beside them."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            tasks = [asyncio.create_task(self.stream(client, body)) for body in bodies]
            found = None if disturb is None else await disturb(self)
            return await asyncio.gather(*tasks), found


def engine_of(server):
    """Its process, which lives."""
    for child in psutil.Process(server.process.pid).children(recursive=True):
        if child.name() == "quire-engine":  # one that stands by is not called so yet
            return child
    raise AssertionError("there is no engine")


def kill(engine):
    engine.kill()


def stop_then_kill(engine):
    engine.send_signal(signal.SIGSTOP)
    time.sleep(0.05)
    engine.kill()


def disturbance(server, how, after):
    """Ends the engine when so many chunks have come; the seconds until more come."""

    async def disturb(scene):
        before = scene.chunks
        while scene.chunks - before < after:
            await asyncio.sleep(0.001)
        how(engine_of(server))
        began, then = time.monotonic(), scene.chunks
        await asyncio.sleep(0.1)  # what was on its way
        then = scene.chunks
        while scene.chunks == then:
            await asyncio.sleep(0.002)
        return time.monotonic() - began

    return disturb


@pytest.fixture(scope="module")
def running():
    with serving("embedded", *SMALL, *MANY, "--enable-prompt-embeds") as made:
        reader = threading.Thread(target=collections.deque, args=(made.process.stdout, 0))
        reader.start()  # what nobody reads stops who writes it
        yield made
        made.process.kill()
        reader.join(60)


@pytest.fixture(scope="module")
def want(running):
    found, _ = asyncio.run(Scene(running.url).all([asked(i) for i in range(STREAMS)]))
    return found


def ready(server):
    return httpx.get(f"{server.url}/ready", timeout=60).status_code == 200


@pytest.mark.timeout(300 + 60 * ROUNDS)
def test_streams_say_the_same_whatever_ends_their_engine(running, want):
    """kill -9 and SIGSTOP in turns, at a token that nobody chose."""
    rng, took = random.Random(1), []
    for number in range(ROUNDS):
        how = (kill, stop_then_kill)[number % 2]
        scene = Scene(running.url)
        disturb = disturbance(running, how, rng.randrange(1, STREAMS * LONGEST * 4 // 9))
        found, seconds = asyncio.run(scene.all([asked(i) for i in range(STREAMS)], disturb))
        took.append(seconds)
        if number % 10 == 9:
            print(f"{number + 1} rounds, the last in {seconds:.2f} s", flush=True)
        for i, (one, other) in enumerate(zip(found, want)):
            assert one == other, (number, asked(i))
    took.sort()
    print(f"{ROUNDS} rounds; recovery median {took[len(took) // 2]:.2f} s, most {took[-1]:.2f} s")
    assert wait_until(lambda: ready(running))


COUNT = "quire:engine_restarts_total{"
LONG = {
    "model": "embedded",
    "prompt": "a",
    "max_tokens": 1000,
    "ignore_eos": True,
    "temperature": 0,
}


def lines_of(response):
    """Its events, as they come; the last one is no JSON."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def test_while_it_is_away_probes_tell_and_requests_wait(running):
    """One that is answered whole too, which says where its time went."""
    body = {**LONG, "max_tokens": 200, "x_timing": True}
    short = {**LONG, "max_tokens": 5}
    with httpx.Client(base_url=running.url, timeout=120) as client, ThreadPoolExecutor(1) as pool:
        want = client.post("/v1/completions", json=body).json()
        first = client.post("/v1/completions", json=short).json()["choices"]
        asked = pool.submit(client.post, "/v1/completions", json=body)
        assert wait_until(lambda: client.get("/load").json()["server_load"] == 1)
        kill(engine_of(running))
        assert wait_until(lambda: client.get("/ready").status_code == 503)
        assert client.get("/live").status_code == client.get("/health").status_code == 200
        assert wait_until(lambda: "is being restarted" in client.get("/ready").text)
        assert client.post("/v1/completions", json=short).json()["choices"] == first
        assert ready(running)
        (count,) = [line for line in client.get("/metrics").text.splitlines() if COUNT in line]
        assert float(count.split()[-1]) >= 1
        answer = asked.result().json()
    assert (answer["choices"], answer["usage"]) == (want["choices"], want["usage"])
    timing = answer["x_timing"]
    total = sum(v for k, v in timing.items() if k.endswith("_s") and k != "total_s")
    assert total == pytest.approx(timing["total_s"], rel=0.02)
    assert timing["recovery_s"] > 0.1
    assert want["x_timing"]["recovery_s"] == 0


@pytest.mark.long("two engines; tests.server.test_blame kills two as well")
def test_a_request_that_was_aboard_two_engines_that_died_ends(running):
    with (
        httpx.Client(base_url=running.url, timeout=120) as client,
        client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response,
    ):
        chunks = lines_of(response)
        next(chunks)
        kill(engine_of(running))
        assert wait_until(lambda: not ready(running))
        assert wait_until(lambda: ready(running), 60)
        next(chunks)
        kill(engine_of(running))
        last = collections.deque(chunks, 1)[0]
        assert last["error"]["code"] == 500
        assert "died twice" in last["error"]["message"]
        assert client.post("/v1/completions", json={**LONG, "max_tokens": 5}).status_code == 200


SCRIPT = """
import asyncio
from quire import AsyncEngineArgs, AsyncLLM, SamplingParams
import psutil

args = AsyncEngineArgs(
    model="embedded", kv_cache_memory_bytes="64MiB", max_engine_restarts=1
)
engine = AsyncLLM.from_engine_args(args)

def process():
    found = psutil.Process().children()
    return next(one for one in found if one.name() == "quire-engine")

async def ask(times):
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=300, ignore_eos=True)
    async for output in engine.generate("The capital of France is", params):
        last = output
        if times and len(output.outputs[0].token_ids) > 20:
            process().kill()
            times -= 1
    return tuple(last.outputs[0].token_ids)

async def main():
    want = await ask(0)
    assert await ask(1) == want
    assert engine.is_running
    try:
        await ask(1)
    except Exception as error:
        print(type(error).__name__, error)
    assert engine.errored

asyncio.run(main())
engine.shutdown()
assert {one.name() for one in psutil.Process().children()} <= {"fork-server"}
"""


@pytest.mark.long("tests/cpu/test_llm_engines.py and the test of a server do so every day")
@pytest.mark.usefixtures("forked")
def test_streams_of_one_without_a_server_go_on_as_well():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert "EngineDead the engine's process ended: killed by signal 9" in run.stdout, run.stderr
    assert run.returncode == 0, run.stderr

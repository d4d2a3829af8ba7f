"""A model on two ranks: streams go on when a rank dies, hangs or fails alone; none loses a token."""

import asyncio
import os
import random
import signal
import time

import httpx
import psutil
import pytest

from tests import tiers
from tests.cpu.models.peers import peer
from tests.cpu.tiny_models import write_ascii_tokenizer
from tests.faults.arming import Fault
from tests.faults.serve import serving
from tests.server.running import SMALL, wait_until
from tests.server.test_survive import Scene

ROUNDS = tiers.amount(1, 2)
TWO = ("--device", "cpu", "--max-engine-restarts", 1000, "--max-model-len", 512)
BODIES = [
    {
        "model": "embedded",
        "prompt": random.Random(i).choice(["Once upon a time", "Paris is", "1, 2, 3,"]),
        "max_tokens": tiers.amount(16, 24) + i,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"temperature": 0} if i % 2 else {"temperature": 1.0, "seed": i, "n": 2}),
        **({"guided_regex": "[a-z ]{10,50}"} if i > 1 else {"ignore_eos": True}),
    }
    for i in range(4)
]

pytestmark = [pytest.mark.slow("engines of two processes"), pytest.mark.timeout(200 + 60 * ROUNDS)]


def ranks_of(server):
    found = psutil.Process(server.process.pid).children(recursive=True)
    return [one for one in found if one.name() == "quire-rank-1"]


def engine_pid(server):
    (rank,) = ranks_of(server)
    return rank.ppid()


def disturbance(act, after):
    """Acts when so many chunks have come."""

    async def disturb(scene):
        while scene.chunks < after:
            await asyncio.sleep(0.002)
        act()

    return disturb


@pytest.fixture(scope="module", params=["-tp", *tiers.long("-pp")])
def running(request):
    with serving("embedded", *SMALL, *TWO, request.param, "2") as (server, faults):
        yield server, faults
        server.process.kill()
        assert server.gone()


@pytest.fixture(scope="module")
def want(running):
    found, _ = asyncio.run(Scene(running[0].url).all(BODIES))
    assert all(error is None for *_, error in found)
    return found


def ready(server):
    return httpx.get(f"{server.url}/ready", timeout=60).status_code == 200


WAYS = ("kill", *tiers.long("stop", "raise", "engine"))


@pytest.mark.parametrize("way", WAYS)
def test_streams_say_the_same_whatever_happens_to_a_rank(running, want, way, request):
    server, faults = running
    if way == "raise" and "-pp" in request.node.callspec.id:
        pytest.skip("a stage that raises recovers: tests/cpu/test_pipeline.py")
    rng = random.Random(way)

    def act():
        (rank,) = ranks_of(server)
        if way == "kill":
            rank.kill()
        elif way == "stop":
            rank.send_signal(signal.SIGSTOP)
        elif way == "engine":
            os.kill(engine_pid(server), signal.SIGKILL)
        else:
            faults.arm(Fault("rank.reduce", "raise"))

    for number in range(ROUNDS):
        before = [one.pid for one in ranks_of(server)]
        disturb = disturbance(act, rng.randrange(4, tiers.amount(24, 40)))
        found, _ = asyncio.run(Scene(server.url).all(BODIES, disturb))
        for one, other in zip(found, want):
            assert one == other, (way, number)
        assert wait_until(lambda: ready(server), 60)
        after = [one.pid for one in ranks_of(server)]
        assert len(after) == 1
        assert before != after


def test_a_server_is_not_ready_from_the_death_of_an_idle_rank_on(running):
    """It finds out without a request, and is ready again."""
    server, _ = running
    assert wait_until(lambda: ready(server), 60)
    (rank,) = ranks_of(server)
    rank.kill()
    began = time.monotonic()
    assert wait_until(lambda: not ready(server), 60)
    print(f"/ready was 503 after {time.monotonic() - began:.3f} s")
    assert wait_until(lambda: ready(server), 60)
    assert [one.pid for one in ranks_of(server)] != [rank.pid]


@pytest.mark.long("a server of its own; what ends a rank is the same")
def test_streams_go_on_when_a_data_parallel_rank_dies(tmp_path):
    """One engine for both data-parallel ranks, which share experts."""
    vocab = peer("qwen3_moe", tmp_path).config.vocab_size
    write_ascii_tokenizer(tmp_path, vocab)
    ranks = ("-dp", "2", "--enable-expert-parallel", "--dtype", "float32", "--device", "cpu")
    named = ("--served-model-name", "embedded", "--max-model-len", 256)
    with serving(tmp_path, *SMALL, *ranks, *named) as (server, _):
        want, _ = asyncio.run(Scene(server.url).all(BODIES))
        assert all(error is None for *_, error in want)
        (before,) = ranks_of(server)
        found, _ = asyncio.run(Scene(server.url).all(BODIES, disturbance(before.kill, 20)))
        assert found == want
        assert wait_until(lambda: ready(server), 60)
        (after,) = ranks_of(server)
        assert before.pid != after.pid

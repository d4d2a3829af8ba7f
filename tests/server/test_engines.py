"""Several engines behind one front: requests are spread, and streams continue on another engine."""

import asyncio
import random
import time

import httpx
import psutil
import pytest

from tests import tiers
from tests.server.running import SMALL, serving, wait_until
from tests.server.test_survive import LONGEST, Scene, asked, ready

ROUNDS = tiers.amount(2, 50)
STREAMS = tiers.amount(12, 24)


def engines_of(server):
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if child.name() == "quire-engine"]


@pytest.fixture(scope="module")
def running():
    more = ("--max-engine-restarts", 100_000, "--enable-prompt-embeds", "--data-parallel-size", 2)
    more += ("--enable-dev-routes",)
    with serving("embedded", *SMALL, *more) as made:
        made.read_log([])
        yield made


def counts(url, name):
    """A metric of each engine."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    found = [one for one in lines if one.startswith(f"vllm:{name}{{")]
    return {one.split('engine="')[1].split('"')[0]: float(one.split()[-1]) for one in found}


@pytest.mark.slow("two engines, ended and started again")
@pytest.mark.timeout(120 + 60 * ROUNDS)
def test_streams_continue_on_the_other_engine(running):
    rng, bodies = random.Random(2), [asked(i) for i in range(STREAMS)]
    want, _ = asyncio.run(Scene(running.url).all(bodies))
    work = counts(running.url, "prompt_tokens_total")
    assert sorted(work) == ["0", "1"]
    assert min(work.values()) > max(work.values()) / 4

    async def disturb(scene):
        before, after = scene.chunks, rng.randrange(1, STREAMS * LONGEST // 3)
        while scene.chunks - before < after:
            await asyncio.sleep(0.001)
        rng.choice(engines_of(running)).kill()

    for number in range(ROUNDS):
        assert wait_until(lambda: len(engines_of(running)) == 2 and ready(running), 60)
        found, _ = asyncio.run(Scene(running.url).all(bodies, disturb))
        for i, (one, other) in enumerate(zip(found, want)):
            assert one == other, (number, asked(i))


@pytest.mark.slow("uses the server of two engines")
def test_a_header_pins_and_a_list_is_spread(running):
    with httpx.Client(base_url=running.url, timeout=60) as client:
        body = {"prompt": ["a", "b", "c", "d"], "max_tokens": 4, "seed": 3, "n": 2}

        def rise(**headers):
            """The answer, and the prompts that each engine has got for it."""
            before = counts(running.url, "prompt_tokens_total")
            answer = client.post("/v1/completions", json=body, headers=headers).json()
            wanted = sum(before.values()) + answer["usage"]["prompt_tokens"]
            while sum((after := counts(running.url, "prompt_tokens_total")).values()) < wanted:
                time.sleep(0.02)  # an engine reports what it has done after its answer
            return answer["choices"], [after[one] > before[one] for one in sorted(after)]

        # an engine that another test has ended may still start
        assert wait_until(lambda: len(counts(running.url, "prompt_tokens_total")) == 2, 60)
        choices, grown = rise()
        assert grown == [True, True]
        for rank in (0, 1):
            assert rise(**{"X-data-parallel-rank": str(rank)}) == (choices, [not rank, bool(rank)])
        for bad in ("2", "-1", "x", "9" * 10):
            answer = client.post(
                "/v1/completions", json=body, headers={"X-data-parallel-rank": bad}
            )
            assert (answer.status_code, answer.json()["error"]["param"]) == (
                400,
                "X-data-parallel-rank",
            )
            assert "must be in [0, 1]" in answer.json()["error"]["message"]


@pytest.mark.slow("uses the server of two engines")
def test_a_drained_engine_ends_no_stream(running):
    bodies = [asked(i) for i in range(8)]
    want, _ = asyncio.run(Scene(running.url).all(bodies))
    with httpx.Client(base_url=running.url, timeout=60) as client:

        async def drain(scene):
            while scene.chunks < 8:
                await asyncio.sleep(0.001)
            client.post("/drain_engine?engine=1&timeout=0").raise_for_status()

        assert asyncio.run(Scene(running.url).all(bodies, drain))[0] == want
        work = counts(running.url, "prompt_tokens_total")
        assert counts(running.url, "num_requests_running")["1"] == 0
        assert asyncio.run(Scene(running.url).all(bodies))[0] == want
        assert counts(running.url, "prompt_tokens_total")["1"] == work["1"]
        assert client.get("/ready").status_code == 200
        assert client.get("/ready?engine=0").status_code == 200
        assert client.get("/ready?engine=1").json()["reason"] == "draining"
        assert client.get("/health?engine=1").status_code == 200
        assert client.get("/ready?engine=2").status_code == 400
        client.post("/undrain_engine?engine=1").raise_for_status()
        assert asyncio.run(Scene(running.url).all(bodies))[0] == want
        assert counts(running.url, "prompt_tokens_total")["1"] > work["1"]
        assert client.post("/drain_engine?engine=2").status_code == 400


@pytest.mark.slow("uses the server of two engines")
def test_views_and_calls_reach_each_engine(running):
    with httpx.Client(base_url=running.url, timeout=60) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/quire/live?engine=2").status_code == 404
        for engine in (0, 1):
            with client.stream("GET", f"/quire/live?engine={engine}") as frames:
                assert '"engines":2' in next(frames.iter_lines())
        assert "queued_requests" in client.get("/load").json()


@pytest.mark.slow("starts a server of two engines, of which none may be replaced")
def test_the_server_lives_as_long_as_an_engine():
    more = ("--max-engine-restarts", 0, "--data-parallel-size", 2)
    more = (*more[:2], "--data-parallel-hybrid-lb", "-dp", 5, "-dpl", 2, "-dpr", 3)  # 3 and 4 of 5
    with serving("embedded", *SMALL, *more) as made:
        url, body = made.url, {"prompt": "a", "max_tokens": 5, "temperature": 0}
        want = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]
        first, second = engines_of(made)
        first.kill()
        for _ in range(3):
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert answer.json()["choices"] == want
        assert ready(made)
        found = {rank: httpx.get(f"{url}/health?engine={rank}").status_code for rank in (3, 4)}
        assert sorted(found.values()) == [200, 503]
        (left,) = [rank for rank, status in found.items() if status == 200]
        headers = {"X-data-parallel-rank": str(left)}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.json()["choices"] == want
        assert sorted(counts(url, "prompt_tokens_total")) == [str(left)]
        wrong = httpx.post(
            f"{url}/v1/completions", json=body, headers={"X-data-parallel-rank": "0"}
        )
        assert "must be in [3, 4]" in wrong.json()["error"]["message"]
        second.kill()
        assert made.gone(20)

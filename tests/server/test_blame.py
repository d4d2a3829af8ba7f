"""A fault at every hook of the step, in a real server: who caused it ends, and nobody else notices.

With --long there are 200 rounds of random faults, which print what they found as a line for
bench/results; pytest shows it with -s.
"""

import asyncio
import collections
import json
import random
import statistics
import threading
import time

import httpx
import psutil
import pytest

from tests import tiers
from tests.faults import points, rounds
from tests.faults.arming import Fault
from tests.faults.rounds import Patient
from tests.faults.serve import serving
from tests.server.running import SMALL, wait_until
from tests.server.test_survive import Scene, asked, engine_of

ROUNDS = tiers.amount(0, 200)
STREAMS = 32
FEW = 8
MANY = ("--max-engine-restarts", 100_000, "--engine-standby", "--enable-prompt-embeds")

POISON = 66_006
"""The seed of the request with which steps fail."""

OF_ONE = ("join", "join.penalties", "join.masks", "join.grammar", "grammar.accept", "grammar.fill")
"""What is done for one sequence of a step."""
OF_STEPS = ("submit", "inputs", "gather", "launch", "leave", "tables", "compute", "forward")
OF_STEPS += ("recipe", "sample", "prompt_logprobs", "result")
"""What is done for all of a step's: the executor raises."""
SELDOM = ("leave", "tables", "recipe", "prompt_logprobs")
"""Of those, what not every step does."""
OF_BOOKS = ("plan", "match", "grow", "keys", "planned", "apply", "publish", "confirm", "landed")
OF_BOOKS += ("obey", "accept", "turn", "route", "send")
"""What no step is."""
ENDS_ONE = {*OF_ONE, "accept", "match", "keys", "publish", "confirm"} - {"join"}
"""Raising there once ends a sequence and its request; of a "join" the guard is within."""
ENDS_ENGINE = {*OF_BOOKS} - ENDS_ONE
"""Raising there ends the process, and streams go on with another."""


def test_every_point_of_an_engine_is_in_one_of_the_lists():
    assert sorted((*OF_ONE, *OF_STEPS, *OF_BOOKS, "start")) == sorted(points.ENGINE)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """However often engines died, all ends well and leaves nothing behind."""
    folder = tmp_path_factory.mktemp("left")
    with serving("embedded", *SMALL, *MANY, folder=folder) as (made, faults):
        reader = threading.Thread(target=collections.deque, args=(made.process.stdout, 0))
        reader.start()  # what nobody reads stops who writes it
        yield made, faults
        family = psutil.Process(made.process.pid).children(recursive=True)
        made.process.terminate()
        status = made.process.wait(60)
        reader.join(60)
        _, alive = psutil.wait_procs(family, 10)
    assert (status, alive, [*folder.iterdir()]) == (0, [], [])


def wanted(server, streams):
    found, _ = asyncio.run(Scene(server.url).all([asked(i) for i in range(streams)]))
    return found


@pytest.fixture(scope="module")
def want(running):
    return wanted(running[0], max(FEW, STREAMS if ROUNDS else 0))


def ready(server):
    return httpx.get(f"{server.url}/ready", timeout=60).status_code == 200


def go(server, faults, streams, *armed):
    """What all say while these faults happen, when all have begun; and how many did."""

    async def disturb(scene):
        while scene.chunks < streams:
            await asyncio.sleep(0.001)
        faults.arm(*armed)

    found, _ = asyncio.run(Patient(server.url).all([asked(i) for i in range(streams)], disturb))
    fired = faults.fired
    faults.clear()
    assert wait_until(lambda: ready(server), 60)
    return found, fired


def compare(found, want, label):
    for i, (one, other) in enumerate(zip(found, want)):
        assert one == other, (label, asked(i))


@pytest.mark.timeout(300)
def test_steps_that_fail_once_are_noticed_by_nobody(running, want):
    """At hooks that every step has. Those of now and then: tests.server.test_deaths."""
    server, faults = running
    engine = engine_of(server)
    every = [point for point in OF_STEPS if point not in SELDOM]
    armed = [Fault(point, at=3 + 3 * i) for i, point in enumerate(every)]
    found, fired = go(server, faults, FEW, *armed)
    assert fired == len(armed)
    compare(found, want, "once")
    assert engine_of(server).pid == engine.pid


@pytest.mark.timeout(300)
def test_an_engine_that_cannot_tell_what_it_made_is_replaced_and_streams_go_on(running, want):
    """Who raises where else in its books: tests.server.test_deaths."""
    server, faults = running
    before = restarts(server)
    hooks = tiers.amount(["route"], ["route", "send"])
    for point in hooks:  # one by one: a stream that is tried alone when an engine dies is condemned
        found, fired = go(server, faults, FEW, Fault(point, at=20))
        assert fired == 1
        compare(found, want, "books")
    assert restarts(server) - before == len(hooks)


def poison(server, seed=POISON, **more):
    """What the request is answered that steps fail with."""
    body = {**asked(0), "seed": seed, "temperature": 1.0, "stream": False, **more}
    body.pop("stream_options", None)
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)


def beside(server, streams, bodies):
    """What streams say, and what these are answered, which come when all of those have begun."""

    async def disturb(scene):
        while scene.chunks < streams:
            await asyncio.sleep(0.001)
        asking = [asyncio.to_thread(poison, server, **body) for body in bodies]
        return await asyncio.gather(*asking)

    return asyncio.run(Scene(server.url).all([asked(i) for i in range(streams)], disturb))


REGEX = {"guided_regex": "[a-z ]{10,50}"}
BREAKS = {
    "join": (1, {}),
    "join.grammar": (1, {}),
    "grammar.accept": (3, REGEX),
    "grammar.fill": (3, REGEX),
    "forward": (1, {}),
    "sample": (4, {}),
    "result": (9, {}),
    "confirm": (1, {}),
}
"""point: at which call, and what else is asked."""


@pytest.mark.timeout(300)
def test_those_who_break_every_step_end_and_others_say_what_they_would_have(running, want):
    server, faults = running
    engine = engine_of(server)
    seeds = {point: POISON + i for i, point in enumerate(BREAKS)}
    faults.arm(*(Fault(p, seed=seeds[p], at=at, times=0) for p, (at, _) in BREAKS.items()))
    bodies = [
        {"seed": seeds[p], "prompt": f"{p} breaks", **more} for p, (_, more) in BREAKS.items()
    ]
    found, answers = beside(server, FEW, bodies)
    faults.clear()
    for point, answer in zip(BREAKS, answers):
        assert answer.status_code == 500, point
        assert f"Injected: injected at {point}" in answer.json()["error"]["message"]
    compare(found, want, "breaks")
    assert engine_of(server).pid == engine.pid


@pytest.mark.timeout(300)
def test_who_breaks_steps_is_not_tried_again(running):
    server, faults = running
    faults.arm(Fault("forward", seed=POISON, times=0))
    prompt = f"quarantine {random.random()}"
    first = poison(server, prompt=prompt)
    again = poison(server, prompt=prompt)
    faults.clear()
    assert first.status_code == 500
    assert first.headers["x-should-retry"] == "false"
    assert again.status_code == 422
    assert "not tried again for" in again.json()["error"]["message"]
    assert poison(server, prompt=prompt).status_code == 422  # the fault is gone, it does not know
    assert poison(server, prompt=prompt + "!").status_code == 200


@pytest.mark.timeout(300)
def test_rows_that_come_to_nothing_end_alone(running, want):
    server, faults = running
    spoils = ("nan", "inf", "nothing_allowed")
    bodies = [{"seed": POISON + 100 + i, "prompt": do} for i, do in enumerate(spoils)]
    armed = [Fault("sample", do, seed=POISON + 100 + i, at=4) for i, do in enumerate(spoils)]
    faults.arm(*armed)
    before = metric(server, "corrupt_rows_total{")
    found, answers = beside(server, FEW, bodies)
    for answer in answers:
        assert answer.status_code == 500
        assert "not finite" in answer.json()["error"]["message"]
    compare(found, want, "spoilt")
    assert metric(server, "corrupt_rows_total{") == before + 3
    _, answers = beside(server, 0, bodies)  # nothing of it is found again, nor condemned
    faults.clear()
    assert [answer.status_code for answer in answers] == [200] * 3


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stream", [True, *tiers.long(False)])
def test_who_kills_engines_costs_two_and_nobody_else_ends(running, want, stream):
    server, faults = running
    before = restarts(server)
    faults.arm(Fault("forward", "kill", seed=POISON, at=2, times=0))
    answers = []

    async def disturb(scene):
        while scene.chunks < FEW:
            await asyncio.sleep(0.001)
        prompt = f"killer {random.random()}"
        answers.append(await asyncio.to_thread(poison, server, stream=stream, prompt=prompt))

    found, _ = asyncio.run(Scene(server.url).all([asked(i) for i in range(FEW)], disturb))
    faults.clear()
    assert "the engine died twice while it ran this request" in answers[0].text
    compare(found, want, "kill")
    assert wait_until(lambda: ready(server), 60)
    assert restarts(server) - before == 2


def restarts(server):
    return metric(server, "engine_restarts_total{")


def metric(server, name):
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    (count,) = [line for line in lines if name in line]
    return float(count.split()[-1])


def settled(server):
    """It answers, nobody holds anything, and there is one engine."""
    names = [one.name() for one in psutil.Process(server.process.pid).children(recursive=True)]
    return (
        ready(server)
        and names.count("quire-engine") == 1
        and metric(server, "kv_cache_usage_perc{") == 0
        and metric(server, "num_requests_running{") == 0
    )


def disturbed(server, faults, bodies, one):
    """What streams say in this round, when, and how many engines died of it."""
    before = restarts(server)
    faults.arm(*one.faults)
    scene = Patient(server.url)
    found, _ = asyncio.run(scene.all(bodies))
    fired_at = faults.fired_at
    faults.clear()
    assert len(fired_at) == len(one.faults), (str(one), "did not happen")
    assert wait_until(lambda: settled(server), 60), (str(one), "left something behind")
    deaths = restarts(server) - before
    return found, deaths, rounds.wait_of(scene.came, fired_at[0]) if deaths else None


def check_round(one, found, want, deaths):
    """Whose text is as it was, and that nobody else ended; how many did."""
    ends_engine = one.do == "kill" or one.point in ENDS_ENGINE or one.point == "start"
    assert deaths == ends_engine, str(one)
    broken = [i for i, said in enumerate(found) if said[-1] is not None]
    assert len(broken) == (one.point in ENDS_ONE and not ends_engine), (str(one), broken)
    for i in broken:
        assert f"injected at {one.point}" in found[i][-1]["message"]
        for index, text in found[i][0].items():
            assert want[i][0][index].startswith(text), (str(one), i)
    kept = [i for i in range(len(want)) if i not in broken]
    compare([found[i] for i in kept], [want[i] for i in kept], str(one))
    return len(broken)


@pytest.mark.long("200 rounds of faults at random tokens")
@pytest.mark.timeout(300 + 60 * ROUNDS)
def test_faults_at_every_hook_at_random_tokens(running, want):
    """Of each kind in turns: the step raises once; the books do; the process is killed there."""
    server, faults = running
    bodies = [asked(i) for i in range(STREAMS)]
    hooks = rounds.mixed(sorted(ENDS_ENGINE), sorted({*points.ENGINE} - ENDS_ENGINE - {"start"}))

    def undisturbed():
        compare(asyncio.run(Patient(server.url).all(bodies))[0], want, "undisturbed")

    calls = rounds.learn(faults, hooks, undisturbed)
    rng, took, waits, ended, died = random.Random(3), [], [], 0, 0
    for number in range(ROUNDS):
        one = rounds.draw(rng, number, calls)
        began = time.monotonic()
        found, deaths, wait = disturbed(server, faults, bodies, one)
        took.append(time.monotonic() - began)
        ends = check_round(one, found, want, deaths)
        ended, died = ended + ends, died + int(deaths)
        waits += [] if wait is None else [wait]
        told = "" if wait is None else f", chunks after {wait.first:.2f} s, all {wait.last:.2f} s"
        print(f"\n{number}: {one}: ended {ends}, {took[-1]:.1f} s{told}", end="", flush=True)
    line = {
        "date": time.strftime("%Y-%m-%d"),
        "command": "pytest --long tests/server/test_blame.py -k every_hook",
        "bench": "faults at every hook",
        "rounds": ROUNDS,
        "streams": STREAMS,
        "hooks": len(hooks) + 1,
        "fired": ROUNDS,
        "requests_ended": ended,
        "texts_that_differ": 0,
        "engines_died": died,
        "first_chunk_after_s": rounds.spread([wait.first for wait in waits]),
        "every_stream_after_s": rounds.spread([wait.last for wait in waits]),
        "round_s": round(statistics.mean(took), 1),
    }
    print("\n" + json.dumps(line))

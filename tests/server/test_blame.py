"""A fault at every hook of the step, in a real server: who caused it ends, and nobody else notices.

QUIRE_BLAME_ROUNDS=200 makes a night of it (quire knows no such variable; this test does).
"""

import asyncio
import collections
import os
import random
import threading
import time

import httpx
import pytest

from tests.faults import points
from tests.faults.arming import Fault
from tests.faults.serve import serving
from tests.server.running import SMALL, wait_until
from tests.server.test_survive import Scene, asked, engine_of

ROUNDS = int(os.environ.get("QUIRE_BLAME_ROUNDS", "0"))
STREAMS = 32
FEW = 8
MANY = ("--max-engine-restarts", 100_000, "--engine-standby")

POISON = 66_006
"""The seed of the request with which steps fail."""

OF_ONE = ("join", "join.penalties", "join.masks", "join.grammar", "grammar.accept", "grammar.fill")
"""What is done for one sequence of a step."""
OF_STEPS = ("submit", "prepare", "gather", "launch", "leave", "tables", "compute", "forward")
OF_STEPS += ("recipe", "sample", "result")
"""What is done for all of a step's: the executor raises."""
OF_BOOKS = ("plan", "match", "grow", "keys", "planned", "apply", "publish", "confirm", "landed")
OF_BOOKS += ("turn", "route", "send")
"""What no step is: a bug there may end the process, and streams go on with another."""


def test_every_point_of_a_step_is_in_one_of_the_lists():
    others = {"obey", "accept", "prompt_logprobs", "start"}
    assert {*OF_ONE, *OF_STEPS, *OF_BOOKS} | others == {*points.ENGINE}


@pytest.fixture(scope="module")
def running():
    with serving("embedded", *SMALL, *MANY) as (made, faults):
        reader = threading.Thread(target=collections.deque, args=(made.process.stdout, 0))
        reader.start()  # what nobody reads stops who writes it
        yield made, faults
        made.process.kill()
        reader.join(10)


class Patient(Scene):
    """One whose streams may be refused, too."""

    async def stream(self, client, body):
        try:
            return await super().stream(client, body)
        except AssertionError as error:
            return ({}, {}, {}, [], None, str(error))


def wanted(server, streams):
    found, _ = asyncio.run(Scene(server.url).all([asked(i) for i in range(streams)]))
    return found


@pytest.fixture(scope="module")
def want(running):
    return wanted(running[0], max(FEW, STREAMS if ROUNDS else 0))


def ready(server):
    return httpx.get(f"{server.url}/ready", timeout=10).status_code == 200


def until(faults, some, within_s=30.0):
    deadline = time.monotonic() + within_s
    while faults.fired < some and time.monotonic() < deadline:
        time.sleep(0.01)


def go(server, faults, streams, *armed):
    """What all say while these faults happen."""

    async def disturb(scene):
        while scene.chunks < streams and not armed[0].point.startswith("join"):
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
    server, faults = running
    engine = engine_of(server)
    armed = [Fault(point, at=3 + 4 * i) for i, point in enumerate(OF_STEPS) if point != "leave"]
    found, fired = go(server, faults, FEW, *armed, Fault("leave", at=4))
    assert fired >= len(OF_STEPS) - 2  # some are not passed often: tables change now and then
    compare(found, want, "once")
    assert engine_of(server).pid == engine.pid


@pytest.mark.timeout(300)
def test_an_engine_that_breaks_its_books_is_replaced_and_streams_go_on(running, want):
    server, faults = running
    found, fired = go(server, faults, FEW, Fault("plan", at=20), Fault("landed", at=40))
    assert fired == 2
    compare(found, want, "books")


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
@pytest.mark.parametrize("stream", [True, False])
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
    assert "the engine died twice with this request aboard" in answers[0].text
    compare(found, want, "kill")
    assert wait_until(lambda: ready(server), 60)
    assert restarts(server) - before == 2


def restarts(server):
    return metric(server, "engine_restarts_total{")


def metric(server, name):
    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    (count,) = [line for line in lines if name in line]
    return float(count.split()[-1])


@pytest.mark.skipif(not ROUNDS, reason="QUIRE_BLAME_ROUNDS says how many")
@pytest.mark.timeout(300 + 60 * ROUNDS)
def test_faults_at_every_hook_at_random_tokens(running, want):
    """Of each kind in turns: the step raises once; the books do; the process is killed there."""
    server, faults = running
    rng = random.Random(3)
    hooks = [*OF_ONE, *OF_STEPS, *OF_BOOKS]
    for number in range(ROUNDS):
        point = hooks[number % len(hooks)]
        do = "kill" if number % 5 == 4 else "raise"
        fault = Fault(point, do, at=rng.randrange(1, 60))
        found, fired = go(server, faults, STREAMS, fault)
        spared = [i for i in range(STREAMS) if found[i][-1] is None]
        broken = STREAMS - len(spared)
        ends_one = do == "raise" and point in (*OF_ONE, "match", "keys", "publish", "confirm")
        assert broken <= ends_one, (number, fault)
        compare([found[i] for i in spared], [want[i] for i in spared], (number, fault))
        print(f"{number}: {point} {do} at {fault.at}: fired {fired}, ended {broken}", flush=True)

"""The seam by which tests put faults into a running server, and into an engine in this process."""

import random
import time

import pytest

from tests.cpu.engine_of import engine_of, request
from tests.faults import arming, points, rounds
from tests.faults.arming import Fault

SHORT = {"model": "embedded", "prompt": "a", "max_tokens": 3, "temperature": 0}


@pytest.mark.parametrize("name", [*points.ENGINE, *points.API])
def test_every_point_is_a_function_that_there_is(name):
    owner, attribute = points.find({**points.ENGINE, **points.API}[name].place)
    assert attribute in vars(owner)


def test_no_name_is_that_of_two_points():
    assert not points.ENGINE.keys() & points.API.keys()


def test_calls_are_counted_where_nothing_is_to_happen():
    with arming.here() as faults:
        faults.arm(
            Fault("forward", "count"), Fault("join", "count", seed=3), Fault("launch", "sleep")
        )
        assert faults.calls == [0, 0, 0]
        engine = engine_of()
        for number, name in enumerate(("one", "two"), start=2):
            engine.add(request(name, [1, 2, 3], 4, seed=number))
        began = time.monotonic()
        while not engine.idle:
            engine.step()
        assert faults.calls == [4, 1, 0]
        (at,) = faults.fired_at
        assert began < at < time.monotonic()


def test_a_fault_happens_at_its_call_and_as_often_as_it_says():
    with arming.here() as faults:
        faults.arm(Fault("forward", "sleep", at=3, times=2, seconds=0.001))
        engine = engine_of()
        engine.add(request("one", [1, 2, 3], 8))
        fired = []
        while not engine.idle:
            engine.step()
            fired.append(faults.fired)
    assert fired == [0, 0, 1, 2, 2, 2, 2, 2]


def test_a_wait_ends_where_the_longest_silence_does():
    came = [[0.5, 1.1, 4.0, 4.1], [1.0, 1.2, 6.0], [0.9]]
    assert rounds.wait_of(came, fault_at=1.05) == pytest.approx((2.95, 4.95))
    assert rounds.wait_of(came, fault_at=7.0) is None


def test_rounds_have_each_hook_in_turns_and_a_kill_at_each():
    calls = {"plan": 40, "tables": 8, "prompt_logprobs": 1}
    drawn = [rounds.draw(random.Random(0), number, calls) for number in range(4 * 5)]
    assert {(one.point, one.do) for one in drawn} == {
        (point, do) for point in (*calls, "start") for do in ("raise", "kill")
    }
    for one in drawn:
        *_, last = one.faults
        assert (last.point, last.do) == (one.point, one.do)
        assert 1 <= one.faults[0].at <= 30
        assert one.point != "tables" or last.at <= 6


def test_a_fault_is_for_the_request_that_it_names():
    with arming.here() as faults:
        faults.arm(Fault("join", "sleep", id="two"), Fault("join", "sleep", seed=3, times=0))
        engine = engine_of()
        for number, name in enumerate(("one", "two", "three")):
            engine.add(request(name, [1, 2, 3], 2, seed=number))
        while not engine.idle:
            engine.step()
        assert faults.fired == 1

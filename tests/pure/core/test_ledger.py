"""The books of time: whatever happens, each sequence's seconds are cut without gap and overlap."""

import random
from collections import deque

import pytest

from quire.core.sequence_timing import BREAKDOWN_FIELDS
from quire.core.snapshot import time_bucket
from quire.core.types import Request, StopConditions
from quire.engine.core.engine_core import EngineCore
from tests.pure.core.made import FakeGrammars, bound
from tests.pure.core.workload import (
    Setup,
    random_aborts,
    random_requests,
    random_setup,
    with_grammars,
)

TICK = 2.0**-12


class Clock:
    """Time goes on when somebody looks at it, by a random number of ticks, or when told to."""

    def __init__(self, rng=None):
        self.rng = rng
        self.now = 1000.0

    def __call__(self):
        if self.rng is not None:
            self.now += TICK * self.rng.choice([0, 0, 1, 3, 20])
        return self.now


class Device:
    """A FakeModel as the executor of an engine; a step takes `seconds(plan)`, waits included."""

    def __init__(self, model, clock, seconds, fails=()):
        self.model, self.clock, self.seconds, self.fails = model, clock, seconds, fails
        self.free_at = clock.now
        self.plans = deque()

    def submit(self, plan):
        self.model.submit(plan)
        self.free_at = max(self.free_at, self.clock.now) + self.seconds(plan)
        return Pending(self, plan, self.free_at)

    def recover(self):
        pass

    def shutdown(self):
        pass


class Pending:
    def __init__(self, device, plan, done_at):
        self.device, self.plan, self.done_at = device, plan, done_at

    def wait(self):
        self.device.clock.now = max(self.device.clock.now, self.done_at)
        if self.plan.step in self.device.fails:
            self.device.model.lose()
            raise RuntimeError("lost")
        return self.device.model.wait()


def engine_of(setup, clock, seconds):
    scheduler, _, model = setup.build()
    device = Device(model, clock, seconds, setup.fails)
    return EngineCore(scheduler, device, steps_in_flight=setup.depth, check=True, clock=clock)


def drive(engine, requests, setup, clock, rng):
    """Run it all; terminal updates by sequence, and when each request was given to the engine."""
    todo, given, ends, step, begun = list(requests), {}, {}, 0, set()
    while todo or not engine.empty:
        for request in todo[:3]:
            before = clock.now
            engine.add(request)
            given[request.id] = before, clock.now
        del todo[:3]
        news = []
        for what in setup.aborts.get(step, ()):
            if isinstance(what, str):
                news += engine.abort(what)
            elif what[0] in given and (what not in ends):
                engine.abort_sequence(*what)
        clock.now += TICK * rng.choice([0, 0, 5, 100])
        if setup.grammars is not None:
            setup.grammars.tick()
        news += engine.step()
        for update in news:
            place = update.request_id, update.index
            if update.token_ids and place not in begun:
                begun.add(place)
                assert update.timing.first_token_at == update.timing.ended_at
            if update.finish:
                ends[place] = update
                assert (update.timing.first_token_at is None) == (place not in begun)
        step += 1
        assert step < 20_000
    return given, ends


def random_drive(seed):
    rng = random.Random(f"ledger {seed}")
    requests = random_requests(rng)
    setup = random_setup(rng, requests)
    setup.depth = rng.choice([1, 2, 2, 3])
    setup.aborts = random_aborts(rng, requests) if rng.random() < 0.4 else {}
    setup.fails = frozenset(rng.sample(range(2, 30), 2)) if rng.random() < 0.2 else frozenset()
    requests = with_grammars(rng, requests, setup)
    clock = Clock(rng)
    engine = engine_of(setup, clock, lambda plan: TICK * rng.choice([0, 7, 60, 400]))
    given, ends = drive(engine, requests, setup, clock, rng)
    return engine, given, ends


@pytest.mark.parametrize("seed", range(150))
def test_the_cuts_are_not_negative_and_sum_to_the_wall_time(seed):
    engine, given, ends = random_drive(seed)
    assert ends or engine.snapshot().counters.finished
    for (request_id, _), update in ends.items():
        timing = update.timing
        cuts = timing.breakdown
        before, after = given[request_id]
        assert before <= timing.accepted_at <= after
        assert timing.ended_at <= engine._clock.now
        assert all(cut >= 0.0 for cut in cuts), timing
        assert sum(cuts) == pytest.approx(timing.total, abs=1e-9), timing
        if timing.first_token_at is not None:
            assert timing.accepted_at <= timing.first_token_at <= timing.ended_at


def test_no_account_stays_open():
    for seed in range(30):
        engine, _, _ = random_drive(seed)
        engine._time_accounting.check(0)
        assert not engine._time_accounting._groups


def test_all_causes_are_met_by_the_random_runs():
    total = [0.0] * len(BREAKDOWN_FIELDS)
    for seed in range(60):
        for update in random_drive(seed)[2].values():
            total = [a + b for a, b in zip(total, update.timing.breakdown)]
    assert all(total), total


# -- known amounts ----------------------------------------------------------------------------


def request(name, prompt=8, most=4, **more):
    made = random.Random(name)
    return Request(
        name, tuple(made.randrange(6) for _ in range(prompt)), StopConditions(most), **more
    )


class Scene:
    """One engine; a step takes a second, and nothing else takes time unless told to."""

    def __init__(self, seconds=lambda plan: 1.0, **setup):
        self.clock = Clock()
        self.engine = engine_of(Setup(**setup), self.clock, seconds)
        self.timings = {}

    def step(self, pause=0.0):
        for update in self.engine.step():
            if update.timing is not None:
                self.timings.setdefault((update.request_id, update.index), []).append(update.timing)
        self.clock.now += pause

    def run(self, pause=0.0):
        while not self.engine.idle:
            self.step(pause)
        return self

    def cuts(self, name, index=0):
        """Of the terminal update, without what is zero."""
        timing = self.timings[name, index][-1]
        cuts = zip(BREAKDOWN_FIELDS, timing.breakdown)
        return {name: seconds for name, seconds in cuts if seconds}


def test_one_request_alone_computes_its_prompt_and_decodes():
    scene = Scene()
    scene.engine.add(request("a", most=4))
    assert scene.run().cuts("a") == {"prefill": 1.0, "decode": 3.0}


def test_waiting_for_a_grammar_is_grammar_and_then_it_is_queue():
    grammars = FakeGrammars()
    scene = Scene(slots=1, grammars=grammars)
    scene.engine.add(request("a", most=5))
    scene.engine.add(request("b", most=2, constraint=bound(1)))
    scene.step()
    scene.step()
    grammars.tick()
    scene.run()
    assert scene.cuts("b") == {"grammar": 2.0, "queue": 3.0, "prefill": 1.0, "decode": 1.0}


def test_a_request_that_ends_while_it_waits_for_its_grammar_has_been_there():
    scene = Scene(grammars=FakeGrammars())
    scene.engine.add(request("a", constraint=bound(9)))
    scene.clock.now += 3.0
    [update] = scene.engine.abort("a")
    assert update.timing.breakdown == (3.0, *[0.0] * 6)
    scene.engine.check()


def test_a_prompt_in_chunks_is_prefill():
    scene = Scene(budget=3)
    scene.engine.add(request("a", prompt=8, most=1))
    assert scene.run().cuts("a") == {"prefill": 3.0}


@pytest.mark.parametrize("depth", [1, 2])
def test_the_first_update_says_where_the_time_to_the_first_token_went(depth):
    scene = Scene(depth=depth)
    scene.engine.add(request("a"))
    scene.run()
    first, last = scene.timings["a", 0]
    assert first.first_token_at == last.first_token_at == first.ended_at == 1001.0
    assert (first.prefill, first.decode) == (1.0, 0.0)


def test_waiting_for_a_seat_is_queue():
    scene = Scene(slots=1)
    scene.engine.add(request("a", most=3))
    scene.engine.add(request("b", most=2))
    scene.run()
    assert scene.cuts("b") == {"queue": 3.0, "prefill": 1.0, "decode": 1.0}


def test_a_request_says_behind_whom_it_came_to_wait():
    scene = Scene(slots=2)
    scene.engine.add(request("a", most=9, n=2))
    scene.engine.add(request("b", prompt=5, tenant=b"one"))
    scene.step()
    scene.step()
    scene.engine.add(request("c", prompt=7, tenant=b"two"))
    scene.engine.add(request("d", tenant=b"two"))
    scene.engine.add(request("e", tenant=b"one"))
    scene.run()
    behind = {name: scene.timings[name, 0][-1].queue_at_arrival for name in "abcde"}
    assert behind["a"] == (0, 0, 0, 0)
    assert behind["b"] == (1, 8, 1, 0)
    assert behind["c"] == (0, 0, 0, 2)
    assert behind["d"] == (1, 7, 0, 2)
    assert behind["e"] == (2, 15, 2, 2)


def test_who_leaves_the_queue_without_a_seat_is_waited_behind_no_more():
    scene = Scene(slots=1)
    for name in "abc":
        scene.engine.add(request(name))
        scene.step()
    scene.engine.abort("b")
    scene.engine.abort("c")
    scene.engine.add(request("d"))
    scene.run()
    assert scene.timings["d", 0][-1].queue_at_arrival == (0, 0, 0, 1)


def test_a_request_tells_of_the_step_that_it_may_have_waited_for():
    scene = Scene()
    scene.engine.add(request("a"))
    scene.step(pause=0.5)
    scene.engine.add(request("b"))
    scene.run()
    assert scene.timings["b", 0][-1].step_before == (1000.0, 1001.0)
    assert scene.timings["b", 0][-1].accepted_at == 1001.5


def test_steps_of_a_prompt_are_counted():
    scene = Scene(budget=3)
    scene.engine.add(request("a", prompt=8, most=4, n=2))
    scene.run()
    assert [scene.timings["a", i][-1].prompt_steps for i in (0, 1)] == [3, 4]


def test_others_prompts_take_their_share_of_a_step():
    scene = Scene()
    scene.engine.add(request("a", most=3))
    scene.step()
    scene.engine.add(request("b", prompt=7, most=1))  # 7 of the 8 tokens of the second step
    scene.run()
    assert scene.cuts("a") == {"prefill": 1.0, "others": 0.875, "decode": 1.125}
    assert scene.cuts("b") == {"prefill": 1.0}


def test_two_prompts_in_a_step_share_it():
    scene = Scene()
    scene.engine.add(request("a", prompt=6, most=1))
    scene.engine.add(request("b", prompt=2, most=1))
    scene.run()
    assert scene.cuts("a") == {"prefill": 0.75, "others": 0.25}
    assert scene.cuts("b") == {"prefill": 0.25, "others": 0.75}


def test_time_between_steps_is_the_engines_own():
    scene = Scene()
    scene.engine.add(request("a", most=3))
    scene.run(pause=0.5)
    assert scene.cuts("a") == {"prefill": 1.0, "decode": 2.0, "engine_other": 1.0}


def test_time_between_steps_that_a_step_in_flight_hides_costs_nobody_anything():
    scene = Scene(depth=2)
    scene.engine.add(request("a", most=3))
    scene.run(pause=0.5)
    assert scene.cuts("a") == {"prefill": 1.0, "decode": 2.0}


def test_time_between_steps_that_is_longer_than_the_step_in_flight_is_told():
    scene = Scene(depth=2)
    scene.engine.add(request("a", most=3))
    scene.run(pause=4.0)
    assert scene.cuts("a")["engine_other"] >= 4.0


def test_a_preempted_one_waits_and_is_computed_again_on_that_account():
    scene = Scene(blocks=6, block_size=2, prefix_caching=False)
    scene.engine.add(request("a", prompt=4, most=8))
    scene.engine.add(request("b", prompt=4, most=4))
    scene.run()
    cuts = scene.cuts("b")
    assert cuts["preempted"] > 1.0
    assert cuts["prefill"] + cuts["others"] < 1.5  # computing it again is none of it
    assert "queue" not in cuts
    assert scene.timings["b", 0][-1].preemptions == 1
    assert sum(cuts.values()) == pytest.approx(scene.timings["b", 0][-1].total)


def test_a_preempted_one_whose_blocks_went_to_the_host_waits_on_the_same_account():
    scene = Scene(blocks=6, block_size=2, host=50)
    scene.engine.add(request("a", prompt=4, most=8))
    scene.engine.add(request("b", prompt=4, most=4))
    assert scene.run().cuts("b")["preempted"] > 1.0


def squeezed():
    """A scene in which b was just preempted."""
    scene = Scene(blocks=6, block_size=2, prefix_caching=False)
    scene.engine.add(request("a", prompt=4, most=8))
    scene.engine.add(request("b", prompt=4, most=8))
    while not scene.engine.snapshot().preempted:
        scene.step()
    return scene


def test_who_was_preempted_is_counted_until_it_is_aboard_again():
    scene = squeezed()
    while scene.engine.snapshot().rows[0].request_id == "a":
        assert scene.engine.snapshot().preempted == 1
        scene.step()
    scene.step()
    assert [row.state for row in scene.engine.snapshot().rows] == ["running"]
    assert scene.engine.snapshot().preempted == 0


def test_who_is_aborted_while_preempted_is_counted_no_more():
    scene = squeezed()
    (update,) = scene.engine.abort("b")
    assert update.timing.preemptions == 1
    assert scene.engine.snapshot().preempted == 0


def test_siblings_wait_for_the_prompt_as_the_first_does():
    scene = Scene(budget=4, slots=4)
    scene.engine.add(request("x", prompt=4, most=1))
    scene.engine.add(request("a", prompt=8, most=2, n=3))
    scene.run()
    third = pytest.approx(1 / 3)  # of the step in which both siblings compute the last token
    first = scene.timings["a", 0][-1]
    assert (first.queue, first.prefill) == (1.0, 2.0)
    assert (first.others, first.decode) == (pytest.approx(2 / 3), third)
    for index in (1, 2):
        timing = scene.timings["a", index][-1]
        assert (timing.queue, timing.prefill) == (1.0, pytest.approx(2 + 2 / 3))
        assert (timing.others, timing.decode) == (third, 1.0)


def test_an_aborted_request_says_where_its_time_went_so_far():
    scene = Scene(slots=1)
    scene.engine.add(request("a", most=9))
    scene.engine.add(request("b"))
    scene.step()
    scene.step()
    (running,) = scene.engine.abort("a")
    (waiting,) = scene.engine.abort("b")
    assert (running.timing.prefill, running.timing.decode) == (1.0, 1.0)
    assert (waiting.timing.queue, waiting.timing.first_token_at) == (2.0, None)


def test_a_timed_request_has_its_timing_in_every_update():
    scene = Scene()
    scene.engine.add(request("a", most=4, timed=True))
    scene.engine.add(request("b", most=4))
    scene.run()
    assert [t.ended_at - 1000.0 for t in scene.timings["a", 0]] == [1.0, 2.0, 3.0, 4.0]
    assert len(scene.timings["b", 0]) == 2
    assert not scene.engine._time_accounting._timed


def test_time_without_anybody_is_nobodys():
    scene = Scene()
    scene.engine.add(request("a", most=1))
    scene.run(pause=100.0)
    scene.engine.add(request("b", most=1))
    assert scene.run().cuts("b") == {"prefill": 1.0}


def test_planning_belongs_to_the_step():
    scene = Scene()
    plan = scene.engine._scheduler.plan

    def slow():
        scene.clock.now += 0.5
        return plan()

    scene.engine._scheduler.plan = slow
    scene.engine.add(request("a", most=1))
    assert scene.run().cuts("a") == {"prefill": 1.5}


def test_rows_that_failed_have_generated_nothing_until_they_were_tried_again():
    whole, scene = Scene(), Scene(fails=frozenset({2}))
    for one in (whole, scene):
        one.engine.add(request("a"))
        one.engine.add(request("b"))
        one.run()
    counters = scene.engine.snapshot().counters
    assert counters.generated_tokens == whole.engine.snapshot().counters.generated_tokens
    assert counters.finished == {"length": 2}


def test_a_step_that_failed_has_brought_no_first_token():
    scene = Scene(fails=frozenset({1}))
    scene.engine.add(request("a"))
    scene.step()
    assert not sum(scene.engine.snapshot().counters.first_token_times)
    assert scene.engine.snapshot().counters.answered_tokens == 0
    scene.run()
    assert sum(scene.engine.snapshot().counters.first_token_times) == 1


def test_time_until_one_is_aboard_again_after_a_step_that_failed_is_no_decoding():
    scene = Scene(fails=frozenset({2}))
    scene.engine.add(request("a", prompt=4, most=3))
    cuts = scene.run().cuts("a")
    assert cuts["preempted"] >= 1.0
    assert sum(cuts.values()) == 4.0


def test_counters_count_steps_tokens_and_ends():
    scene = Scene()
    scene.engine.add(request("a", prompt=8, most=4))
    scene.engine.add(request("b", prompt=3, most=2))
    scene.step()
    scene.step()
    scene.engine.abort_sequence("a", 0)
    scene.run()
    counters = scene.engine.snapshot().counters
    assert counters.prompt_tokens == counters.answered_tokens == 11
    assert counters.generated_tokens == 4
    assert counters.finished == {"length": 1, "stop_string": 1}
    assert sum(counters.breakdown_seconds) == 4.0
    assert (counters.steps, counters.step_seconds) == (2, 2.0)
    assert counters.step_tokens_sum == 13
    assert sum(counters.first_token_times) == 2
    assert counters.inter_token_times[time_bucket(1.0)] == sum(counters.inter_token_times) == 2

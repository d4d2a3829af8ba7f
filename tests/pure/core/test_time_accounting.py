"""Time accounting: the phases of each sequence have no gap and no overlap."""

import random
from collections import deque

import pytest

from quire.core.sequence_timing import BREAKDOWN_FIELDS
from quire.core.snapshot import LateWorkCounts, time_bucket
from quire.core.types import Request, StopConditions
from quire.engine.core.engine_core import EngineCore
from tests import tiers
from tests.pure.core.builders import FakeGrammars, fake_constraint
from tests.pure.core.workload import (
    Setup,
    random_aborts,
    random_requests,
    random_setup,
    with_grammars,
)

TICK = 2.0**-12


class Clock:
    """Advances by random ticks at each call if it has an rng, or by assignment to `now`."""

    def __init__(self, rng=None):
        self.rng = rng
        self.now = 1000.0

    def __call__(self):
        if self.rng is not None:
            self.now += TICK * self.rng.choice([0, 0, 1, 3, 20])
        return self.now


class Device:
    """Executor with a FakeModel; a step takes `seconds(plan)`, waits included.

    Before a step is launched, kernels are compiled for `compiles(plan)`.
    """

    def __init__(self, model, clock, seconds, fails=(), compiles=lambda plan: 0.0):
        self.compiles, self.counts = compiles, LateWorkCounts()
        self.model, self.clock, self.seconds, self.fails = model, clock, seconds, fails
        self.free_at = clock.now
        self.plans = deque()

    def submit(self, plan):
        self.model.submit(plan)
        if compiled := self.compiles(plan):
            self.clock.now += compiled
            self.counts = LateWorkCounts(0, 0, self.counts.seconds + compiled)
        self.free_at = max(self.free_at, self.clock.now) + self.seconds(plan)
        return Pending(self, plan, self.free_at)

    def late_work(self):
        return self.counts

    def recover(self):
        pass

    def set_failure_callback(self, callback):
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


def engine_of(setup, clock, seconds, compiles=lambda plan: 0.0):
    scheduler, _, model = setup.build()
    device = Device(model, clock, seconds, setup.fails, compiles)
    return EngineCore(scheduler, device, steps_in_flight=setup.depth, check=True, clock=clock)


def drive(engine, requests, setup, clock, rng):
    """Run all requests. Returns terminal updates by sequence, and the time when each was added."""
    todo, added, ends, step, started_at = list(requests), {}, {}, 0, set()
    while todo or not engine.empty:
        for request in todo[:3]:
            before = clock.now
            engine.add(request)
            added[request.id] = before, clock.now
        del todo[:3]
        news = []
        for what in setup.aborts.get(step, ()):
            if isinstance(what, str):
                news += engine.abort(what)
            elif what[0] in added and (what not in ends):
                engine.abort_sequence(*what)
        clock.now += TICK * rng.choice([0, 0, 5, 100])
        if setup.grammars is not None:
            setup.grammars.tick()
        news += engine.step()
        for update in news:
            place = update.request_id, update.index
            if update.token_ids and place not in started_at:
                started_at.add(place)
                assert update.timing.first_token_at == update.timing.ended_at
            if update.finish:
                ends[place] = update
                assert (update.timing.first_token_at is None) == (place not in started_at)
        step += 1
        assert step < 20_000
    return added, ends


def random_drive(seed):
    rng = random.Random(f"ledger {seed}")
    requests = random_requests(rng)
    setup = random_setup(rng, requests)
    setup.depth = rng.choice([1, 2, 2, 3])
    setup.ranks = random.Random(f"ranks {seed}").choice([1, 1, 2])
    setup.aborts = random_aborts(rng, requests) if rng.random() < 0.4 else {}
    setup.fails = frozenset(rng.sample(range(2, 30), 2)) if rng.random() < 0.2 else frozenset()
    requests = with_grammars(rng, requests, setup)
    clock = Clock(rng)
    engine = engine_of(
        setup,
        clock,
        lambda plan: TICK * rng.choice([0, 7, 60, 400]),
        lambda plan: TICK * rng.choice([0] * 20 + [90]),
    )
    added, ends = drive(engine, requests, setup, clock, rng)
    return engine, added, ends


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(tiers.amount(40, 1000)))
def test_phases_are_not_negative_and_sum_to_the_wall_time(seed):
    engine, added, ends = random_drive(seed)
    assert ends or engine.snapshot().counters.finished
    for (request_id, _), update in ends.items():
        timing = update.timing
        phases = timing.breakdown
        before, after = added[request_id]
        assert before <= timing.accepted_at <= after
        assert timing.ended_at <= engine._clock.now
        assert all(seconds_of_phase >= 0.0 for seconds_of_phase in phases), timing
        assert sum(phases) == pytest.approx(timing.total, abs=1e-9), timing
        if timing.first_token_at is not None:
            assert timing.accepted_at <= timing.first_token_at <= timing.ended_at


def test_all_timers_are_closed():
    for seed in range(tiers.amount(10, 100)):
        engine, _, _ = random_drive(seed)
        engine._time_accounting.check(0)
        assert not engine._time_accounting._groups


def test_random_runs_cover_all_phases():
    total = [0.0] * len(BREAKDOWN_FIELDS)
    for seed in range(60):
        for update in random_drive(seed)[2].values():
            total = [a + b for a, b in zip(total, update.timing.breakdown)]
        if all(total):
            break
    assert all(total), total


# -- known amounts ----------------------------------------------------------------------------


def request(name, prompt=8, most=4, **more):
    rng = random.Random(name)
    return Request(
        name, tuple(rng.randrange(6) for _ in range(prompt)), StopConditions(most), **more
    )


class Simulation:
    """An engine whose steps take a second each; nothing else takes time, except `pause`."""

    def __init__(self, seconds=lambda plan: 1.0, compiles=lambda plan: 0.0, **setup):
        self.clock = Clock()
        self.engine = engine_of(Setup(**setup), self.clock, seconds, compiles)
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

    def phases(self, name, index=0):
        """Return the phases of the terminal update that are not zero."""
        timing = self.timings[name, index][-1]
        phases = zip(BREAKDOWN_FIELDS, timing.breakdown)
        return {name: seconds for name, seconds in phases if seconds}


def test_one_request_alone_computes_its_prompt_and_decodes():
    sim = Simulation()
    sim.engine.add(request("a", most=4))
    assert sim.run().phases("a") == {"prefill": 1.0, "decode": 3.0}


def test_a_sequence_that_moves_to_another_rank_is_recomputed():
    sim = Simulation(ranks=2, blocks=8, prefix_caching=False)
    for name, prompt, most in (("a", 9, 20), ("b", 12, 4), ("c", 9, 20)):
        sim.engine.add(request(name, prompt, most))
        sim.step()
    phases = sim.run().phases("c")
    assert phases == {"prefill": 1.0, "preempted": 1.0, "decode": 18.0}


def test_waiting_for_a_grammar_comes_before_the_queue_phase():
    grammars = FakeGrammars()
    sim = Simulation(slots=1, grammars=grammars)
    sim.engine.add(request("a", most=5))
    sim.engine.add(request("b", most=2, constraint=fake_constraint(1)))
    sim.step()
    sim.step()
    grammars.tick()
    sim.run()
    assert sim.phases("b") == {"grammar": 2.0, "queue": 3.0, "prefill": 1.0, "decode": 1.0}


def test_a_request_aborted_in_its_grammar_wait_has_that_phase():
    sim = Simulation(grammars=FakeGrammars())
    sim.engine.add(request("a", constraint=fake_constraint(9)))
    sim.clock.now += 3.0
    [update] = sim.engine.abort("a")
    assert update.timing.breakdown == (3.0, *[0.0] * 7)
    sim.engine.check()


def test_a_prompt_in_chunks_is_prefill():
    sim = Simulation(budget=3)
    sim.engine.add(request("a", prompt=8, most=1))
    assert sim.run().phases("a") == {"prefill": 3.0}


@pytest.mark.parametrize("depth", [1, 2])
def test_the_first_update_has_the_breakdown_of_the_ttft(depth):
    sim = Simulation(depth=depth)
    sim.engine.add(request("a"))
    sim.run()
    first, last = sim.timings["a", 0]
    assert first.first_token_at == last.first_token_at == first.ended_at == 1001.0
    assert (first.prefill, first.decode) == (1.0, 0.0)


def test_waiting_for_a_slot_is_the_queue_phase():
    sim = Simulation(slots=1)
    sim.engine.add(request("a", most=3))
    sim.engine.add(request("b", most=2))
    sim.run()
    assert sim.phases("b") == {"queue": 3.0, "prefill": 1.0, "decode": 1.0}


def test_queue_at_arrival_counts_requests_ahead():
    sim = Simulation(slots=2)
    sim.engine.add(request("a", most=9, n=2))
    sim.engine.add(request("b", prompt=5, tenant=b"one"))
    sim.step()
    sim.step()
    sim.engine.add(request("c", prompt=7, tenant=b"two"))
    sim.engine.add(request("d", tenant=b"two"))
    sim.engine.add(request("e", tenant=b"one"))
    sim.run()
    queues = {name: sim.timings[name, 0][-1].queue_at_arrival for name in "abcde"}
    assert queues["a"] == (0, 0, 0, 0)
    assert queues["b"] == (1, 8, 1, 0)
    assert queues["c"] == (0, 0, 0, 2)
    assert queues["d"] == (1, 7, 0, 2)
    assert queues["e"] == (2, 15, 2, 2)


def test_requests_aborted_in_the_queue_are_not_counted_ahead():
    sim = Simulation(slots=1)
    for name in "abc":
        sim.engine.add(request(name))
        sim.step()
    sim.engine.abort("b")
    sim.engine.abort("c")
    sim.engine.add(request("d"))
    sim.run()
    assert sim.timings["d", 0][-1].queue_at_arrival == (0, 0, 0, 1)


def test_timing_has_the_step_before_arrival():
    sim = Simulation()
    sim.engine.add(request("a"))
    sim.step(pause=0.5)
    sim.engine.add(request("b"))
    sim.run()
    assert sim.timings["b", 0][-1].step_before == (1000.0, 1001.0)
    assert sim.timings["b", 0][-1].accepted_at == 1001.5


def test_steps_of_a_prompt_are_counted():
    sim = Simulation(budget=3)
    sim.engine.add(request("a", prompt=8, most=4, n=2))
    sim.run()
    assert [sim.timings["a", i][-1].prompt_steps for i in (0, 1)] == [3, 4]


def test_prompts_of_others_get_their_share_of_a_step():
    sim = Simulation()
    sim.engine.add(request("a", most=3))
    sim.step()
    sim.engine.add(request("b", prompt=7, most=1))  # 7 of the 8 tokens of the second step
    sim.run()
    assert sim.phases("a") == {"prefill": 1.0, "others": 0.875, "decode": 1.125}
    assert sim.phases("b") == {"prefill": 1.0}


def test_two_prompts_in_a_step_share_it():
    sim = Simulation()
    sim.engine.add(request("a", prompt=6, most=1))
    sim.engine.add(request("b", prompt=2, most=1))
    sim.run()
    assert sim.phases("a") == {"prefill": 0.75, "others": 0.25}
    assert sim.phases("b") == {"prefill": 0.25, "others": 0.75}


def test_time_between_steps_is_engine_other():
    sim = Simulation()
    sim.engine.add(request("a", most=3))
    sim.run(pause=0.5)
    assert sim.phases("a") == {"prefill": 1.0, "decode": 2.0, "engine_other": 1.0}


def test_time_hidden_by_a_step_in_flight_is_not_charged():
    sim = Simulation(depth=2)
    sim.engine.add(request("a", most=3))
    sim.run(pause=0.5)
    assert sim.phases("a") == {"prefill": 1.0, "decode": 2.0}


def test_time_beyond_the_step_in_flight_is_engine_other():
    sim = Simulation(depth=2)
    sim.engine.add(request("a", most=3))
    sim.run(pause=4.0)
    assert sim.phases("a")["engine_other"] >= 4.0


def test_time_in_which_a_step_waits_for_a_compilation_is_compile():
    sim = Simulation(compiles=lambda plan: 5.0 if plan.step == 2 else 0.0)
    sim.engine.add(request("a", most=4))
    sim.step()
    sim.engine.add(request("b", prompt=7, most=2))
    sim.run()
    assert sim.phases("a") == {"prefill": 1.0, "others": 0.875, "decode": 2.125, "compile": 5.0}
    assert sim.phases("b") == {"prefill": 1.0, "decode": 1.0, "compile": 5.0}
    assert sim.engine.snapshot().counters.step_seconds == 9.0


def test_a_compilation_for_the_next_step_delays_the_step_in_flight():
    sim = Simulation(depth=2, compiles=lambda plan: 5.0 if plan.step == 2 else 0.0)
    sim.engine.add(request("a", most=3))
    sim.run()
    assert sim.phases("a")["compile"] == 5.0
    assert sum(sim.phases("a").values()) == sim.timings["a", 0][-1].total


def test_a_compilation_before_a_step_is_not_charged():
    sim = Simulation()
    device = sim.engine.executor
    device.counts = LateWorkCounts(1, 0, 7.0)  # a health probe's
    sim.engine.add(request("a", most=2))
    assert sim.run().phases("a") == {"prefill": 1.0, "decode": 1.0}
    device.counts = LateWorkCounts()  # another engine of the process got ready
    sim.engine.add(request("b", most=2))
    assert sim.run().phases("b") == {"prefill": 1.0, "decode": 1.0}


def test_preemption_and_recomputation_are_the_preempted_phase():
    sim = Simulation(blocks=6, block_size=2, prefix_caching=False)
    sim.engine.add(request("a", prompt=4, most=8))
    sim.engine.add(request("b", prompt=4, most=4))
    sim.run()
    phases = sim.phases("b")
    assert phases["preempted"] > 1.0
    assert phases["prefill"] + phases["others"] < 1.5  # recomputation does not count
    assert "queue" not in phases
    assert sim.timings["b", 0][-1].preemptions == 1
    assert sum(phases.values()) == pytest.approx(sim.timings["b", 0][-1].total)


def test_preemption_with_host_blocks_is_the_preempted_phase():
    sim = Simulation(blocks=6, block_size=2, host=50)
    sim.engine.add(request("a", prompt=4, most=8))
    sim.engine.add(request("b", prompt=4, most=4))
    assert sim.run().phases("b")["preempted"] > 1.0


def preempted_simulation():
    """Return a simulation in which b was just preempted."""
    sim = Simulation(blocks=6, block_size=2, prefix_caching=False)
    sim.engine.add(request("a", prompt=4, most=8))
    sim.engine.add(request("b", prompt=4, most=8))
    while not sim.engine.snapshot().preempted:
        sim.step()
    return sim


def test_num_preempted_counts_sequences_until_they_run_again():
    sim = preempted_simulation()
    while sim.engine.snapshot().rows[0].request_id == "a":
        assert sim.engine.snapshot().preempted == 1
        sim.step()
    sim.step()
    assert [row.state for row in sim.engine.snapshot().rows] == ["running"]
    assert sim.engine.snapshot().preempted == 0


def test_num_preempted_drops_aborted_sequences():
    sim = preempted_simulation()
    (update,) = sim.engine.abort("b")
    assert update.timing.preemptions == 1
    assert sim.engine.snapshot().preempted == 0


def test_siblings_have_the_prefill_phase_of_the_leader():
    sim = Simulation(budget=4, slots=4)
    sim.engine.add(request("x", prompt=4, most=1))
    sim.engine.add(request("a", prompt=8, most=2, n=3))
    sim.run()
    third = pytest.approx(1 / 3)  # of the step in which both siblings compute the last token
    first = sim.timings["a", 0][-1]
    assert (first.queue, first.prefill) == (1.0, 2.0)
    assert (first.others, first.decode) == (pytest.approx(2 / 3), third)
    for index in (1, 2):
        timing = sim.timings["a", index][-1]
        assert (timing.queue, timing.prefill) == (1.0, pytest.approx(2 + 2 / 3))
        assert (timing.others, timing.decode) == (third, 1.0)


def test_an_aborted_request_has_a_breakdown():
    sim = Simulation(slots=1)
    sim.engine.add(request("a", most=9))
    sim.engine.add(request("b"))
    sim.step()
    sim.step()
    (running,) = sim.engine.abort("a")
    (waiting,) = sim.engine.abort("b")
    assert (running.timing.prefill, running.timing.decode) == (1.0, 1.0)
    assert (waiting.timing.queue, waiting.timing.first_token_at) == (2.0, None)


def test_a_timed_request_has_its_timing_in_every_update():
    sim = Simulation()
    sim.engine.add(request("a", most=4, timed=True))
    sim.engine.add(request("b", most=4))
    sim.run()
    assert [t.ended_at - 1000.0 for t in sim.timings["a", 0]] == [1.0, 2.0, 3.0, 4.0]
    assert len(sim.timings["b", 0]) == 2
    assert not sim.engine._time_accounting._timed


def test_idle_time_is_not_charged():
    sim = Simulation()
    sim.engine.add(request("a", most=1))
    sim.run(pause=100.0)
    sim.engine.add(request("b", most=1))
    assert sim.run().phases("b") == {"prefill": 1.0}


def test_planning_time_belongs_to_the_step():
    sim = Simulation()
    plan = sim.engine._scheduler.plan

    def slow():
        sim.clock.now += 0.5
        return plan()

    sim.engine._scheduler.plan = slow
    sim.engine.add(request("a", most=1))
    assert sim.run().phases("a") == {"prefill": 1.5}


def test_rows_of_a_failed_step_generate_tokens_when_recomputed():
    whole, sim = Simulation(), Simulation(fails=frozenset({2}))
    for one in (whole, sim):
        one.engine.add(request("a"))
        one.engine.add(request("b"))
        one.run()
    counters = sim.engine.snapshot().counters
    assert counters.generated_tokens == whole.engine.snapshot().counters.generated_tokens
    assert counters.finished == {"length": 2}


def test_a_failed_step_yields_no_first_token():
    sim = Simulation(fails=frozenset({1}))
    sim.engine.add(request("a"))
    sim.step()
    assert not sum(sim.engine.snapshot().counters.first_token_times)
    assert sim.engine.snapshot().counters.answered_tokens == 0
    sim.run()
    assert sum(sim.engine.snapshot().counters.first_token_times) == 1


def test_time_from_a_failed_step_until_running_again_is_not_decode():
    sim = Simulation(fails=frozenset({2}))
    sim.engine.add(request("a", prompt=4, most=3))
    phases = sim.run().phases("a")
    assert phases["preempted"] >= 1.0
    assert sum(phases.values()) == 4.0


def test_counters_count_steps_tokens_and_finishes():
    sim = Simulation()
    sim.engine.add(request("a", prompt=8, most=4))
    sim.engine.add(request("b", prompt=3, most=2))
    sim.step()
    sim.step()
    sim.engine.abort_sequence("a", 0)
    sim.run()
    counters = sim.engine.snapshot().counters
    assert counters.prompt_tokens == counters.answered_tokens == 11
    assert counters.generated_tokens == 4
    assert counters.finished == {"length": 1, "stop_string": 1}
    assert sum(counters.breakdown_seconds) == 4.0
    assert (counters.steps, counters.step_seconds) == (2, 2.0)
    assert counters.step_tokens_sum == 13
    assert sum(counters.first_token_times) == 2
    assert counters.inter_token_times[time_bucket(1.0)] == sum(counters.inter_token_times) == 2

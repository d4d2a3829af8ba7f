"""The heartbeat and its readers: no working engine is ever killed."""

import os

import pytest

from quire.core.accounting.step_time import TOKEN_BASE_COST, StepTimeEstimate, step_cost
from quire.core.types import Row, StepPlan, Update, Wants
from quire.engine.heartbeat_page import (
    EnginePhase,
    Heartbeat,
    HeartbeatReader,
    HeartbeatWriter,
    create_page,
)
from quire.engine.supervise.liveness import (
    CHECK_INTERVAL_S,
    MAX_STOPPED_S,
    READY_SILENCE_S,
    LivenessMonitor,
    check_readiness,
    runqueue_wait_ns,
)
from quire.executors.fake import Executor
from quire.platform.processes import process_state
from tests.pure.engine.test_engine_core import drain, engine_over, next_token, request

S = 1_000_000_000
SEQ = object()


class Clock:
    def __init__(self):
        self.now = 100 * S

    def __call__(self):
        return self.now

    def tick(self, seconds):
        self.now += int(seconds * S)


@pytest.fixture
def clock():
    return Clock()


class Scene:
    """A page, its writer, its reader, and a watchdog of 60 s."""

    def __init__(self, clock):
        self.clock = clock
        self.fd = create_page()
        self.pulse = HeartbeatWriter(self.fd, clock)
        self.read = HeartbeatReader(self.fd).read
        self.state, self.pid = "S", 7
        self.waited = 0
        self.watch = self.watchdog()
        self.pulse.mark_starting(7)
        self.pulse.mark_serving()

    def watchdog(self, limit_s=60.0, **more):
        ask = {"state": lambda pid: self.state, "waited": lambda pid: self.waited}
        return LivenessMonitor(self.read, limit_s, **ask, **more, clock=self.clock)

    def step(self, rows, seconds):
        """One that takes so long and lands."""
        plan = StepPlan(1, rows)
        self.pulse.mark_iteration(working=True, requests=1)
        self.pulse.on_step_planned(plan)
        self.clock.tick(seconds)
        self.pulse.on_step_finished(plan, [Update("a", 0, (1,))], 0, seconds)

    def begin_step(self, rows):
        self.pulse.mark_iteration(working=True, requests=1)
        self.pulse.on_step_planned(StepPlan(1, rows))

    def trouble(self):
        found = check_readiness(self.read(), self.clock.now, self.state)
        return None if found is None else found.code

    def watched(self, seconds):
        """The watchdog's first reason within so many seconds, and after how many."""
        for i in range(int(seconds / CHECK_INTERVAL_S)):
            self.clock.tick(CHECK_INTERVAL_S)
            said = self.watch.check(self.pid)
            if said is not None:
                return said, (i + 1) * CHECK_INTERVAL_S
        return None


@pytest.fixture
def scene(clock):
    made = Scene(clock)
    yield made
    os.close(made.fd)


def rows(*counts, start=0):
    return tuple(Row(SEQ, start, count, Wants.TOKEN) for count in counts)


def test_others_read_what_an_engine_counts(scene):
    engine = engine_over(Executor(next_token), depth=2)
    engine.set_observers(scene.pulse)
    engine.add(request("one", max_tokens=5))
    drain(engine)
    beat = scene.read()
    assert (beat.phase, beat.pid, beat.tokens, beat.submitted_at) == (EnginePhase.SERVING, 7, 5, 0)
    assert beat.steps >= 5


def test_another_engine_begins_a_page_anew(scene):
    scene.step(rows(1), 0.1)
    scene.pulse.mark_starting(8)
    assert scene.read() == Heartbeat(
        EnginePhase.STARTING, 8, beat_at=scene.clock.now, progress_at=scene.clock.now
    )


def test_an_idle_engine_is_ready_while_it_sends_heartbeats(scene):
    scene.pulse.mark_idle(False)
    scene.clock.tick(READY_SILENCE_S - 0.1)
    assert scene.trouble() is None
    scene.clock.tick(0.2)
    assert scene.trouble() == "silent"


def test_an_engine_that_starts_is_not_ready(scene):
    scene.pulse.mark_starting(8)
    assert scene.trouble() == "starting"
    scene.pulse.mark_ended()
    assert scene.trouble() == "gone"


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_stopped_process_is_not_ready_at_once(scene, state):
    scene.state = state
    assert scene.trouble() == "stopped"


def test_a_step_that_does_not_end_is_found_within_five_seconds(scene):
    scene.step(rows(1), 0.01)
    scene.begin_step(rows(1))
    scene.clock.tick(2.5)
    assert scene.trouble() is None
    scene.clock.tick(1.5)
    assert scene.trouble() == "stalled"


def test_turns_without_progress_are_found_as_well(scene):
    scene.step(rows(1), 0.01)
    for _ in range(50):
        scene.pulse.mark_iteration(working=True, requests=1)
        scene.clock.tick(0.1)
    assert scene.trouble() == "stalled"


def test_messages_and_empty_steps_are_no_progress(scene):
    scene.step(rows(1), 0.01)
    for _ in range(50):
        scene.pulse.mark_iteration(working=True, requests=2)
        scene.pulse.on_step_planned(StepPlan(2, ()))
        scene.clock.tick(0.1)
        scene.pulse.on_step_finished(StepPlan(2, ()), [], 0, 0.1)
    assert scene.trouble() == "stalled"


def test_waking_up_begins_the_time_anew(scene):
    scene.pulse.mark_idle(False)
    scene.clock.tick(2.9)
    scene.begin_step(rows(1))
    scene.clock.tick(2.9)
    assert scene.trouble() is None


def test_the_first_step_may_take_a_minute(scene):
    scene.begin_step(rows(2048))
    scene.clock.tick(60)
    assert scene.trouble() is None


def test_a_first_large_step_may_take_long_after_a_small_one(scene):
    """A token takes 0.1 s on this CPU, so 2048 may take minutes."""
    scene.step(rows(1), 0.1)
    scene.begin_step(rows(2048))
    scene.clock.tick(200)
    assert scene.trouble() is None


def test_steps_deep_in_a_long_prompt_may_take_longer_and_longer(scene):
    """200,000 tokens in chunks of 2048; what a token costs grows with what it looks at."""
    scene.step(rows(1), 0.01)
    for start in range(0, 200_000, 2048):
        scene.begin_step(rows(2048, start=start))
        scene.clock.tick(1 + start / 4000)
        assert scene.trouble() is None
        assert scene.watch.check(7) is None
        scene.pulse.on_step_finished(
            StepPlan(1, rows(2048, start=start)), [], 2048, 1 + start / 4000
        )


def test_the_estimate_recovers_from_a_stall(scene):
    scene.step(rows(1), 100.0)
    for _ in range(400):
        scene.step(rows(1), 0.01)
    scene.begin_step(rows(1))
    scene.clock.tick(4)
    assert scene.trouble() == "stalled"


def test_a_canary_that_does_not_come_back_is_found(scene):
    scene.pulse.mark_probe(True)
    scene.clock.tick(0.01)
    scene.pulse.mark_probe(False)
    assert (scene.read().probes, scene.trouble()) == (1, None)
    scene.pulse.mark_probe(True)
    scene.clock.tick(READY_SILENCE_S + 1)
    assert scene.trouble() == "stalled"


def test_the_watchdog_ends_an_engine_without_progress(scene):
    scene.step(rows(1), 0.01)
    scene.begin_step(rows(1))
    said, after_s = scene.watched(100)
    assert "no step has finished" in said
    assert 60 < after_s < 62


def test_the_watchdog_gives_a_slow_step_its_time(scene):
    scene.step(rows(64), 20.0)
    scene.begin_step(rows(64))
    assert scene.watched(250) is None
    assert scene.watched(15) is not None


def test_the_watchdog_ends_a_stopped_process_soon(scene):
    scene.state = "T"
    said, after_s = scene.watched(10)
    assert "stopped" in said
    assert MAX_STOPPED_S <= after_s <= MAX_STOPPED_S + 2 * CHECK_INTERVAL_S


def test_a_process_resumed_with_its_watchdog_is_kept(scene):
    """All processes of a server were stopped, and continue one after the other."""
    scene.watch, scene.state = scene.watchdog(stopped_s=2 * CHECK_INTERVAL_S), "T"
    scene.clock.tick(1000)
    assert scene.watch.check(7) is None
    scene.state = "S"
    assert scene.watched(10) is None


def test_the_watchdog_leaves_one_alone_that_is_traced(scene):
    scene.state = "t"
    assert scene.watched(30) is None


def test_the_watchdog_leaves_one_alone_that_was_stopped_for_a_moment(scene):
    for _ in range(5):
        scene.state = "T"
        assert scene.watched(MAX_STOPPED_S - CHECK_INTERVAL_S) is None
        scene.state = "S"
        assert scene.watched(CHECK_INTERVAL_S) is None


def test_a_suspended_machine_makes_no_process_late(scene):
    scene.step(rows(1), 0.01)
    for _ in range(20):
        scene.begin_step(rows(1))
        assert scene.watch.check(7) is None
        scene.clock.tick(1000)
        assert scene.watch.check(7) is None
        scene.pulse.on_step_finished(StepPlan(1, rows(1)), [], 0, 0.01)


def test_the_watchdog_keeps_an_idle_engine_with_heartbeats(scene):
    for _ in range(300):
        scene.pulse.mark_idle(False)
        assert scene.watched(1) is None


def test_the_watchdog_ends_an_idle_engine_without_heartbeats(scene):
    scene.pulse.mark_idle(False)
    assert "no heartbeat" in scene.watched(100)[0]


def test_the_watchdog_ignores_calls_without_a_time_limit(scene):
    scene.pulse.mark_unbounded(True)
    assert scene.trouble() == "occupied"
    assert scene.watched(1000) is None
    scene.pulse.mark_unbounded(False)
    assert scene.trouble() is None


def test_a_first_start_may_take_for_ever(scene):
    scene.pulse.mark_starting(7)
    assert scene.watched(10_000) is None


@pytest.mark.parametrize("begun", [True, False])
def test_another_start_may_take_ten_times_as_long(scene, begun):
    scene.watch.set_start_time(5.0)
    scene.pid = 8
    if begun:
        scene.pulse.mark_starting(8)
    said, after_s = scene.watched(200)
    assert "start has not finished" in said
    assert 110 < after_s < 112


def test_a_watchdog_of_0_seconds_ends_nothing(scene):
    watch, scene.state = scene.watchdog(0.0), "T"
    for _ in range(100):
        scene.clock.tick(1)
        assert watch.check(7) is None


def test_time_without_a_processor_makes_no_process_late(scene):
    """Of ten seconds it gets one, in one piece: ten times as much is to be done as can be."""
    scene.pulse.mark_idle(False)
    found, tens = None, 0
    while found is None:
        found = scene.watched(9)
        scene.waited += 9 * S  # the kernel counts a wait when it ends
        found = found or scene.watched(1)
        tens += 1
    assert 50 < tens < 63


def test_a_watchdog_takes_the_allowed_time_of_a_stopped_process(scene):
    scene.watch, scene.state = scene.watchdog(stopped_s=5.0), "T"
    assert 5 <= scene.watched(10)[1] <= 5 + 2 * CHECK_INTERVAL_S


def test_the_kernel_reports_how_long_a_process_waited():
    assert 0 <= runqueue_wait_ns(os.getpid()) < 10**18
    assert runqueue_wait_ns(2**22 + 1) == 0


def test_work_counts_tokens_and_what_they_look_at():
    assert step_cost(StepPlan(1, rows(1, 1))) == 2 * TOKEN_BASE_COST + 1
    assert step_cost(StepPlan(1, rows(1, start=5000))) == TOKEN_BASE_COST + 5000
    assert step_cost(StepPlan(1, rows(100))) == 100 * TOKEN_BASE_COST + 5000
    assert step_cost(StepPlan(1, ())) == 0


def test_an_expectation_never_shrinks_with_the_work():
    made = StepTimeEstimate()
    made.update(1 << 20, 5 * S)
    made.update(1 << 10, 7 * S)
    assert (
        made.estimate_ns(1 << 9) == made.estimate_ns(1 << 10) == made.estimate_ns(1 << 20) == 7 * S
    )
    assert made.estimate_ns(1 << 22) == 28 * S


@pytest.mark.parametrize("state", ["X", "Z"])
def test_a_process_that_is_gone_is_not_ready(scene, state):
    scene.state = state
    assert scene.trouble() == "gone"


def test_the_state_of_a_process_is_a_letter():
    assert process_state(os.getpid()) in ("R", "S")
    assert process_state(1 << 30) == "X"

"""Engine restarter: how often another engine is started, and the errors meanwhile."""

import threading

import pytest

from quire.config.options import Options
from quire.engine.messages import WireError
from quire.engine.supervise import engine_group
from quire.engine.supervise.engine_group import EngineGroup
from quire.engine.supervise.engine_group_thread import EngineGroupThread
from quire.engine.supervise.engine_restarter import EngineRestarter, RestartBudget
from quire.engine.supervise.process_pipe import (
    EngineRestored,
    EngineStarted,
    EngineTerminated,
    EngineUnavailable,
    ModelLocated,
    ProcessFailed,
    ProcessPipe,
    RestartEngine,
)
from quire.errors import EngineDead, NoRoom
from tests.pure.config.test_resolve import run


class Process:
    """In place of a process that runs until it is killed."""

    def __init__(self):
        self.status = None

    def wait(self):
        return 0 if self.status is None else self.status

    def kill(self):
        self.status = -9


class FakeEngine:
    """In place of an EngineProcess."""

    def __init__(self, number):
        self.folder = f"folder {number}"
        self.child = self
        self.process = Process()
        self.pipe, theirs = ProcessPipe.create_pair()
        self.mouth = ProcessPipe(theirs)
        self.stops = 0

    def poll(self):
        return self.process.status

    def stop(self, timeout):
        self.stops += 1

    def running_ids(self):
        return ["a"]

    def die(self):
        self.process.kill()
        self.mouth.close()


class Engines:
    def __init__(self, *, failing=()):
        self.made, self.given, self._failing = [], [], failing

    def __call__(self, child):
        self.given.append(child)
        if len(self.made) in self._failing:
            raise OSError("no more processes")
        self.made.append(FakeEngine(len(self.made)))
        return self.made[-1]

    def end(self):
        for one in self.made:
            one.pipe.close()
            one.mouth.close()


CONFIG = run().config
FOUND, BUILT = (
    ModelLocated(config=CONFIG, tokenizer_folder=None),
    EngineStarted(config=CONFIG, startup_seconds={}, addresses=("first",)),
)


def built(address):
    """The report of an engine that listens there."""
    return EngineStarted(config=CONFIG, startup_seconds={}, addresses=(address,))


def kept(engines, most=2):
    keeper = EngineRestarter(engines, RestartBudget(most, 60.0))
    assert [keeper.handle(word) for word in (FOUND, BUILT)] == [FOUND, BUILT]
    return keeper


@pytest.fixture
def engines():
    made = Engines()
    yield made
    made.end()


def test_so_often_within_the_window_and_no_oftener():
    now = [0.0]
    restarts = RestartBudget(2, 10.0, lambda: now[0])
    assert [restarts.try_take() for _ in range(3)] == [True, True, False]
    now[0] = 9.9
    assert not restarts.try_take()
    now[0] = 10.0
    assert [restarts.try_take() for _ in range(3)] == [True, True, False]
    assert not RestartBudget(0, 10.0).try_take()


def test_an_engine_that_dies_is_away_until_another_is_built(engines):
    keeper = kept(engines)
    engines.made[0].die()
    told = keeper.on_engine_exit()
    assert isinstance(told, EngineUnavailable)
    assert told.reason == "the engine's process ended: killed by signal 9"
    assert told.running_ids == ["a"]
    assert keeper.unavailable is told
    assert keeper.handle(FOUND) is None  # known
    assert keeper.handle(built("second")) == EngineRestored(address="second")
    assert keeper.unavailable is None


def test_one_that_dies_while_it_starts_ran_no_request(engines):
    keeper = kept(engines)
    keeper.on_engine_exit()
    keeper.handle(ProcessFailed(error=WireError("NoRoom", "the memory is not free yet")))
    told = keeper.on_engine_exit()
    assert (told.reason, told.running_ids) == ("the memory is not free yet", [])
    assert len(engines.made) == 3
    assert [one.stops for one in engines.made] == [0, 1, 0]  # the first one's folder is shared
    keeper.stop()
    assert [one.stops for one in engines.made] == [1, 1, 1]


def test_one_too_many_is_the_end(engines):
    keeper = kept(engines, most=1)
    keeper.on_engine_exit()
    keeper.handle(BUILT)
    keeper.handle(ProcessFailed(error=WireError("EngineDead", "the engine died: no reason")))
    assert keeper.on_engine_exit() == EngineTerminated(reason="the engine died: no reason")
    assert len(engines.made) == 2


def test_the_first_one_must_start(engines):
    keeper = EngineRestarter(engines, RestartBudget(5, 60.0))
    with pytest.raises(NoRoom, match="too big"):
        keeper.handle(ProcessFailed(error=WireError("NoRoom", "too big")))
    assert isinstance(keeper.on_engine_exit(), EngineTerminated)


def test_one_that_hangs_is_killed_and_the_reason_is_sent(engines):
    keeper = kept(engines)
    assert keeper.handle(RestartEngine(reason="no step for 30 s")) is None
    assert engines.made[0].process.status == -9
    assert keeper.on_engine_exit().reason == "no step for 30 s"
    keeper.handle(BUILT)
    engines.made[1].die()
    assert "signal 9" in keeper.on_engine_exit().reason  # a reason is told once


def test_what_cannot_be_started_is_dead():
    engines = Engines(failing=[1])
    told = kept(engines).on_engine_exit()
    assert isinstance(told, EngineTerminated)
    assert "no more processes" in told.reason
    engines.end()


class Dog:
    """In place of a watchdog."""

    check_interval_s = None

    def __init__(self, *given):
        self.records = []

    def create_child(self):
        return None

    def set_start_time(self, seconds):
        pass

    def record_death(self, *given):
        self.records.append(given)

    def close(self):
        pass


@pytest.fixture
def group(engines, monkeypatch, tmp_path):
    """A group of engines in the fixture's place."""

    def make(count, most=1):
        monkeypatch.setattr(engine_group, "Watchdog", Dog)
        monkeypatch.setattr(
            engine_group, "EngineProcessHandle", lambda options, child, **more: engines(child)
        )
        options = Options.from_flat(
            {"data_parallel_size": count, "max_engine_restarts": most, "device": "cpu"}
        )
        return EngineGroup(options, tmp_path, log_level="INFO")

    return make


def test_without_a_supervisor_a_thread_handles_the_messages(engines, group):
    tended = EngineGroupThread(group(2))
    for one in engines.made:
        one.mouth.send(FOUND)
    for one in engines.made:
        one.mouth.send(BUILT)
    assert tended.wait_model_located() == FOUND
    assert tended.wait_started().addresses == ("first", "first")
    engines.made[1].die()
    assert tended.pipe.receive(5).engine == 1
    engines.made[2].mouth.send(FOUND)
    engines.made[2].mouth.send(built("third"))
    assert tended.pipe.receive(5) == EngineRestored(address="third", engine=1)
    assert tended.addresses == ["first", "third"]
    for engine, number in ((1, 2), (0, 0)):  # the budget of the other is its own
        tended.pipe.send(RestartEngine(reason="it hangs", engine=engine))
        while engines.made[number].process.status is None:
            threading.Event().wait(0.001)
        engines.made[number].mouth.close()
        found = tended.pipe.receive(5)
        assert (type(found), found.engine, found.reason) == (
            (EngineTerminated, EngineUnavailable)[engine == 0],
            engine,
            "it hangs",
        )
    engines.made[3].die()
    assert tended.pipe.receive(5).engine == 0
    assert tended.pipe.receive(5) is None
    tended.stop()
    assert [one.stops for one in engines.made] == [1, 1, 1, 1]


def test_an_engine_that_cannot_start_is_the_error_of_the_start(engines, group):
    tended = EngineGroupThread(group(2))
    engines.made[0].mouth.send(FOUND)
    engines.made[1].mouth.send(ProcessFailed(error=WireError("NoRoom", "too big")))
    with pytest.raises(NoRoom, match="too big"):
        (tended.wait_model_located(), tended.wait_started())
    tended.stop()


def test_an_engine_that_ends_in_its_start_is_the_error_of_the_start(engines, group):
    tended = EngineGroupThread(group(2))
    engines.made[0].die()
    with pytest.raises(EngineDead, match=r"did not start.*signal 9"):
        tended.wait_model_located()
    tended.stop()


class Standing:
    """In place of a process that stands by."""

    def __init__(self):
        self.process = self
        self.status = None
        self.stops = 0

    def poll(self):
        return self.status

    def stop(self, timeout):
        self.stops += 1


def test_a_standby_process_is_used_and_replaced(engines):
    standing = []

    def stand_by():
        standing.append(Standing())
        return standing[-1]

    keeper = EngineRestarter(engines, RestartBudget(9, 60.0), stand_by)
    assert standing == []  # the first one starts alone
    keeper.handle(BUILT)
    keeper.on_engine_exit()
    keeper.handle(BUILT)
    standing[1].status = 1  # it is gone itself
    keeper.on_engine_exit()
    keeper.handle(BUILT)
    assert engines.given == [None, standing[0], None]
    keeper.stop()
    assert [one.stops for one in standing] == [0, 0, 1]


def test_its_end_ends_the_engine(engines, group):
    tended = EngineGroupThread(group(1))
    tended.stop()
    assert engines.made[0].stops == 1

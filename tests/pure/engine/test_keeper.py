"""Who keeps an engine: how often another is started, and what who asks is told."""

import threading

import pytest

from quire.engine.keeper import Keeper, Restarts, Tended
from quire.engine.link import Away, Back, Built, Died, Failed, Found, Link, Restart
from quire.engine.messages import Fault
from quire.errors import NoRoom
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
        self.link, theirs = Link.pair()
        self.mouth = Link(theirs)
        self.stops = 0

    def poll(self):
        return self.process.status

    def stop(self, timeout):
        self.stops += 1

    def aboard(self):
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
            one.link.close()
            one.mouth.close()


CONFIG = run().config
FOUND, BUILT = Found(config=CONFIG, tokenizer=None), Built(config=CONFIG, seconds={})


def kept(engines, most=2):
    keeper = Keeper(engines, Restarts(most, 60.0))
    assert [keeper.hear(word) for word in (FOUND, BUILT)] == [FOUND, BUILT]
    return keeper


@pytest.fixture
def engines():
    made = Engines()
    yield made
    made.end()


def test_so_often_within_the_window_and_no_oftener():
    now = [0.0]
    restarts = Restarts(2, 10.0, lambda: now[0])
    assert [restarts.take() for _ in range(3)] == [True, True, False]
    now[0] = 9.9
    assert not restarts.take()
    now[0] = 10.0
    assert [restarts.take() for _ in range(3)] == [True, True, False]
    assert not Restarts(0, 10.0).take()


def test_an_engine_that_dies_is_away_until_another_is_built(engines):
    keeper = kept(engines)
    engines.made[0].die()
    told = keeper.lost()
    assert isinstance(told, Away)
    assert told.why == "the engine's process ended: killed by signal 9"
    assert told.aboard == ["a"]
    assert keeper.away is told
    assert keeper.hear(FOUND) is None  # known
    assert keeper.hear(BUILT) == Back(folder="folder 1")
    assert keeper.away is None


def test_one_that_dies_while_it_starts_had_nobody_aboard(engines):
    keeper = kept(engines)
    keeper.lost()
    keeper.hear(Failed(fault=Fault("NoRoom", "the memory is not free yet")))
    told = keeper.lost()
    assert (told.why, told.aboard) == ("the memory is not free yet", [])
    assert len(engines.made) == 3
    assert [one.stops for one in engines.made] == [0, 1, 0]  # the first one's folder is shared
    keeper.stop()
    assert [one.stops for one in engines.made] == [1, 1, 1]


def test_one_too_many_is_the_end(engines):
    keeper = kept(engines, most=1)
    keeper.lost()
    keeper.hear(BUILT)
    keeper.hear(Failed(fault=Fault("EngineDead", "the engine died: no reason")))
    assert keeper.lost() == Died(why="the engine died: no reason")
    assert len(engines.made) == 2


def test_the_first_one_must_start(engines):
    keeper = Keeper(engines, Restarts(5, 60.0))
    with pytest.raises(NoRoom, match="too big"):
        keeper.hear(Failed(fault=Fault("NoRoom", "too big")))
    assert isinstance(keeper.lost(), Died)


def test_one_that_hangs_is_killed_and_its_reason_told(engines):
    keeper = kept(engines)
    assert keeper.hear(Restart(reason="no step for 30 s")) is None
    assert engines.made[0].process.status == -9
    assert keeper.lost().why == "no step for 30 s"
    keeper.hear(BUILT)
    engines.made[1].die()
    assert "signal 9" in keeper.lost().why  # a reason is told once


def test_what_cannot_be_started_is_dead():
    engines = Engines(failing=[1])
    told = kept(engines).lost()
    assert isinstance(told, Died)
    assert "no more processes" in told.why
    engines.end()


def test_without_a_supervisor_a_thread_hears_and_tells(engines):
    keeper = kept(engines, most=1)
    tended = Tended(keeper)
    engines.made[0].die()
    assert isinstance(tended.link.receive(5), Away)
    engines.made[1].mouth.send(FOUND)
    engines.made[1].mouth.send(BUILT)
    assert tended.link.receive(5) == Back(folder="folder 1")
    assert tended.folder == "folder 1"
    tended.link.send(Restart(reason="it hangs"))
    while engines.made[1].process.status is None:
        threading.Event().wait(0.001)
    engines.made[1].mouth.close()
    assert tended.link.receive(5) == Died(why="it hangs")
    assert tended.link.receive(5) is None
    tended.stop()
    assert engines.made[1].stops == 1


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


def test_one_that_stands_by_is_taken_and_replaced(engines):
    standing = []

    def stand_by():
        standing.append(Standing())
        return standing[-1]

    keeper = Keeper(engines, Restarts(9, 60.0), stand_by)
    assert standing == []  # the first one starts alone
    keeper.hear(BUILT)
    keeper.lost()
    keeper.hear(BUILT)
    standing[1].status = 1  # it is gone itself
    keeper.lost()
    keeper.hear(BUILT)
    assert engines.given == [None, standing[0], None]
    keeper.stop()
    assert [one.stops for one in standing] == [0, 0, 1]


def test_its_end_ends_the_engine(engines):
    tended = Tended(kept(engines))
    tended.stop()
    assert engines.made[0].stops == 1

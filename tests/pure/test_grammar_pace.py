"""Who goes at full speed beside an engine, and who gives way."""

import os
import threading

import pytest

from quire.grammar import pace
from quire.grammar.pace import BURST_S, SHARE, Allowance


def test_a_burst_goes_at_full_speed_and_then_a_share_of_the_time():
    now = 0.0
    allowance = Allowance(lambda: now)
    assert allowance.left
    allowance.spend(BURST_S + 1.0)
    assert not allowance.left
    now += 0.9 / SHARE
    assert not allowance.left
    now += 0.2 / SHARE
    assert allowance.left


def test_time_that_was_not_used_is_not_saved_for_ever():
    now = 0.0
    allowance = Allowance(lambda: now)
    now += 1e6
    assert allowance.left
    allowance.spend(BURST_S)
    assert not allowance.left


def nice():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_what_is_done_modestly_gives_way_and_nothing_else_does():
    assert pace.run(nice, modestly=True) == 19
    assert pace.run(nice, modestly=False) == nice() == 0


def test_what_takes_long_gives_way_from_then_on():
    released = threading.Event()

    def work():
        released.wait(20)
        return nice()

    thread = threading.Timer(0.05, released.set)
    thread.start()
    assert pace.run(work, modestly=False, most=0.001) == 19
    thread.join()


def test_what_it_raises_is_raised_where_it_is_waited_for():
    with pytest.raises(ZeroDivisionError):
        pace.run(lambda: 1 // 0, modestly=True)

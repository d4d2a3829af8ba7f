"""Which threads run at full speed beside an engine, and which yield."""

import os
import threading
import time

import pytest

from quire.grammar.compilation import cpu_throttle
from quire.grammar.compilation.cpu_throttle import BURST_S, SHARE, CpuBudget


def allowance(left=BURST_S):
    """With so many seconds left, on a clock that stands."""
    made = CpuBudget(lambda: 0.0)
    made.spend(BURST_S - left)
    return made


def test_a_burst_goes_at_full_speed_and_then_a_share_of_the_time():
    now = 0.0
    made = CpuBudget(lambda: now)
    assert made.left == BURST_S
    made.spend(BURST_S + 1.0)
    assert made.left < 0
    now += 0.9 / SHARE
    assert made.left < 0
    now += 0.2 / SHARE
    assert 0 < made.left < 0.2


def test_time_that_was_not_used_is_not_saved_for_ever():
    now = 0.0
    made = CpuBudget(lambda: now)
    now += 1e6
    assert made.left == BURST_S


def nice():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def spin(seconds):
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def spin_until_nice():
    deadline = time.monotonic() + 60
    while nice() != 19:
        assert time.monotonic() < deadline
    return "nice"


def test_what_is_done_without_an_allowance_gives_way_and_nothing_else_does():
    here = nice()
    assert cpu_throttle.run_throttled(nice, allowance(0.0)) == 19
    assert cpu_throttle.run_throttled(nice, allowance()) == nice() == here


def test_a_thread_that_blocks_no_other_yields_the_core_at_once():
    policy = lambda: os.sched_getscheduler(threading.get_native_id())  # noqa: E731
    assert cpu_throttle.run_throttled(policy, allowance(0.0), idly=True) == os.SCHED_IDLE
    assert cpu_throttle.run_throttled(policy, allowance(0.0)) == os.SCHED_OTHER
    assert cpu_throttle.run_throttled(policy, allowance(), idly=True) == os.SCHED_OTHER


def test_what_is_done_at_full_speed_uses_the_allowance_up():
    made = allowance(0.14)
    cpu_throttle.run_throttled(lambda: spin(0.05), made)
    assert 0.04 < made.left < 0.1
    spent = allowance(-1.0)
    cpu_throttle.run_throttled(lambda: spin(0.001), spent)
    assert spent.left == pytest.approx(-1.0)


def test_what_takes_more_than_is_left_gives_way_from_then_on():
    assert cpu_throttle.run_throttled(spin_until_nice, allowance(0.02)) == "nice"


def test_a_sleeping_thread_uses_no_budget():
    made = allowance(0.05)
    cpu_throttle.run_throttled(lambda: time.sleep(0.2), made)
    assert made.left > 0.04


def test_what_it_raises_is_raised_where_it_is_waited_for():
    with pytest.raises(ZeroDivisionError):
        cpu_throttle.run_throttled(lambda: 1 // 0, allowance())

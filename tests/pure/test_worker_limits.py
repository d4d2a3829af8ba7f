"""What a worker does to itself, in a process of its own."""

import subprocess
import sys

TICKED = """
import resource, signal
from quire.sandbox.limits import ENDLESS_TIMER_S, ResourceLimits

limits = ResourceLimits()
signal.setitimer(signal.ITIMER_PROF, ENDLESS_TIMER_S - 100)  # ticks found it at work more often than it was
limits.set(1.0, 1 << 30)
print(resource.getrlimit(resource.RLIMIT_CPU)[0])
"""
SPENT = """
import signal, time
from quire.sandbox.limits import ResourceLimits

began = time.process_time()
signal.signal(signal.SIGXCPU, lambda *_: print(time.process_time() - began) or exit(0))
ResourceLimits().set(0.1, 1 << 30)
while True:
    pass
"""


def printed(program):
    made = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    return float(made.stdout)


def test_processor_time_is_counted_by_the_clock_that_its_limit_goes_by():
    assert printed(TICKED) >= 101


def test_the_limit_ends_what_takes_more():
    assert 0.1 < printed(SPENT) < 10

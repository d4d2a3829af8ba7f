"""Limits a worker process: the OOM killer chooses it first, and jobs have resource limits."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

from quire.sandbox.parent_death import exit_with_parent

OOM_SCORE_ADJ = b"800"
"""The OOM killer prefers this process."""
ENDLESS_TIMER_S = 1e9
"""A timer that never ends, used to read its clock."""


class ResourceLimits:
    """Limits of this process. Made before Landlock closes files."""

    def __init__(self) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self._cpu_seconds_before = usage.ru_utime + usage.ru_stime
        signal.setitimer(signal.ITIMER_PROF, ENDLESS_TIMER_S)
        self._status_fd: int | None = None
        with suppress(OSError):
            self._status_fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)

    def set(self, seconds: float, memory: int) -> None:
        """Let the kernel stop a job that exceeds them from now on, also without the parent.

        seconds: of processor time. memory: bytes beyond what it has.
        """
        cpu = int(self.cpu_seconds_used() + seconds) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.RLIM_INFINITY))
        data_bytes = self.data_bytes()
        if data_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (data_bytes + memory, resource.RLIM_INFINITY))

    def cpu_seconds_used(self) -> float:
        """Return the processor seconds of this process, by the clock of its limit.

        Linux samples the running process at ticks of its own clock, and after thousands of short
        jobs this differs by seconds from the actual use: the limit would end a job too early that
        had just begun. A profiling timer uses the same clock.
        """
        return self._cpu_seconds_before + ENDLESS_TIMER_S - signal.getitimer(signal.ITIMER_PROF)[0]

    def data_bytes(self) -> int | None:
        """Return the bytes of private memory of this process; None if unknown."""
        if self._status_fd is None:
            return None
        with suppress(OSError):
            for line in os.pread(self._status_fd, 1 << 14, 0).splitlines():
                if line.startswith(b"VmData:"):
                    return int(line.split()[1]) * 1024
        return None


def setup_worker_process(name: str) -> None:
    """Leave signals to the parent, be the first that the OOM killer ends, and end with the parent.

    name: for `ps` and `top`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent handles them
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(OOM_SCORE_ADJ)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)
    exit_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

"""What a worker does to itself: it is the first to go, and no job takes more than it may."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

FIRST_TO_DIE = b"800"
"""Where memory runs out: rather this process than others."""


class Limits:
    """The limits of this process. Made before files are closed to it."""

    def __init__(self) -> None:
        self._status: int | None = None
        with suppress(OSError):
            self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)

    def set(self, seconds: float, memory: int) -> None:
        """Have the system stop what takes more from now on, also when nobody watches any more.

        seconds: of processor time. memory: bytes beyond what it has.
        """
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu = int(used.ru_utime + used.ru_stime + seconds) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.RLIM_INFINITY))
        held = self.held()
        if held is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (held + memory, resource.RLIM_INFINITY))

    def held(self) -> int | None:
        """Bytes of private memory that this process has; None where nobody says."""
        if self._status is None:
            return None
        with suppress(OSError):
            for line in os.pread(self._status, 1 << 14, 0).splitlines():
                if line.startswith(b"VmData:"):
                    return int(line.split()[1]) * 1024
        return None


def be_one_of_many(name: str) -> None:
    """Leave signals to who started us, be the first to go, and end with who started us.

    name: for `ps` and `top`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are meant for who started us
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(FIRST_TO_DIE)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

"""Worker handle: runs one job at a time in a worker, and kills a worker that takes too long."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from quire.sandbox.pipe import WorkerPipe

StartWorker = Callable[[], tuple["subprocess.Popen[bytes]", socket.socket]]
"""Starts a process that serves the other end of the socket."""

WALL_TIME_FACTOR = 20.0
"""Wall time of a job relative to its processor time: workers have the lowest priority."""
POLL_S = 0.5
"""Seconds between two checks of a job's processor time."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

W = TypeVar("W")


class CpuTimeExceeded(Exception):
    """A job reached its limit of processor time. The worker has ended."""


class WallTimeExceeded(Exception):
    """A start or a job got far too little processor time. The worker has ended."""


class WorkerExited(Exception):
    """The worker ended. status: exit status of its process."""

    def __init__(self, status: int | None) -> None:
        super().__init__(f"exit status {status}")
        self.status = status

    @property
    def was_killed(self) -> bool:
        """Whether another process killed it: the kernel does if memory runs out."""
        return self.status == -signal.SIGKILL


class WorkerHandle(Generic[W]):
    """One worker. Its owner must call close()."""

    def __init__(self, hire: StartWorker, words: msgspec.msgpack.Decoder[W]) -> None:
        """Start a worker. Raises OSError."""
        self._process, end = hire()
        self.pipe: WorkerPipe[W] = WorkerPipe(end, words)

    def wait_ready(self, within: float, order: W | None = None) -> W:
        """Return its first message, a reply to `order` if given. within: seconds of wall time.

        Raises WallTimeExceeded, WorkerExited: then the worker is closed.
        """
        try:
            if order is not None:
                self.pipe.send(order)
            word = self.pipe.receive(within)
        except TimeoutError:
            self.close()
            raise WallTimeExceeded from None
        except OSError:
            word = None
        if word is None:
            raise self._exited()
        return word

    def run_job(
        self,
        job: W,
        seconds: float,
        waits: Callable[[], None] = lambda: None,
        *,
        by_clock: float | None = None,
    ) -> W:
        """Run a job within `seconds` of processor time; return the reply. waits: called often.

        by_clock: maximum of wall time; None: WALL_TIME_FACTOR times the processor time.
        Raises CpuTimeExceeded, WallTimeExceeded, WorkerExited: then the worker is closed.
        """
        try:
            self.pipe.send(job)
            word = self._wait_result(seconds, by_clock or seconds * WALL_TIME_FACTOR, waits)
        except OSError:
            word = None
        if word is not None:
            return word
        gone = self._exited()
        raise CpuTimeExceeded if gone.status == -signal.SIGXCPU else gone

    def _exited(self) -> WorkerExited:
        with suppress(subprocess.TimeoutExpired):  # its socket is closed a moment before it ends
            self._process.wait(POLL_S)
        self.close()
        return WorkerExited(self._process.returncode)

    def _wait_result(self, seconds: float, by_clock: float, waits: Callable[[], None]) -> W | None:
        used, began = self._cpu_seconds(), time.monotonic()
        left = seconds
        while True:
            try:
                return self.pipe.receive(min(max(left, 0.01), POLL_S))
            except TimeoutError:
                waits()
            took = time.monotonic() - began
            now = self._cpu_seconds()
            left = seconds - (took if now is None or used is None else now - used)
            if left <= 0:
                self.close()
                raise CpuTimeExceeded
            if took > by_clock:
                self.close()
                raise WallTimeExceeded

    def _cpu_seconds(self) -> float | None:
        """Return its processor seconds; None if the system does not report them."""
        try:
            fields = (
                Path(f"/proc/{self._process.pid}/stat").read_bytes().rpartition(b")")[2].split()
            )
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the worker accepts jobs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process, from any thread; a waiting call raises that it has ended."""
        self._process.kill()

    def close(self) -> None:
        """End the worker. May be called again."""
        self._process.kill()
        self._process.wait()
        self.pipe.close()

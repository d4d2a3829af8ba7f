"""Handle of a worker in its parent: runs one job at a time, kills a worker that takes too long."""

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
"""Starts a process that serves at the other end of the socket."""

WALL_TIME_FACTOR = 20.0
"""A job may take so many times its processor time by the clock: a worker gives way to all."""
POLL_S = 0.5
"""How often it is looked at what a job has used."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

W = TypeVar("W")


class CpuTimeExceeded(Exception):
    """A job met the limit of processor time. The worker is gone."""


class WallTimeExceeded(Exception):
    """A start or a job did not get its processor time by far. The worker is gone."""


class WorkerExited(Exception):
    """The worker ended. status: of its process."""

    def __init__(self, status: int | None) -> None:
        super().__init__(f"exit status {status}")
        self.status = status

    @property
    def was_killed(self) -> bool:
        """Somebody else did it: the system does where memory runs out."""
        return self.status == -signal.SIGKILL


class WorkerHandle(Generic[W]):
    """One worker. Who has it calls close() in the end."""

    def __init__(self, hire: StartWorker, words: msgspec.msgpack.Decoder[W]) -> None:
        """Start one. Raises OSError."""
        self._process, end = hire()
        self.pipe: WorkerPipe[W] = WorkerPipe(end, words)

    def wait_ready(self, within: float, order: W | None = None) -> W:
        """Its first message, which answers its order if it needs one. within: seconds by the clock.

        Raises TooBusy, Gone: then it is closed.
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
        """The answer to a job that may take so much processor time. waits: called now and then.

        by_clock: seconds that it may take at most; None: WALL times its processor time.
        Raises TookTooMuch, TooBusy, Gone: then it is closed.
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
        """Processor time it has used; None where the system does not report it."""
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
        """It takes jobs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process, from any thread; a waiting call learns that it has ended."""
        self._process.kill()

    def close(self) -> None:
        """End it. Harmless when called again."""
        self._process.kill()
        self._process.wait()
        self.pipe.close()
